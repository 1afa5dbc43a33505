"""Jobs start on reserved nodes only if they surely leave in time, and leave before a reservation
begins; and each reason names the reservation that is the cause."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

import pytest

from service.domain.scheduling import policy
from service.domain.scheduling.policy import Decision, Growing, Preempt, Shrink, Start, Wait, plan
from service.domain.scheduling.rules.eviction import MIN_RUN_S
from service.domain.scheduling.rules.order import SETTLING_S
from service.domain.scheduling.rules.reservations import Reservation, ReservationRules, choose
from tests.unit.service.domain.scheduling.snapshots import NOW, running, snapshot, waiting

HOUR = 3600.0
LEAVE_S = 45.0


def at(hours: float) -> datetime:
    return NOW + timedelta(hours=hours)


def reserved(begin_h: float = 1.0, end_h: float = 3.0, **fields: Any) -> Reservation:
    usual = {"name": "class", "node_ids": frozenset({"a"}), "users": ("ann",)}
    return Reservation(begins_at=at(begin_h), ends_at=at(end_h), **{**usual, **fields})


def decide(
    queue: Any = (), there: Any = (), *, by: Any = (), now: datetime = NOW, **more: Any
) -> dict[str, Decision]:
    totals = more.pop("totals", {"a": 2.0})
    seen = snapshot(queue, there, totals, reservations=tuple(by), leave_s=LEAVE_S, **more)
    return {decision.job_id: decision for decision in plan(seen, now)}


def script(name: str = "script", gpus: int = 1, **fields: Any) -> policy.WaitingJob:
    return waiting(name, gpus, yields=False, **fields)


def reason(decision: Decision) -> tuple[str, str]:
    assert not isinstance(decision, Start | policy.Grow), decision
    return decision.reason.code, decision.reason.message


FROM_TO = "from 2026-01-01 13:00:00 UTC to 2026-01-01 15:00:00 UTC"


def test_a_script_without_a_limit_does_not_start_and_the_reservation_is_the_reason() -> None:
    found = decide([script()], by=[reserved()])
    assert reason(found["script"]) == (
        "reserved",
        f"needs 1 worker of 1 GPU; 0 are free, and 2 more are reserved: the reservation "
        f"'class' {FROM_TO}",
    )


@pytest.mark.parametrize(("spare_s", "starts"), [(0.0, True), (1.0, False)])
def test_a_limit_must_end_before_the_reservation_begins(spare_s: float, starts: bool) -> None:
    limit_s = HOUR - SETTLING_S - LEAVE_S + spare_s
    found = decide([script(ends_within_s=limit_s)], by=[reserved()])
    assert isinstance(found["script"], Start) is starts


def test_a_recipe_starts_if_it_can_train_before_it_must_leave() -> None:
    early, late = reserved(0.05), reserved(0.2)
    assert isinstance(decide([waiting("recipe")], by=[late])["recipe"], Start)
    assert isinstance(decide([waiting("recipe")], by=[early])["recipe"], Wait)
    for rule in ("wait", "cancel"):
        found = decide([waiting("recipe")], by=[reserved(0.2, at_begin=rule)])
        assert isinstance(found["recipe"], Wait), "nobody would ask it to save its state"


def test_other_nodes_are_used() -> None:
    found = decide([script(gpus=2)], by=[reserved()], totals={"a": 2.0, "b": 2.0})
    assert isinstance(found["script"], Start)
    assert [part.node_id for part in found["script"].slices] == ["b"]


def test_only_the_cause_is_named() -> None:
    """The node that is not reserved is full, and the reserved node would not be free either."""
    busy = [running("x", {"a": 2}, yields=False), running("y", {"b": 2}, yields=False)]
    found = decide([script()], busy, by=[reserved()], totals={"a": 2.0, "b": 2.0})
    code, message = reason(found["script"])
    assert code == "waiting_for_slots"
    assert "class" not in message
    assert message.endswith("0 are free, and job y holds 2 slots on suitable nodes")
    found = decide([script()], busy[1:], by=[reserved()], totals={"a": 2.0, "b": 2.0})
    code, message = reason(found["script"])
    assert (code, message) == (
        "reserved",
        f"needs 1 worker of 1 GPU; 0 are free, and 2 more are reserved: the reservation 'class' "
        f"{FROM_TO}",
    )


def test_the_jobs_of_the_reservation() -> None:
    mine = script(owner="ann", reservation="class")
    named, unnamed = replace(mine, job_id="named"), replace(mine, job_id="free", reservation=None)
    found = decide([named, unnamed], by=[reserved()])
    assert reason(found["named"]) == (
        "waiting_for_reservation",
        f"waits for the reservation 'class' {FROM_TO}",
    )
    assert reason(found["free"])[0] == "reserved"
    found = decide([named, unnamed], by=[reserved(-1)], totals={"a": 1.0, "b": 1.0})
    places = {n: d.slices[0].node_id for n, d in found.items() if isinstance(d, Start)}
    assert places == {"named": "a", "free": "b"}
    found = decide(
        [named],
        by=[reserved(-1)],
        there=[running("x", {"a": 2}, owner="ann", reservation="class", yields=False)],
        totals={"a": 2.0, "b": 2.0},
    )
    assert reason(found["named"]) == (
        "waiting_for_slots",
        "needs 1 worker of 1 GPU in the reservation 'class'; 0 are free, and job x holds 2 slots "
        "on suitable nodes",
    )


def test_a_gang_that_is_too_large_for_its_reservation() -> None:
    found = decide(
        [script(gpus=3, owner="ann", reservation="class")],
        by=[reserved(-1)],
        totals={"a": 2.0, "b": 2.0},
    )
    assert reason(found["script"]) == (
        "waiting_for_slots",
        "needs 3 workers of 1 GPU in the reservation 'class'; the reservation's nodes have room "
        "for 2",
    )


def test_flex_and_unnamed_jobs() -> None:
    mine = script(gpus=2, owner="ann", reservation="class")
    assert isinstance(decide([mine], by=[reserved(flex=True)])["script"], Start)
    busy = [running("x", {"a": 2}, owner="ann", reservation="class", yields=False)]
    found = decide([mine], busy, by=[reserved(-1, flex=True)], totals={"a": 2.0, "b": 2.0})
    assert isinstance(found["script"], Start)
    unnamed = replace(mine, reservation=None)
    assert isinstance(decide([unnamed], by=[reserved(accepts_unnamed=True)])["script"], Start)
    other = replace(unnamed, owner="bob")
    assert isinstance(decide([other], by=[reserved(accepts_unnamed=True)])["script"], Wait)
    for claim in ({"queues": ("night",)}, {"projects": ("thesis",)}):
        allowed = replace(other, queue="night", project="thesis", reservation="class")
        by = [reserved(-1, users=(), **claim)]
        assert isinstance(decide([allowed], by=by)["script"], Start), claim


def test_a_reservation_that_is_over_or_not_for_the_job() -> None:
    job = script(owner="ann", reservation="class")
    gone = "its reservation 'class' has ended or was deleted"
    assert reason(decide([job])["script"]) == ("waiting_for_reservation", gone)
    ended = decide([job], by=[reserved(-2, -1)])
    assert reason(ended["script"]) == ("waiting_for_reservation", gone)
    assert isinstance(decide([replace(job, attempt=1)])["script"], Start), "it continues"
    other = decide([replace(job, owner="bob")], by=[reserved(-1)])
    assert reason(other["script"])[1].endswith("is not for this job's user, queue or project")


def test_jobs_of_others_leave_before_the_begin() -> None:
    job = running("x", {"a": 1}, yields=False)
    by = reserved()
    early = at(1) - timedelta(seconds=LEAVE_S + 1)
    assert not isinstance(decide(there=[job], by=[by], now=early).get("x"), Preempt)
    found = decide(there=[job], by=[by], now=early + timedelta(seconds=1))["x"]
    assert isinstance(found, Preempt)
    assert (found.reason.code, found.ends, found.because_of) == ("reserved", False, "x")
    assert found.reason.message == (
        f"releases its slots, because the reservation 'class' {FROM_TO} includes its nodes"
    )
    late = at(2)
    cancelled = decide(there=[job], by=[reserved(at_begin="cancel")], now=late)["x"]
    assert isinstance(cancelled, Preempt)
    assert cancelled.ends
    assert "x" not in decide(there=[job], by=[reserved(at_begin="wait")], now=late)
    ending = replace(job, ends_within_s=LEAVE_S / 2)
    assert "x" not in decide(there=[ending], by=[by], now=early + timedelta(seconds=1))
    leaving = replace(job, is_leaving=True)
    assert "x" not in decide(there=[leaving], by=[by], now=late)
    mine = replace(job, owner="ann", reservation="class")
    assert "x" not in decide(there=[mine], by=[by], now=late)
    assert isinstance(
        decide(there=[replace(mine, reservation=None)], by=[by], now=late)["x"], Preempt
    )


def test_jobs_leave_even_if_nothing_starts() -> None:
    found = decide(there=[running("x", {"a": 1})], by=[reserved(-1)], storage_problem="full")
    assert isinstance(found["x"], Preempt)
    found = decide(there=[running("x", {"a": 1})], by=[reserved(-1)], slots_lag=True)
    assert isinstance(found["x"], Preempt)


def test_jobs_leave_at_the_end_if_the_reservation_says_so() -> None:
    job = running("x", {"a": 1}, owner="ann", reservation="class")
    late = at(3) - timedelta(seconds=LEAVE_S)
    assert "x" not in decide(there=[job], by=[reserved()], now=late)
    found = decide(there=[job], by=[reserved(at_end="preempt")], now=late)["x"]
    assert isinstance(found, Preempt)
    assert found.reason.message == (
        f"releases its slots, because the reservation 'class' {FROM_TO} ends"
    )


def test_no_job_starts_that_would_be_asked_to_leave_at_once() -> None:
    by = reserved(end_h=3, at_end="preempt")
    before = {"script": LEAVE_S, "recipe": LEAVE_S + MIN_RUN_S}
    for name, left_s in before.items():
        job = waiting(name, yields=name == "recipe", owner="ann", reservation="class", attempt=1)
        last = at(3) - timedelta(seconds=left_s)
        assert reason(decide([job], by=[by], now=last)[name]) == (
            "waiting_for_reservation",
            f"the reservation 'class' {FROM_TO} ends too soon",
        )
        found = decide([job], by=[by], now=last - timedelta(seconds=1))
        assert isinstance(found[name], Start)
        assert isinstance(decide([job], by=[reserved()], now=last)[name], Start)
        for one, other in (
            (replace(by, flex=True), job),
            (replace(by, accepts_unnamed=True), replace(job, reservation=None)),
        ):
            assert reason(decide([other], by=[one], now=last)[name])[0] == "reserved"
            found = decide([other], by=[one], now=last, totals={"a": 2.0, "b": 2.0})
            assert [part.node_id for part in found[name].slices] == ["b"]  # type: ignore[union-attr]


def test_an_elastic_group_releases_only_the_reserved_node_if_it_can() -> None:
    job = running("x", {"a": 1, "b": 1})
    job = replace(job, spare=job.slices[:1])
    totals = {"a": 2.0, "b": 2.0}
    soon = at(1) - timedelta(seconds=LEAVE_S + 100)
    found = decide(there=[job], by=[reserved()], now=soon, totals=totals)["x"]
    assert isinstance(found, Shrink)
    assert found.slices == job.slices[:1]
    recalled = replace(job, recalled=job.slices[:1], spare=())
    assert "x" not in decide(there=[recalled], by=[reserved()], now=soon, totals=totals)
    found = decide(there=[recalled], by=[reserved()], now=at(1), totals=totals)["x"]
    assert isinstance(found, Preempt), "it did not respond in time"


def test_a_group_does_not_grow_into_a_reserved_node() -> None:
    job = running("x", {"b": 1})
    group = Growing("x", 1, 50, 1, replace(job.request, num_workers=4, min_workers=1), job.slices)
    totals = {"a": 2.0, "b": 2.0}
    more = {"there": [job], "growing": (group,), "totals": totals}
    grown = decide(**more)["x"]
    assert isinstance(grown, policy.Grow)
    assert sum(part.num_workers for part in grown.slices) == 3
    grown = decide(by=[reserved()], **more)["x"]
    assert isinstance(grown, policy.Grow)
    assert {part.node_id for part in grown.slices} == {"b"}
    full = replace(job, slices=(replace(job.slices[0], num_workers=2),))
    more |= {"there": [full], "growing": (replace(group, slices=full.slices),)}
    assert reason(decide(by=[reserved()], **more)["x"])[0] == "reserved"


def test_a_maintenance_window_over_a_reservation() -> None:
    window = reserved(1, 2, name="disks", users=(), all_nodes=True)
    mine = script(owner="ann", reservation="class")
    found = decide([mine], by=[reserved(-1), window])
    assert "the maintenance window 'disks'" in reason(found["script"])[1]
    job = running("x", {"a": 1}, owner="ann", reservation="class")
    assert isinstance(decide(there=[job], by=[reserved(-1), window], now=at(1))["x"], Preempt)


def test_a_window_of_the_whole_cluster_makes_no_job_impossible() -> None:
    window = reserved(-1, 1, users=(), node_ids=frozenset(), all_nodes=True)
    found = decide([script(gpus=2), waiting("recipe")], by=[window])
    assert [reason(found[name])[0] for name in ("script", "recipe")] == ["reserved"] * 2
    found = decide([script(gpus=3)], by=[window])
    assert isinstance(found["script"], policy.Impossible), "not even after the window"


def test_a_blocked_gang_does_not_reserve_slots_that_it_can_not_use() -> None:
    """The gang can't start before the window has ended, so it keeps no slot idle until then."""
    gang, job = script("gang", 4, priority=90), script(ends_within_s=60.0)
    totals = {"a": 2.0, "b": 2.0}
    found = decide([gang, job], by=[reserved()], totals=totals)
    assert isinstance(found["script"], Start)
    assert reason(found["gang"])[0] == "reserved"
    assert not found["gang"].reserved  # type: ignore[union-attr]


