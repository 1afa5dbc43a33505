"""Elastic groups release slots before any job leaves, and only for jobs that do not rank lower."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ray_workers.shared.slices import Slice
from service.domain.scheduling.elastic.resizing import spare
from service.domain.scheduling.policy import (
    Decision,
    Preempt,
    Request,
    RunningJob,
    Shrink,
    Start,
    Wait,
    WaitingJob,
    plan,
)
from service.domain.scheduling.rules.eviction import MIN_RUN_S
from tests.unit.service.domain.scheduling.snapshots import NOW, snapshot

A, B, C = Slice("a", 2), Slice("b", 1), Slice("c", 1)


def group(name: str, *slices: Slice, least: int = 1, **changes: Any) -> RunningJob:
    number = sum(part.num_workers for part in slices)
    request = Request(number, {"GPU": 1.0})
    job = RunningJob(name, 50, 1, request, slices, MIN_RUN_S, spare=spare(slices, least))
    return replace(job, **changes)


def coming(gpus: int = 1, priority: int = 50) -> WaitingJob:
    return WaitingJob("new", 0, priority, 99, Request(gpus, {"GPU": 1.0}), left_s=9e5, waited_s=0.0)


def planned(job: WaitingJob, *there: RunningJob, gpus: float = 2.0) -> list[Decision]:
    return plan(snapshot([job], there, dict.fromkeys("abc", gpus)), NOW)


def test_the_newest_slices_are_spare_down_to_the_least_size() -> None:
    assert spare((A, B, C), 2) == (C, B)
    assert spare((A, B, C), 3) == (C,)
    assert spare((A, B, C), 4) == ()
    assert spare((B, A), 2) == (B,), "a slice goes as a whole"


def test_a_group_releases_the_slots_that_a_job_needs_and_no_more() -> None:
    there = group("elastic", A, Slice("b", 2), Slice("c", 2))
    wait, shrink = planned(coming(), there)
    assert isinstance(shrink, Shrink)
    assert (shrink.job_id, shrink.slices, shrink.because_of) == (
        "elastic",
        (there.slices[2],),
        "new",
    )
    assert shrink.reason.message == "continues with fewer workers, so that job new can start"
    assert isinstance(wait, Wait)
    assert (wait.reason.code, wait.blocked_by) == ("room_is_made", ("elastic",))
    assert wait.reason.message.endswith("; job elastic makes room for this job")


def test_nobody_leaves_where_groups_can_shrink() -> None:
    low = group("low", A, least=2, priority=10)
    elastic = group("elastic", Slice("b", 2), Slice("c", 2))
    decisions = planned(coming(2), low, elastic)
    assert [type(d) for d in decisions] == [Wait, Shrink]
    decisions = planned(coming(4), low, elastic)
    assert {type(d): d.job_id for d in decisions[1:]} == {Shrink: "elastic", Preempt: "low"}


def test_who_leaves_is_not_asked_to_shrink_as_well() -> None:
    low = group("low", A, Slice("b", 2), Slice("c", 2), priority=10)
    (_, asked) = planned(coming(6), low)
    assert isinstance(asked, Preempt)


@pytest.mark.parametrize(
    "changes",
    [
        {"held_s": MIN_RUN_S - 1},
        {"priority": 51},
        {"spare": ()},
        {"spare": (), "recalled": (C,)},
    ],
)
def test_who_need_not_shrink(changes: dict[str, Any]) -> None:
    there = group("elastic", A, Slice("b", 2), Slice("c", 2), **changes)
    decisions = planned(coming(2), there)
    assert [type(d) for d in decisions] == [Wait]


def test_slots_that_were_asked_back_are_waited_for() -> None:
    there = group("elastic", A, Slice("b", 2), Slice("c", 2), spare=(), recalled=(Slice("c", 2),))
    (wait,) = planned(coming(2), there)
    assert isinstance(wait, Wait)
    assert (wait.reason.code, wait.slices) == ("room_is_made", (Slice("c", 2),))


def test_a_job_that_fits_asks_nobody() -> None:
    there = group("elastic", A, Slice("b", 2))
    assert [type(d) for d in planned(coming(2), there)] == [Start]
