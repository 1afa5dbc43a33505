"""The limits of queues, lending limits and reservations, where several of them apply."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from service.config.node_types import OPEN
from service.domain.scheduling.elastic.sizing import ElasticJob, ReportedStep
from service.domain.scheduling.policy import (
    Decision,
    Node,
    Preempt,
    Request,
    RunningJob,
    Start,
    Wait,
    plan,
)
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


KEEPS = (Queue("a", quota={"GPU": 4.0}, lending_limit={"GPU": 0.0}), Queue("b"))


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