def test_no_reservation_changes_nothing() -> None:
    jobs = [script(f"job-{n}", 1 + n % 2) for n in range(5)]
    far = reserved(node_ids=frozenset({"elsewhere"}))
    assert decide(jobs) == decide(jobs, by=[far]) == decide(jobs, by=[reserved(-2, -1)])


def test_nodes_are_chosen_where_jobs_end_first_and_are_kept() -> None:
    nodes = [policy.Node(name, {"GPU": 4.0}, {"GPU": 4.0}) for name in "abcd"]
    rules = ReservationRules("class", at(1), at(3), users=("ann",), num_nodes=2)
    busy = {"a": at(9), "b": at(2), "d": at(0.5)}
    assert choose([rules], [], nodes, busy) == {"class": ("c", "d")}
    kept = replace(rules, chosen=("a", "gone"))
    assert choose([kept], [], nodes, busy) == {"class": ("a", "c")}
    other = reserved(2, 5, name="other", node_ids=frozenset({"c"}))
    assert choose([rules], [other], nodes, busy) == {"class": ("b", "d")}
    later = replace(rules, name="later", begins_at=at(2))
    both = choose([rules, later], [], nodes, {})
    assert both == {"class": ("a", "b"), "later": ("c", "d")}
    assert choose([replace(rules, num_nodes=9)], [], nodes, {})["class"] == tuple("abcd")
    gpus = replace(rules, num_nodes=None, num_gpus=5)
    assert choose([gpus], [], nodes, {})["class"] == ("a", "b")
    refused = [replace(node, accepted=node.id != "a") for node in nodes]
    assert choose([rules], [], refused, {})["class"] == ("b", "c")


