"""The limits of queues, lending limits and reservations, where several of them apply."""

from __future__ import annotations

import random
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from ray_workers.shared.slices import Slice
from service.config.node_types import OPEN
from service.domain.scheduling.elastic.sizing import ElasticJob, ReportedStep
from service.domain.scheduling.placement.slots import count
from service.domain.scheduling.policy import (
    Decision,
    Grow,
    Growing,
    Node,
    Preempt,
    Request,
    RunningJob,
    Shrink,
    Snapshot,
    Start,
    Stay,
    Wait,
    plan,
)
from service.domain.scheduling.rules.dependencies import ArrayLimit
from service.domain.scheduling.rules.queues import Queue
from tests.unit.service.domain.scheduling.policy.test_reservations import reserved
from tests.unit.service.domain.scheduling.snapshots import (
    GPU,
    HOUR,
    NOW,
    running,
    snapshot,
    waiting,
)

TIMES = tuple(ReportedStep(n, -(-n // 4), 64, 1.0 / n) for n in (1, 2, 4, 8))
TWO_NODES = {"n1": 4.0, "n2": 4.0}


def decide(*args: Any, **facts: Any) -> dict[str, Decision]:
    return {each.job_id: each for each in plan(snapshot(*args, **facts), NOW)}


def group(name: str, slices: dict[str, int], **fields: Any) -> RunningJob:
    """A group of 1 to 8 workers."""
    there = running(name, slices, held_s=HOUR, **fields)
    return replace(there, request=Request(8, GPU, 1))


def sizes(most: int = 8) -> ElasticJob:
    return ElasticJob(1, most, 64, 64, TIMES, steps_left=9000.0)


@pytest.mark.parametrize(
    "queues",
    [
        [Queue("a", quota={"GPU": 4.0}, lending_limit={"GPU": 0.0}), Queue("b")],
        [Queue("b", limit={"GPU": 4.0})],
        [Queue("b", user_limit={"GPU": 4.0})],
        [Queue("b", quota={"GPU": 2.0}, borrowing_limit={"GPU": 2.0})],
        [Queue("top", limit={"GPU": 4.0}), Queue("b", parent="top")],
    ],
)
def test_a_group_is_not_resized_beyond_its_limits(queues: list[Queue]) -> None:
    """The group would resume with the size that it had."""
    there = [group("x", {"n1": 4}, queue="b")]
    facts = {"elastic": {"x": sizes()}, "totals": TWO_NODES}
    assert isinstance(decide([], there, **facts)["x"], Preempt)
    found = decide([], there, queues=tuple(queues), **facts)
    assert not any(isinstance(each, Preempt) for each in found.values())


def test_groups_that_share_a_limit_are_not_all_resized() -> None:
    """Both groups could use the remaining 4 GPUs of the limit, but not both of them."""
    there = [group("x", {"n1": 2}, queue="b"), group("y", {"n1": 2}, queue="b", seq=2)]
    facts = {"elastic": {"x": sizes(), "y": sizes()}, "totals": {**TWO_NODES, "n3": 4.0, "n4": 4.0}}
    assert len(decide([], there, **facts)) == 2
    found = decide([], there, queues=(Queue("b", limit={"GPU": 8.0}),), **facts)
    assert [isinstance(each, Preempt) for each in found.values()] == [True]


def drawn(draw: random.Random) -> Snapshot:
    """Groups on up to 4 nodes, in queues with limits, and a queue that keeps slots. No group is
    within a quota."""
    keeps = {"GPU": float(draw.randint(0, 8))}
    queues = [
        Queue("a", quota=keeps, lending_limit={"GPU": float(draw.randint(0, 4))}),
        Queue("top", limit={"GPU": float(draw.randint(4, 16))}),
    ]
    names = ["b", "c"]
    for name in names:
        limits = {
            rule: {"GPU": float(draw.randint(2, 10))}
            for rule in ("limit", "user_limit")
            if draw.random() < 0.25
        }
        queues.append(Queue(name, parent=draw.choice([None, "top"]), **limits))
    totals = {f"n{number}": 4.0 for number in range(draw.randint(1, 4))}
    free = dict(totals)
    there, elastic = [], {}
    for number in range(draw.randint(1, 3)):
        node = draw.choice(sorted(free))
        if free[node] >= 1:
            size = draw.choice([each for each in (1, 2, 4) if each <= free[node]])
            free[node] -= size
            name, queue = f"r{number}", draw.choice(names)
            there.append(group(name, {node: size}, queue=queue, seq=number))
            elastic[name] = sizes()
    return snapshot([], there, totals, queues=tuple(queues), elastic=elastic)


def test_resized_groups_resume_with_more_workers() -> None:
    """Restart the groups that are resized, and plan again; the other groups stay."""
    resized = 0
    for seed in range(400):
        seen = drawn(random.Random(seed))
        running = {job.job_id: job for job in seen.running}
        asked = [each for each in plan(seen, NOW) if isinstance(each, Preempt)]
        grows = [each.job_id for each in asked if "resumes on" in each.reason.message]
        if len(grows) < len(asked):  # others pause
            continue
        left = [replace(job, held_s=0.0) for name, job in running.items() if name not in grows]
        again = [
            waiting(name, 8, min_workers=1, queue=running[name].queue, seq=running[name].seq)
            for name in grows
        ]
        totals = {node.id: node.total["GPU"] for node in seen.nodes}
        facts = {"queues": seen.queues, "elastic": seen.elastic, "totals": totals}
        found = decide(again, left, **facts)
        gained = 0
        for name in grows:
            start, before = found[name], running[name]
            assert isinstance(start, Start), (seed, start)
            assert count(start.slices) >= count(before.slices), seed
            gained += count(start.slices) - count(before.slices)
            resized += 1
        assert gained > 0 or not grows, seed
    assert resized > 50


@pytest.mark.parametrize("quota", [0.0, 4.0])
def test_a_group_does_not_leave_to_grow_if_others_would_take_its_slots(quota: float) -> None:
    """If both left and y is within its quota, y would get all slots."""
    there = [group("x", {"n": 1}, queue="b"), group("y", {"n": 1}, queue="a", seq=2)]
    facts = {"elastic": {"x": sizes(), "y": sizes()}, "queues": (Queue("a", quota={"GPU": quota}),)}
    found = decide([], there, **facts)
    asked = {name for name, each in found.items() if isinstance(each, Preempt)}
    assert asked == ({"y"} if quota else {"x", "y"})


@pytest.mark.parametrize("names_it", [False, True])
@pytest.mark.parametrize("parent", [None, "top"])
def test_a_job_that_waits_for_a_window_leaves_the_limit_to_others(
    names_it: bool, parent: str | None
) -> None:
    """It can't start before a maintenance window has ended, or its reservation is too small."""
    limit = {"GPU": 8.0}
    queues = [Queue("b", limit=limit), Queue("c")]
    if parent is not None:
        queues = [Queue(parent, limit=limit), Queue("b", parent=parent), Queue("c", parent=parent)]
    there = reserved(-1, node_ids=frozenset({"n2"}), users=("ann",) * names_it)
    large = waiting("large", 8, queue="b", owner="ann", priority=60)
    if names_it:
        large = replace(large, reservation="class")
    small = waiting("small", 1, queue="b" if parent is None else "c")
    found = decide([large, small], totals=TWO_NODES, queues=tuple(queues), reservations=(there,))
    assert isinstance(found["large"], Wait)
    assert isinstance(found["small"], Start)


def test_a_job_that_waits_for_running_jobs_keeps_the_limit() -> None:
    large, small = waiting("large", 8, queue="b", priority=60), waiting("small", 1, queue="b")
    there = [running("x", {"n1": 1}, yields=False)]
    queues = (Queue("b", limit={"GPU": 8.0}),)
    found = decide([large, small], there, totals=TWO_NODES, queues=queues)
    assert isinstance(found["small"], Wait)
    assert found["small"].reason.code == "queue_limit"


@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize("parent", [None, "top"])
def test_a_job_that_waits_for_a_window_leaves_the_quota_to_others(
    waits: bool, parent: str | None
) -> None:
    """The small job is within the quota, and takes slots back, if the large one can't start."""
    quota = {"GPU": 8.0}
    queues = [Queue("b", quota=quota), Queue("c")]
    if parent is not None:
        queues = [Queue(parent, quota=quota), Queue("b", parent=parent), Queue("c")]
    there = [running("x", {"n1": 4}, queue="c", yields=False)]
    by = (reserved(-1, node_ids=frozenset({"n2"}), users=()),) if waits else ()
    large, small = waiting("large", 8, queue="b", priority=60), waiting("small", 4, queue="b")
    facts = {"totals": TWO_NODES, "queues": tuple(queues), "reservations": by}
    asked = decide([large, small], there, **facts)["x"]
    assert isinstance(asked, Preempt)
    assert asked.because_of == ("small" if waits else "large")


@pytest.mark.parametrize("why", ["retried soon", "retried later", "preparing"])
@pytest.mark.parametrize("has_room", [False, True])
def test_a_job_that_backs_off_keeps_slots_only_if_it_could_start_on_them(
    why: str, has_room: bool
) -> None:
    """A maintenance window includes n2, so a job that needs 8 GPUs can't start before its end."""
    large = waiting("large", 8, queue="b", priority=60)
    if why == "preparing":
        large = replace(large, preparing="its environment is being prepared")
    else:
        in_s = 5.0 if why == "retried soon" else 60.0
        large = replace(large, not_before=NOW + timedelta(seconds=in_s))
    small = waiting("small", queue="b", yields=False)
    there = [running("x", {"n1": 1}, queue="b", held_s=0.0)]
    growing = Growing("x", 1, 50, 1, Request(2, GPU, 1), there[0].slices, queue="b")
    by = () if has_room else (reserved(-1, node_ids=frozenset({"n2"}), users=()),)
    facts = {"totals": TWO_NODES, "reservations": by, "growing": (growing,)}
    facts["queues"] = (Queue("b", limit={"GPU": 9.0}),)
    found = decide([large, small], there, **facts)
    assert isinstance(found["small"], Wait) is (has_room and why == "retried soon")
    assert isinstance(found["x"], Stay) is has_room


@pytest.mark.parametrize("blocks", ["nothing", "array", "limit"])
def test_a_job_that_backs_off_and_is_blocked_by_a_limit_keeps_no_slots(blocks: str) -> None:
    later = replace(waiting("later", 4, queue="b"), not_before=NOW + timedelta(seconds=60))
    if blocks == "array":
        later = replace(later, array=ArrayLimit("all", 1))
    there = [running("x", {"n": 1}, held_s=0.0)]
    growing = Growing("x", 1, 50, 1, Request(2, GPU, 1), there[0].slices)
    queues = (Queue("b", limit={"GPU": 3.0 if blocks == "limit" else 4.0}),)
    facts = {"queues": queues, "growing": (growing,), "running_of_arrays": {"all": 1}}
    found = decide([later], there, **facts)
    assert isinstance(found["x"], Stay) is (blocks == "nothing")


KEEPS = (Queue("a", quota={"GPU": 4.0}, lending_limit={"GPU": 0.0}), Queue("b"))


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("limit_s", [None, 99 * HOUR])
@pytest.mark.parametrize("scales", [False, True])
def test_a_later_reservation_does_not_change_the_sizes(
    in_place: bool, limit_s: float | None, scales: bool
) -> None:
    """A running and a waiting job with the same request are sized together."""
    there = group("x", {"n1": 4, "n2": 4}, ends_within_s=limit_s)
    there = replace(there, spare=(Slice("n2", 4),) if in_place else ())
    new = waiting("new", 8, min_workers=1, ends_within_s=limit_s)
    times = TIMES if scales else tuple(replace(each, seconds=1.0) for each in TIMES)
    elastic = {"x": replace(sizes(), in_place=in_place, step_times=times), "new": sizes()}
    facts = {"elastic": elastic, "totals": TWO_NODES}
    without = plan(snapshot([new], [there], **facts), NOW)
    later = (reserved(10, 20, node_ids=frozenset({"n2"}), users=()),)
    assert any(isinstance(each, Shrink | Preempt) for each in without) is not scales
    assert plan(snapshot([new], [there], reservations=later, **facts), NOW) == without


@pytest.mark.parametrize("in_place", [False, True])
def test_a_group_that_shrinks_in_place_grows_onto_nodes_that_are_reserved_later(
    in_place: bool,
) -> None:
    there = group("x", {"n1": 4})
    growing = Growing("x", 1, 50, 1, there.request, there.slices)
    elastic = {"x": replace(sizes(), in_place=in_place)}
    facts = {"elastic": elastic, "totals": TWO_NODES, "growing": (growing,)}
    later = (reserved(10, 20, node_ids=frozenset({"n2"}), users=()),)
    found = decide([], [there], reservations=later, **facts)
    assert [type(each) for each in found.values()] == [Grow if in_place else Preempt]


NINE_OF_TWELVE = waiting("nine", 9, queue="b", seq=1, yields=False, waited_s=99 * HOUR)
"""A job that the queue a never lends enough."""


def test_a_job_that_lending_limits_never_allow_is_not_the_overdue_one() -> None:
    """The other overdue job claims the 8 GPUs that can be lent."""
    eight = waiting("eight", 8, queue="b", seq=2, yields=False, waited_s=30 * HOUR)
    small = waiting("small", 1, queue="c", seq=3, yields=False)
    there = [running("x", {"n": 1}, queue="c", yields=False)]
    facts = {"totals": {"n": 12.0}, "queues": (*KEEPS, Queue("c"))}
    found = decide([NINE_OF_TWELVE, eight, small], there, **facts)
    assert {each.job_id: each.reason.code for each in found.values()} == {
        "nine": "lending_limit",
        "eight": "lending_limit",
        "small": "lending_limit",
    }


@pytest.mark.parametrize("has_limit", [False, True])
def test_a_job_that_lending_limits_never_allow_reserves_nothing(has_limit: bool) -> None:
    four = waiting("four", 4, queue="b", seq=2, yields=False)
    there = [running("x", {"n": 4}, queue="c", yields=False)]
    limits = {"limit": {"GPU": 9.0}} if has_limit else {}
    facts = {"totals": {"n": 12.0}, "queues": (KEEPS[0], Queue("b", **limits), Queue("c"))}
    found = decide([NINE_OF_TWELVE, four], there, **facts)
    assert isinstance(found["nine"], Wait)
    assert found["nine"].reason.code == "lending_limit"
    assert isinstance(found["four"], Start)


def closed(node: Node) -> Node:
    found = {**node.total, OPEN: 0.0}
    return replace(node, total=found, available_to_us=found)


@pytest.mark.parametrize("why", ["maintenance", "reserved", "silo", "other program"])
def test_nodes_that_the_lender_cant_use_are_not_counted(why: str) -> None:
    """The queue a keeps 4 GPUs, which can only be those of n1."""
    small = waiting("small", 1, queue="b")
    users = ("ann",) if why == "reserved" else ()
    seen = snapshot([small], totals=TWO_NODES, queues=KEEPS)
    nodes = {node.id: node for node in seen.nodes}
    if why in ("maintenance", "reserved"):
        by = (reserved(-1, node_ids=frozenset({"n2"}), users=users),)
        seen = replace(seen, reservations=by)
    elif why == "silo":
        seen = replace(seen, nodes=(nodes["n1"], closed(nodes["n2"])))
    else:
        nodes["n2"] = replace(nodes["n2"], available_to_us={"GPU": 0.0})
        seen = replace(seen, nodes=tuple(nodes.values()))
    (found,) = plan(seen, NOW)
    assert isinstance(found, Wait)
    assert found.reason.code == "lending_limit"
    assert "4 GPU that are not in use are kept for the queue 'a'" in found.reason.message
    own = replace(seen, queue=(waiting("own", 4, queue="a"),))
    assert isinstance(plan(own, NOW)[0], Start)


def test_what_jobs_hold_on_nodes_that_are_not_counted() -> None:
    """The jobs of a on the reserved node don't use slots that a keeps on the other node."""
    there = [running("x", {"n2": 4}, queue="a", owner="ann", reservation="class")]
    by = (reserved(-1, node_ids=frozenset({"n2"})),)
    found = decide(
        [waiting("small", 1, queue="b")], there, totals=TWO_NODES, queues=KEEPS, reservations=by
    )
    assert isinstance(found["small"], Wait)
    assert found["small"].reason.code == "lending_limit"


def test_all_slots_of_a_reservation_can_be_used() -> None:
    queues = (replace(KEEPS[0], quota={"GPU": 6.0}), KEEPS[1])
    by = (reserved(-1, node_ids=frozenset({"n2"}), users=(), queues=("b",)),)
    jobs = [waiting(f"j{n}", 1, queue="b", reservation="class", seq=n) for n in range(5)]
    own = waiting("own", 4, queue="a")
    facts = {"totals": TWO_NODES, "queues": queues, "reservations": by}
    found = decide([*jobs, own, waiting("other", 1, queue="b")], **facts)
    starts = [name for name, each in found.items() if isinstance(each, Start)]
    assert sorted(starts) == ["j0", "j1", "j2", "j3", "own"]
    assert isinstance(found["j4"], Wait)
    assert found["j4"].reason.code == "waiting_for_slots"


def test_a_job_of_a_reservation_preempts_in_spite_of_lending_limits() -> None:
    by = (reserved(-1, node_ids=frozenset({"n2"}), users=(), queues=("b",)),)
    there = [running("x", {"n2": 4}, queue="b", reservation="class", priority=10)]
    urgent = waiting("urgent", 4, queue="b", reservation="class", priority=90)
    queues = (replace(KEEPS[0], quota={"GPU": 8.0}), KEEPS[1])
    found = decide([urgent], there, totals=TWO_NODES, queues=queues, reservations=by)
    assert isinstance(found["x"], Preempt)


LARGE = waiting("large", 4, yields=False, ends_within_s=4 * HOUR, seq=1)
SMALL = waiting("small", 1, yields=False, ends_within_s=2.5 * HOUR, seq=3)


def in_2_h(name: str, slices: dict[str, int], hours: float = 2.0) -> RunningJob:
    return running(name, slices, yields=False, left_s=hours * HOUR, ends_within_s=hours * HOUR)


@pytest.mark.parametrize("begin_h", [5.0, 7.0])
def test_slots_that_are_free_too_late_before_a_window_are_not_reserved(begin_h: float) -> None:
    there = [in_2_h("x", {"n": 3})]
    by = (reserved(begin_h, begin_h + 1, node_ids=frozenset({"n"}), users=()),)
    found = decide([LARGE, SMALL], there, reservations=by)
    assert isinstance(found["large"], Wait)
    assert isinstance(found["small"], Start) is (begin_h == 5.0)
    assert bool(found["large"].reserved) is (begin_h == 7.0)


def test_slots_without_a_window_are_reserved_even_if_they_are_free_later() -> None:
    there = [in_2_h("x", {"n1": 3}), in_2_h("y", {"n2": 4}, 3.0)]
    by = (reserved(5, 6, node_ids=frozenset({"n1"}), users=()),)
    found = decide([LARGE, SMALL], there, totals=TWO_NODES, reservations=by)
    assert isinstance(found["large"], Wait)
    assert [part.node_id for part in found["large"].reserved] == ["n2"]
    assert isinstance(found["small"], Start), "it leaves n1 before the window begins"


def test_the_next_job_reserves_slots() -> None:
    there = [in_2_h("x", {"n": 3})]
    by = (reserved(5, 6, node_ids=frozenset({"n"}), users=()),)
    next_one = waiting("next", 4, yields=False, ends_within_s=2 * HOUR, seq=2)
    found = decide([LARGE, next_one, SMALL], there, reservations=by)
    assert isinstance(found["next"], Wait)
    assert found["next"].reserved
    assert isinstance(found["small"], Wait)


def test_what_other_queues_can_hold_on_nodes_of_all_sorts() -> None:
    """Count GPUs one by one: jobs of b, which need one GPU each, hold what a doesn't keep."""
    seen_codes = set()
    for seed in range(300):
        draw = random.Random(seed)
        sorts = [draw.choice(("plain", "plain", "window", "own", "silo")) for _ in range(4)]
        names = {f"n{number}": sort for number, sort in enumerate(sorts)}
        held = {name: draw.randint(0, 2) for name in names}
        foreign = {name: draw.randint(0, 2) for name in names}
        there = [
            running(f"r{name}", {name: number}, queue=draw.choice("ab"), held_s=0.0)
            for name, number in held.items()
            if number
        ]
        keeps, lends = draw.randint(0, 8), draw.randint(0, 3)
        queues = (
            Queue("a", quota={"GPU": float(keeps)}, lending_limit={"GPU": float(lends)}),
            Queue("b"),
        )
        by = []
        for sort, queue_names in (("window", ()), ("own", ("b",))):
            ids = frozenset(name for name in names if names[name] == sort)
            usual = {"users": (), "queues": queue_names, "at_begin": "wait"}
            by.append(reserved(-1, name=sort, node_ids=ids, **usual))
        jobs = [waiting(f"b{n}", queue="b", seq=n, yields=False) for n in range(16)]
        bound = [replace(job, job_id=f"own{n}", reservation="own") for n, job in enumerate(jobs)]
        seen = snapshot(
            [*jobs, *bound], there, dict.fromkeys(names, 4.0), queues=queues, reservations=tuple(by)
        )
        nodes = []
        for node in seen.nodes:
            node = closed(node) if names[node.id] == "silo" else node
            free = {"GPU": 4.0 - held[node.id] - foreign[node.id]}
            nodes.append(replace(node, available_to_us={**node.available_to_us, **free}))
        found = {each.job_id: each for each in plan(replace(seen, nodes=tuple(nodes)), NOW)}
        free_of = {
            sort: sum(4 - held[n] - foreign[n] for n in names if names[n] == sort)
            for sort in ("plain", "own")
        }
        of_a = sum(
            count(job.slices)
            for job in there
            if job.queue == "a" and names[job.slices[0].node_id] == "plain"
        )
        kept = max(0, keeps - lends - of_a)
        starts = [name for name, each in found.items() if isinstance(each, Start)]
        assert sum(name.startswith("own") for name in starts) == free_of["own"], seed
        expected = min(16, max(0, free_of["plain"] - kept))
        assert sum(name.startswith("b") for name in starts) == expected, seed
        seen_codes |= {each.reason.code for each in found.values() if isinstance(each, Wait)}
    assert "lending_limit" in seen_codes
