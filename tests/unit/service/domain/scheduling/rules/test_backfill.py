"""A job whose end is known uses reserved slots only if it does not delay the first blocked job."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ray_workers.shared.slices import Slice
from service.domain.scheduling.policy import (
    Holder,
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
from service.domain.scheduling.rules.order import LONGEST_WAIT_S, SETTLING_S
from tests.unit.service.domain.scheduling.snapshots import GPU, HOUR, NOW, snapshot

LARGE = WaitingJob("large", 0, 50, 1, Request(4, GPU), waited_s=0.0, left_s=60.0)
SMALL = WaitingJob(
    "small", 0, 50, 2, Request(1, GPU), waited_s=0.0, left_s=HOUR, ends_within_s=600.0
)
THERE = RunningJob("there", 50, 0, Request(3, GPU), (Slice("n", 3),), HOUR, left_s=HOUR)


def started(
    *queue: WaitingJob, there: tuple[RunningJob, ...] = (THERE,), gpus: float = 4.0
) -> list[str]:
    decisions = plan(snapshot(queue, there, {"n": gpus}), NOW)
    return [d.job_id for d in decisions if isinstance(d, Start)]


def test_a_small_job_passes_that_ends_before_the_large_one_starts() -> None:
    assert started(LARGE, SMALL) == ["small"]
    assert started(LARGE, replace(SMALL, ends_within_s=HOUR - SETTLING_S)) == ["small"]
    assert started(LARGE, replace(SMALL, ends_within_s=HOUR - SETTLING_S + 1)) == []


def test_a_job_without_a_known_end_passes_only_on_slots_that_the_large_one_leaves() -> None:
    endless = replace(SMALL, ends_within_s=None)
    assert started(LARGE, endless) == []
    assert started(LARGE, endless, gpus=5.0) == ["small"]
    assert started(LARGE, endless, replace(endless, job_id="other"), gpus=5.0) == ["small"]


@pytest.mark.parametrize(
    ("changes", "ends_in_s"),
    [
        ({"left_s": 1000.0}, 1000.0),
        ({"left_s": HOUR, "ends_within_s": 1000.0}, 1000.0),
        ({"left_s": None, "guess_s": 1000.0}, 1000.0),
        ({"left_s": None, "held_s": 1000.0}, 1000.0 + SETTLING_S),
    ],
)
def test_a_running_job_ends_as_forecast_or_at_its_limit(
    changes: dict[str, Any], ends_in_s: float
) -> None:
    there = (replace(THERE, **changes),)
    just = replace(SMALL, ends_within_s=ends_in_s - SETTLING_S)
    late = replace(SMALL, ends_within_s=ends_in_s - SETTLING_S + 1)
    assert started(LARGE, just, there=there) == ["small"]
    assert started(LARGE, late, there=there) == []


def test_only_the_first_blocked_job_reserves_slots() -> None:
    second = replace(LARGE, job_id="second", left_s=120.0)
    endless = replace(SMALL, ends_within_s=None)
    assert started(LARGE, second, endless, gpus=5.0) == ["small"]


def test_the_reservation_is_on_the_slots_that_are_free_first() -> None:
    later = RunningJob("later", 50, 0, Request(4, GPU), (Slice("m", 4),), HOUR, left_s=2 * HOUR)
    seen = snapshot((LARGE, SMALL), (THERE, later), {"n": 4.0, "m": 4.0})
    waits = [d for d in plan(seen, NOW) if isinstance(d, Wait)]
    assert [wait.reserved for wait in waits] == [(Slice("n", 4),)]


def test_jobs_that_save_their_state_use_reserved_slots_until_the_job_has_waited_long() -> None:
    recipe = replace(SMALL, ends_within_s=None, yields=True)
    assert started(LARGE, recipe) == ["small"]
    assert started(replace(LARGE, waited_s=LONGEST_WAIT_S + 1), recipe) == []


def of_others(*jobs: WaitingJob, nodes_to_come: int = 0) -> list[str]:
    """Return the jobs that start on a node with 8 GPUs, of which 3 are held by a job, 1 is free,
    and the others are held by other programs."""
    node = Node("n", {"GPU": 8.0}, {"GPU": 1.0})
    to_come = tuple(Node(f"new{n}", {"GPU": 8.0}, {"GPU": 8.0}) for n in range(nodes_to_come))
    holders = (Holder("there", THERE.slices, GPU),)
    seen = Snapshot(jobs, (node,), True, holders, running=(THERE,), to_come=to_come)
    return [decision.job_id for decision in plan(seen, NOW) if isinstance(decision, Start)]


@pytest.mark.parametrize(("workers", "nodes_to_come"), [(8, 0), (16, 1)])
def test_only_a_job_that_waits_for_running_jobs_reserves_slots(
    workers: int, nodes_to_come: int
) -> None:
    """Other programs may keep their slots for any time, and new nodes may never come."""
    endless = replace(SMALL, ends_within_s=None)
    large = replace(LARGE, request=Request(workers, GPU), waited_s=2 * LONGEST_WAIT_S)
    assert of_others(large, endless, nodes_to_come=nodes_to_come) == ["small"]
    second = replace(LARGE, job_id="second")
    assert of_others(large, second, endless, nodes_to_come=nodes_to_come) == []
    late = replace(endless, waited_s=LONGEST_WAIT_S + 1)
    assert of_others(large, second, late, nodes_to_come=nodes_to_come) == ["small"], "overdue"


def test_slots_that_a_shared_cluster_still_shows_as_taken_are_reserved() -> None:
    """Otherwise, jobs behind would take slots from a gang whenever a job ends."""
    node = Node("n", {"GPU": 8.0}, {"GPU": 3.0})
    endless = replace(SMALL, ends_within_s=None)
    large = replace(LARGE, request=Request(8, GPU))
    holders = (Holder("there", THERE.slices, GPU),)
    facts = {"holders": holders, "running": (THERE,), "slots_lag": True}
    seen = Snapshot((large, endless), (node,), True, **facts)
    assert not [each for each in plan(seen, NOW) if isinstance(each, Start)]


def test_no_job_leaves_while_a_shared_cluster_might_show_free_slots_as_taken() -> None:
    high = replace(LARGE, priority=90)
    seen = snapshot((high,), (THERE,), {"n": 4.0})
    assert [each.job_id for each in plan(seen, NOW) if isinstance(each, Preempt)] == ["there"]
    (wait,) = plan(replace(seen, slots_lag=True), NOW)
    assert isinstance(wait, Wait)
    assert wait.reserved == (Slice("n", 4),)


def test_slots_of_ended_jobs_are_reserved_while_they_are_released() -> None:
    node = Node("n", {"GPU": 8.0}, {"GPU": 5.0})
    holders = (Holder("over", THERE.slices, GPU),)
    endless = replace(SMALL, ends_within_s=None)
    large = replace(LARGE, request=Request(8, GPU))
    assert not [
        decision
        for decision in plan(Snapshot((large, endless), (node,), True, holders), NOW)
        if isinstance(decision, Start)
    ]


def test_a_job_reserves_slots_of_jobs_that_the_same_plan_starts() -> None:
    first = replace(SMALL, job_id="first", priority=90, request=Request(4, GPU))
    large = replace(LARGE, priority=80, request=Request(8, GPU))
    node = Node("n", {"GPU": 8.0}, {"GPU": 8.0})
    decisions = plan(Snapshot((first, large, SMALL), (node,), True), NOW)
    assert [d.job_id for d in decisions if isinstance(d, Start)] == ["first"]


def test_slots_that_a_group_was_asked_for_count_once() -> None:
    one = Slice("n", 1)
    group = RunningJob("group", 50, 0, Request(2, GPU), (one, one), HOUR, recalled=(one,))
    assert started(LARGE, SMALL, there=(THERE, group), gpus=6.0) == ["small"]


def test_jobs_that_the_large_one_waits_for_still_leave_for_a_recipe() -> None:
    high = RunningJob("high", 90, 0, Request(4, GPU), (Slice("n", 4),), HOUR, left_s=30 * HOUR)
    low = RunningJob("low", 10, 0, Request(4, GPU), (Slice("n", 4),), HOUR, left_s=40 * HOUR)
    gang = replace(LARGE, priority=90, request=Request(8, GPU), left_s=HOUR)
    recipe = replace(SMALL, priority=80, request=Request(4, GPU), ends_within_s=None, yields=True)
    decisions = plan(snapshot((gang, recipe), (high, low), {"n": 8.0}), NOW)
    assert [d.job_id for d in decisions if isinstance(d, Preempt)] == ["low"]
    late = replace(gang, waited_s=LONGEST_WAIT_S + 1)
    decisions = plan(snapshot((late, recipe), (high, low), {"n": 8.0}), NOW)
    assert not any(isinstance(d, Preempt) for d in decisions), "the recipe could not start"


def test_an_overdue_job_does_not_wait_for_a_job_without_a_limit() -> None:
    endless = RunningJob("endless", 50, 0, Request(4, GPU), (Slice("m", 4),), HOUR, left_s=1.0)
    for waited_s, limit_s, node in (
        (0.0, HOUR, "m"),
        (LONGEST_WAIT_S + 1, HOUR, "n"),
        (LONGEST_WAIT_S + 1, 1.0, "n"),
    ):
        limited = replace(endless, job_id="limited", slices=(Slice("n", 4),), left_s=limit_s)
        limited = replace(limited, ends_within_s=limit_s)
        seen = snapshot(
            (replace(LARGE, waited_s=waited_s),), (endless, limited), {"m": 4.0, "n": 4.0}
        )
        (wait,) = [d for d in plan(seen, NOW) if isinstance(d, Wait)]
        assert wait.reserved == (Slice(node, 4),)