def test_jobs_that_wait_in_a_reservation_do_not_keep_others_from_reserving_slots() -> None:
    """Otherwise, a reservation whose jobs always wait would defeat the bound on waiting."""
    mine = script("mine", 2, owner="ann", reservation="class", priority=90, waited_s=30 * HOUR)
    small = replace(script("small", owner="ann", reservation="class"), priority=80)
    gang = script("gang", 2, priority=70, waited_s=29 * HOUR, seq=1)
    short = script("short", priority=60, seq=2)
    there = [
        running("x", {"a": 1}, owner="ann", reservation="class", yields=False, priority=100),
        running("y", {"b": 1}, yields=False, priority=100),
    ]
    found = decide(
        [mine, small, gang, short], there, by=[reserved(-1)], totals={"a": 2.0, "b": 2.0}
    )
    assert [part.node_id for part in found["gang"].reserved] == ["b"]  # type: ignore[union-attr]
    for name in ("mine", "small", "short"):
        assert isinstance(found[name], Wait), "the slots are kept for the gang ahead"
    assert reason(found["small"])[0] == "behind_in_queue"


@pytest.mark.parametrize("is_any_blocked", [False, True])
def test_a_job_with_a_limit_does_not_overtake_in_a_reservation(is_any_blocked: bool) -> None:
    """It could only overtake the job that reserves slots outside of the reservation."""
    mine = {"owner": "ann", "reservation": "class"}
    queue = [script("large", 2, priority=90, **mine), script("small", ends_within_s=600.0, **mine)]
    queue += [script("outside", 2, priority=80)] * is_any_blocked
    there = [
        running("x", {"a": 1}, yields=False, left_s=9 * HOUR, **mine),
        running("y", {"b": 1}, yields=False, left_s=9 * HOUR),
    ]
    found = decide(queue, there, by=[reserved(-1)], totals={"a": 2.0, "b": 2.0})
    assert reason(found["small"])[0] == "behind_in_queue"
    assert found["small"].blocked_by == ("large",)  # type: ignore[union-attr]
