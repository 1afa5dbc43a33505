"""Forecasts, requests for nodes, and stored rounds take reservations into account."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from service.config.node_types import NodeType
from service.domain.scheduling import autoscaling
from service.domain.scheduling.autoscaling import Demand
from service.domain.scheduling.elastic.sizing import ElasticJob, ReportedStep
from service.domain.scheduling.outlook.counterfactuals import Change, Choices, JobQuestions
from service.domain.scheduling.outlook.simulation import Expected, Simulation
from service.domain.scheduling.outlook.situation import Situation
from service.domain.scheduling.policy import (
    Growing,
    Node,
    Preempt,
    Request,
    RunningJob,
    Snapshot,
    Start,
    Wait,
    WaitingJob,
    plan,
)
from service.domain.scheduling.policy.windows import Windows
from service.domain.scheduling.rules.reservations import Reservation, reserved_soon
from service.outlook import codec
from tests.unit.service.domain.scheduling.snapshots import HOUR, NOW, running, snapshot, waiting

LEAVE_S = 45.0


def reserved(begin_h: float = 1.0, end_h: float = 3.0, **fields: Any) -> Reservation:
    begins_at, ends_at = (NOW + timedelta(hours=hours) for hours in (begin_h, end_h))
    usual = {"name": "class", "node_ids": frozenset({"n"}), "users": ("ann",)}
    return Reservation(begins_at=begins_at, ends_at=ends_at, **{**usual, **fields})


def expected(
    queue: list[WaitingJob], there: list[RunningJob], *by: Reservation
) -> dict[str, Expected]:
    seen = replace(snapshot(queue, there), reservations=by, leave_s=LEAVE_S)
    return Simulation(Situation(seen), NOW).run()


def script(name: str, gpus: int = 4, **more: Any) -> WaitingJob:
    return waiting(name, gpus, **{"left_s": HOUR, "yields": False, **more})


def in_h(found: dict[str, Expected], name: str) -> float:
    at = found[name].at
    assert at is not None, found[name].why
    return (at - NOW).total_seconds() / HOUR


def test_a_script_is_expected_to_start_when_the_reservation_ends() -> None:
    found = expected([script("a"), script("short", ends_within_s=600.0)], [], reserved())
    assert in_h(found, "short") == 0
    assert in_h(found, "a") == pytest.approx(3.0, rel=0.1)


def test_the_jobs_of_the_reservation_are_expected_at_its_begin() -> None:
    mine = script("mine", owner="ann", reservation="class")
    busy = running("busy", {"n": 4}, left_s=9 * HOUR)
    found = expected([mine], [busy], reserved())
    assert in_h(found, "mine") == pytest.approx(1.0, rel=0.1), "the recipe leaves in time"
    found = expected([mine], [], reserved(begin_h=1, users=("bob",)))
    assert found["mine"].at is None
    assert found["mine"].why is not None
    assert found["mine"].why.code == "waiting_for_reservation"


def test_a_job_that_leaves_continues_after_the_window() -> None:
    busy = running("busy", {"n": 4}, left_s=2 * HOUR)
    late = script("late", seq=200, left_s=60.0, priority=10)
    window = reserved(users=(), all_nodes=True)
    found = expected([late], [busy], window)
    assert in_h(found, "late") == pytest.approx(4.0, rel=0.1), "an hour of busy was left"
    found = expected([late], [busy], replace(window, at_begin="cancel"))
    assert in_h(found, "late") == pytest.approx(3.0, rel=0.1), "busy is cancelled"


def test_a_stored_round_is_read_again() -> None:
    by = (reserved(), reserved(4, 5, name="disks", users=(), labels=("label:rack=r1",)))
    job = script("a", reservation="class", owner="ann", project="thesis")
    seen = replace(snapshot([job], [running("r", {"n": 4})]), reservations=by, leave_s=LEAVE_S)
    decisions = plan(seen, NOW)
    situation, read, at = codec.decode_record(codec.encode_record(Situation(seen), decisions, NOW))
    assert (situation.snapshot, read, at) == (seen, decisions, NOW)
    assert plan(situation.snapshot, at) == decisions


TYPES = (NodeType({"CPU": 4.0}, 3),)


def asked(job: WaitingJob, *by: Reservation) -> Demand:
    node = Node("n", {"CPU": 4.0}, {"CPU": 4.0})
    new = autoscaling.may_come(TYPES, [node])
    seen = Snapshot((job,), (node,), True, to_come=new, reservations=by, leave_s=LEAVE_S)
    fenced = Windows(seen, NOW).apply()
    return autoscaling.demand(fenced, plan(seen, NOW), fenced.nodes, fenced.to_come, ())


def test_reserved_nodes_are_not_free_and_no_nodes_are_added_for_jobs_of_reservations() -> None:
    job = WaitingJob("a", 0, 50, 1, Request(2, {"CPU": 1.0}), owner="ann")
    assert asked(job).num_nodes == 0, "it starts"
    assert asked(job, reserved()).nodes_of == {"a": 1}
    everything = reserved(-1, node_ids=frozenset(), users=(), all_nodes=True)
    assert asked(job, everything).num_nodes == 0, "new nodes would be under maintenance as well"
    mine = replace(job, reservation="class")
    for by in (reserved(), reserved(-1), reserved(-3, -1)):
        assert asked(mine, by).num_nodes == 0
    large = replace(mine, request=Request(6, {"CPU": 1.0}))
    assert asked(large, reserved(-1)).num_nodes == 0


def test_idle_nodes_of_a_reservation_are_kept() -> None:
    nodes = [Node(name, {"CPU": 4.0}, {"CPU": 4.0}) for name in "nm"]
    assert reserved_soon([reserved(-1)], nodes, NOW) == {"n"}
    assert reserved_soon([reserved(1)], nodes, NOW) == {"n"}
    assert reserved_soon([reserved(1.1)], nodes, NOW) == set()
    assert reserved_soon([reserved(-1, users=())], nodes, NOW) == set()


def test_sizes_are_chosen_without_the_reserved_nodes() -> None:
    """Without the check, a group on GPUs would be asked to leave in order to resume with a size
    for which there are no slots. Before the reservation begins, it can use the node."""
    times = tuple(ReportedStep(n, -(-n // 2), 64, 1.0 / n) for n in (1, 2, 4))
    job = running("x", {"m": 2}, held_s=HOUR)
    choice = ElasticJob(1, 4, 64, 64, times, steps_left=9000.0)
    group = Growing("x", 1, 50, 1, Request(4, job.request.bundle, 1), job.slices)
    totals = {"n": 2.0, "m": 2.0}
    seen = snapshot([], [job], totals, elastic={"x": choice}, growing=(group,), leave_s=LEAVE_S)
    assert any(isinstance(decision, Preempt) for decision in plan(seen, NOW))
    for begin_h, leaves in ((-1, False), (0.05, False), (9, True)):
        kept = replace(seen, reservations=(reserved(begin_h, 10),))
        assert any(isinstance(decision, Preempt) for decision in plan(kept, NOW)) is leaves


def test_a_user_whose_jobs_wait_for_a_reservation_has_no_share() -> None:
    jobs = [waiting("now", owner="bob"), waiting("later", owner="ann", reservation="class")]
    for by, active in ((reserved(), {"bob"}), (reserved(-1), {"ann", "bob"})):
        there = Situation(replace(snapshot(jobs), reservations=(by,)), made_at=NOW)
        assert {owner for _, owner in there.active_accounts()} == active
        stored = codec.decode(codec.encode(there.first_jobs()))
        assert {owner for _, owner in stored.active_accounts()} == active


@pytest.mark.parametrize(
    ("begin_h", "own_s", "limit_s"),
    [(24 * 30, None, 7 * 86400), (5, None, 14400), (5, 14400.0, None), (1, 86400.0, 600)],
)
def test_the_longest_limit_with_which_the_job_starts_before_a_reservation_is_found(
    begin_h: float, own_s: float | None, limit_s: int | None
) -> None:
    """With 5 minutes for its start, and the time in which the node must be left."""
    seen = replace(snapshot([], []), reservations=(reserved(begin_h, 9999),), leave_s=LEAVE_S)
    job = script("mine", ends_within_s=own_s)

    def resubmit(_: WaitingJob, change: Change) -> WaitingJob | None:
        limit = change.max_runtime_s
        return None if limit is None else replace(job, ends_within_s=float(limit))

    asked = JobQuestions(Situation(seen), job, NOW)
    decision = asked.decision
    if own_s == 14400.0:
        assert isinstance(decision, Start)
        return
    assert isinstance(decision, Wait)
    found = asked.answers(Choices(resubmit), decision.reason)
    assert [(each.message, each.at) for each in found if each.change] == [
        (f"starts now with max_runtime_s {limit_s}", NOW)
    ]
