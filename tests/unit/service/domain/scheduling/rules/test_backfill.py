"""A job whose end is known uses reserved slots only if it does not delay other jobs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ray_workers.shared.contracts import Slice
from service.domain.scheduling.policy import (
    Holder,
    Node,
    Request,
    RunningJob,
    Snapshot,
    Start,
    WaitingJob,
    plan,
)
from service.domain.scheduling.rules.backfill import MAX_BLOCKED
from service.domain.scheduling.rules.eviction import MIN_RUN_S
from service.domain.scheduling.rules.order import SETTLING_S
from tests.unit.service.domain.scheduling.snapshots import GPU, HOUR, NOW, snapshot

LARGE = WaitingJob("large", 0, 50, 1, Request(4, GPU), waited_s=0.0)
SMALL = WaitingJob("small", 0, 50, 2, Request(1, GPU), waited_s=0.0, ends_within_s=600.0)
THERE = RunningJob("there", 50, 0, Request(3, GPU), (Slice("n", 3),), HOUR, left_s=HOUR)


def started(
    *queue: WaitingJob, there: tuple[RunningJob, ...] = (THERE,), gpus: float = 4.0
) -> list[str]:
    decisions = plan(snapshot(queue, there, {"n": gpus}), NOW)
    return [d.job_id for d in decisions if isinstance(d, Start)]


def test_a_small_job_passes_that_ends_long_before_the_large_one_can_start() -> None:
    assert started(LARGE, SMALL) == ["small"]
    assert started(LARGE, replace(SMALL, ends_within_s=HOUR / 2 - SETTLING_S)) == ["small"]


@pytest.mark.parametrize(
    "changes",
    [
        {"left_s": None},
        {"left_s": 2 * (600.0 + SETTLING_S) - 1},
        {"is_leaving": True},
        {"priority": 40, "held_s": MIN_RUN_S - 1},
        {"yields": True, "held_s": 0.0},
    ],
)
def test_it_waits_where_those_in_the_way_may_be_gone_before(changes: dict[str, Any]) -> None:
    assert started(LARGE, SMALL, there=(replace(THERE, **changes),)) == []


def test_a_job_without_a_known_end_waits() -> None:
    assert started(LARGE, replace(SMALL, ends_within_s=None)) == []
    assert started(LARGE, replace(SMALL, ends_within_s=HOUR / 2)) == []


def test_the_first_that_may_start_of_all_ahead_counts() -> None:
    soon = RunningJob("soon", 50, 0, Request(1, GPU), (Slice("n", 1),), HOUR, left_s=60.0)
    middle = replace(LARGE, job_id="middle", request=Request(2, GPU))
    there = (THERE, soon)
    assert started(LARGE, SMALL, there=there, gpus=5.0) == ["small"]
    assert started(LARGE, middle, SMALL, there=there, gpus=5.0) == []


def test_slots_that_others_than_we_hold_may_be_free_at_any_time() -> None:
    node = Node("n", {"GPU": 8.0}, {"GPU": 1.0})
    large = replace(LARGE, request=Request(8, GPU))
    holders = (Holder("there", THERE.slices, GPU),)
    seen = Snapshot((large, SMALL), (node,), True, holders, running=(THERE,))
    assert not [d for d in plan(seen, NOW) if isinstance(d, Start)]


def test_a_job_that_waits_for_reserved_slots_alone_is_not_passed() -> None:
    rigid = replace(SMALL, job_id="rigid", seq=2, ends_within_s=None)
    assert started(LARGE, rigid, replace(SMALL, seq=3)) == []


def test_behind_a_long_queue_nobody_passes() -> None:
    ahead = [replace(LARGE, job_id=f"large-{at}") for at in range(MAX_BLOCKED)]
    assert started(*ahead, SMALL) == ["small"]
    assert started(LARGE, *ahead, SMALL) == []


def test_slots_that_a_group_was_asked_for_count_once() -> None:
    one = Slice("n", 1)
    group = RunningJob("group", 50, 0, Request(2, GPU), (one, one), HOUR, recalled=(one,))
    assert started(LARGE, SMALL, there=(THERE, group), gpus=6.0) == ["small"]
