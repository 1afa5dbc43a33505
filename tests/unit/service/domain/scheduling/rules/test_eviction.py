"""Making room: jobs with the least remaining work come first, and no more jobs leave than
necessary."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.domain.scheduling.outlook import forecast
from service.domain.scheduling.placement import slots
from service.domain.scheduling.policy import (
    Preempt,
    Request,
    Snapshot,
    Start,
    Wait,
    WaitingJob,
    plan,
)
from service.domain.scheduling.rules import order
from service.domain.scheduling.rules.eviction import CLEARLY_LESS, MIN_RUN_S, RUNS_PER_START
from tests.unit.service.domain.scheduling.snapshots import HOUR, NOW, running, snapshot, waiting


def test_a_job_of_which_nobody_knows_how_long_it_takes_is_tried_at_once() -> None:
    there = [running("long", {"n": 4})]
    wait, leaves = plan(snapshot([waiting("new", 1)], there), NOW)
    assert isinstance(leaves, Preempt)
    assert (leaves.job_id, leaves.because_of) == ("long", "new")
    assert leaves.reason.message == (
        "releases its slots for job new, which comes first until its duration is known"
    )
    assert isinstance(wait, Wait)
    assert (wait.reason.code, wait.blocked_by) == ("room_is_made", ("long",))
    assert wait.reason.message == "needs 1 worker of 1 GPU; job long makes room for this job"


def test_slots_that_are_being_left_are_waited_for_and_nobody_else_is_asked() -> None:
    there = [running("leaving", {"n": 2}, is_leaving=True), running("stays", {"n": 2})]
    decisions = plan(snapshot([waiting("new", 2), waiting("next", 1)], there), NOW)
    new, following, leaves = decisions
    assert isinstance(new, Wait)
    assert new.blocked_by == ("leaving",)
    assert isinstance(following, Wait)
    assert isinstance(leaves, Preempt)
    assert (leaves.job_id, leaves.because_of) == ("stays", "next")


@pytest.mark.parametrize(
    ("job", "changes"),
    [
        (waiting("new", 1), {"held_s": MIN_RUN_S - 1}),
        (waiting("new", 1), {"yields": False}),
        (waiting("new", 1), {"priority": 51, "yields": False}),
        (waiting("new", 1, priority=99), {"held_s": MIN_RUN_S - 1}),
        (waiting("new", 1), {"start_s": 60.0, "held_s": 60.0 * RUNS_PER_START - 1}),
        (waiting("new", 4, left_s=HOUR), {"left_s": HOUR}),
        (waiting("new", 1), {"waited_s": order.LONGEST_WAIT_S + 1}),
        (waiting("new", 4, left_s=CLEARLY_LESS * HOUR), {"left_s": HOUR}),
    ],
)
def test_who_need_not_leave(job: WaitingJob, changes: dict[str, Any]) -> None:
    (decision,) = plan(snapshot([job], [running("there", {"n": 4}, **changes)]), NOW)
    assert isinstance(decision, Wait)
    assert decision.reason.code == "waiting_for_slots"


def test_a_job_that_was_moved_to_the_front_is_pushed_out_by_none_that_it_passed() -> None:
    there = running("front", {"n": 4}, place=-1)
    (decision,) = plan(snapshot([waiting("new", 1)], [there]), NOW)
    assert isinstance(decision, Wait)
    elsewhere = dataclasses.replace(waiting("new", 1), queue="other")
    _, leaves = plan(snapshot([elsewhere], [there]), NOW)
    assert isinstance(leaves, Preempt), "of another queue it has passed none"


def test_a_higher_priority_pushes_out_also_what_loses_its_work() -> None:
    there = [running("there", {"n": 4}, yields=False, lost_s=HOUR)]
    _, leaves = plan(snapshot([waiting("new", 1, priority=51)], there), NOW)
    assert isinstance(leaves, Preempt)
    assert leaves.reason.message.endswith("has a higher priority")


def test_how_long_a_start_took_matters_neither_to_priorities_nor_after_a_long_run() -> None:
    slow = {"start_s": 600.0, "held_s": MIN_RUN_S}
    _, leaves = plan(
        snapshot([waiting("new", 1, priority=99)], [running("r", {"n": 4}, **slow)]), NOW
    )
    assert isinstance(leaves, Preempt)
    slow["held_s"] = 600.0 * RUNS_PER_START
    _, leaves = plan(snapshot([waiting("new", 1)], [running("r", {"n": 4}, **slow)]), NOW)
    assert isinstance(leaves, Preempt)


def test_those_that_lose_the_least_leave_and_no_more_than_are_needed() -> None:
    there = [
        running("dear", {"a": 2}, lost_s=60.0),
        running("cheap", {"a": 2}, lost_s=1.0),
        running("cheapest", {"b": 1}),
        running("low", {"b": 3}, priority=10, lost_s=600.0),
    ]
    totals = {"a": 4.0, "b": 4.0}
    decisions = plan(snapshot([waiting("new", 2)], there, totals), NOW)
    assert [d.job_id for d in decisions if isinstance(d, Preempt)] == ["low"]
    decisions = plan(snapshot([waiting("new", 2)], there[:3], totals), NOW)
    assert [d.job_id for d in decisions if isinstance(d, Preempt)] == []
    assert isinstance(decisions[0], Start)
    decisions = plan(snapshot([waiting("new", 4)], there[:3], totals), NOW)
    assert [d.job_id for d in decisions if isinstance(d, Preempt)] == ["cheapest"]


def test_the_least_work_left_starts_first_and_what_is_unknown_before_all() -> None:
    queue = [
        waiting("long", 1, left_s=10 * HOUR),
        waiting("short", 1, left_s=HOUR),
        waiting("wide", 2, left_s=HOUR),
        waiting("new", 1),
    ]
    decisions = plan(snapshot(queue, []), NOW)
    assert [d.job_id for d in decisions] == ["new", "short", "wide", "long"]


def test_one_that_yields_passes_a_blocked_job_until_that_has_waited_for_long() -> None:
    there = [running("there", {"n": 3}, held_s=0.0)]
    for waited_s, starts in ((0.0, ["small"]), (order.LONGEST_WAIT_S + 1, [])):
        large = dataclasses.replace(waiting("large", 4), waited_s=waited_s, seq=1)
        decisions = plan(snapshot([large, waiting("small", 1)], there), NOW)
        assert [d.job_id for d in decisions if isinstance(d, Start)] == starts
    rigid = dataclasses.replace(waiting("small", 1), yields=False)
    large = dataclasses.replace(waiting("large", 4), seq=1)
    decisions = plan(snapshot([large, rigid], there), NOW)
    assert not [d for d in decisions if isinstance(d, Start)]


def test_progress_and_earlier_runs_tell_how_long_a_job_has_left() -> None:
    assert forecast.seconds_left(0.0, 100.0) is None
    assert forecast.seconds_left(0.25, 100.0) == 300.0
    assert forecast.seconds_left(1e-12, 100.0) == forecast.LONGEST_S, "it has no end"
    assert forecast.seconds_left(0.0, 0.0, [500.0, 400.0, 600.0]) == 500.0
    assert forecast.seconds_left(0.5, 100.0, [400.0]) == 150.0
    assert forecast.seconds_left(1.0, 100.0, [400.0]) == 0.0
    assert forecast.seconds_left(None, 0.0) is None
    assert forecast.seconds_left(None, 70.0) == 70.0
    assert forecast.seconds_left(None, 70.0, [100.0]) == 30.0
    assert forecast.seconds_left(None, 170.0, [100.0]) == 170.0
    newest = [float(run) for run in range(100)]
    assert forecast.seconds_left(0.0, 0.0, newest) == 95.0


def test_a_gang_is_as_large_as_its_largest_share() -> None:
    total = slots.total_of([{"CPU": 8.0, "GPU": 4.0}, {"CPU": 8.0}])
    assert total == {"CPU": 16.0, "GPU": 4.0}
    assert slots.share_of(Request(2, {"CPU": 1.0, "GPU": 1.0}), total) == 0.5
    assert slots.share_of(Request(2, {"CPU": 1.0, "TPU": 1.0}), total) == 0.125


GANGS = st.tuples(st.integers(1, 6), st.none() | st.floats(0, 10 * HOUR), st.integers(49, 51))


@st.composite
def crowded(draw: st.DrawFn) -> Snapshot:
    """Jobs that hold slots on three nodes, and waiting jobs."""
    totals = {name: float(draw(st.integers(1, 8))) for name in "abc"}
    free = {name: int(gpus) for name, gpus in totals.items()}
    there = []
    for place in range(draw(st.integers(0, 8))):
        node = draw(st.sampled_from("abc"))
        if not free[node]:
            continue
        gpus = draw(st.integers(1, free[node]))
        free[node] -= gpus
        there.append(
            running(
                f"r{place}",
                {node: gpus},
                priority=draw(st.integers(49, 51)),
                left_s=draw(st.none() | st.floats(0, 10 * HOUR)),
                held_s=draw(st.sampled_from([0.0, MIN_RUN_S, HOUR])),
                lost_s=draw(st.floats(0, HOUR)),
                yields=draw(st.booleans()),
                is_leaving=draw(st.booleans()),
            )
        )
    queue = [
        dataclasses.replace(
            waiting(f"w{seq}", gpus, priority=priority, left_s=left_s),
            seq=seq,
            yields=draw(st.booleans()),
            waited_s=draw(st.sampled_from([0.0, order.LONGEST_WAIT_S + 1])),
        )
        for seq, (gpus, left_s, priority) in enumerate(draw(st.lists(GANGS, max_size=6)))
    ]
    return snapshot(queue, there, totals)


@given(crowded())
def test_those_that_leave_are_enough_and_were_allowed_to_be_asked(seen: Snapshot) -> None:
    decisions = plan(seen, NOW)
    assert decisions == plan(seen, NOW)
    there = {job.job_id: job for job in seen.running}
    queue = {job.job_id: job for job in seen.queue}
    leaving = [d for d in decisions if isinstance(d, Preempt)]
    assert len({d.job_id for d in leaving}) == len(leaving)
    for asked in leaving:
        left, coming = there[asked.job_id], queue[asked.because_of]
        assert not left.is_leaving
        assert left.held_s >= MIN_RUN_S
        assert coming.priority > left.priority or (coming.priority == left.priority and left.yields)
    starts = [d for d in decisions if isinstance(d, Start)]
    for node in seen.nodes:
        taken = sum(p.num_workers for d in starts for p in d.slices if p.node_id == node.id)
        assert taken <= node.available_to_us["GPU"]
    for decision in starts:
        number = sum(part.num_workers for part in decision.slices)
        assert number == queue[decision.job_id].request.num_workers


@given(crowded())
def test_a_job_for_which_others_were_preempted_starts_once_they_have_left(seen: Snapshot) -> None:
    # A job that yields might have to wait again, for a blocked job ahead that now fits.
    queue = tuple(dataclasses.replace(job, yields=False) for job in seen.queue)
    seen = dataclasses.replace(seen, queue=queue)
    decisions = plan(seen, NOW)
    promised = {
        d.job_id for d in decisions if isinstance(d, Wait) and d.reason.code == "room_is_made"
    }
    gone = {d.job_id for d in decisions if isinstance(d, Preempt)}
    gone |= {job.job_id for job in seen.running if job.is_leaving}
    started = {d.job_id: d for d in decisions if isinstance(d, Start)}
    requests = {job.job_id: job.request for job in seen.queue}
    there = [job for job in seen.running if job.job_id not in gone]
    there += [
        dataclasses.replace(
            running(name, {part.node_id: part.num_workers for part in d.slices}, held_s=0.0),
            request=requests[name],
        )
        for name, d in started.items()
    ]
    totals = {node.id: node.total["GPU"] for node in seen.nodes}
    later = [job for job in queue if job.job_id not in started]
    next_round = plan(snapshot(later, there, totals), NOW)
    assert promised <= {d.job_id for d in next_round if isinstance(d, Start)}
