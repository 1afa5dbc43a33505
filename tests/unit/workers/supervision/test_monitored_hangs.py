"""The monitor of a group reports hangs, and ends the ranks that cause them."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from ray_workers.shared.contracts import Cause, FrameKind, Outcome
from ray_workers.shared.heartbeat import RankPhase
from ray_workers.shared.supervisor_frames import LossKind
from tests.unit.workers.supervision.observed import Reports, observation
from tests.unit.workers.supervision.standing_group import (
    PATIENCE_S,
    QUICK,
    RECIPE,
    SCRIPT,
    STACK,
    UNRECOVERED,
    Standing,
    monitor_of,
    watched,
)


@pytest.mark.parametrize("kind", UNRECOVERED)
async def test_a_stopped_rank_that_is_not_replaced_is_reported_and_ends_the_attempt(
    kind: str,
) -> None:
    document = RECIPE | UNRECOVERED[kind]
    num_ranks = document["resources"]["num_workers"]
    reports, culprit = Reports(), num_ranks - 1
    group, watching = watched(document, reports)
    waiting = [observation(rank, RankPhase.EXCHANGE, 6.0, collective=6) for rank in range(culprit)]
    group.seen = [*waiting, observation(culprit, age_s=6.0, state="T")]
    outcome = await asyncio.wait_for(watching, PATIENCE_S)
    message = f"rank {culprit} made no progress for 6.0 s in compute, and was killed"
    assert outcome == Outcome.of(Cause.WORKER_LOST, message, culprit)
    assert group.signals == [(culprit, signal.SIGKILL)]
    (bundle,) = reports.of(FrameKind.HANG)
    assert (bundle["culprits"], bundle["phase"], bundle["step"]) == ([culprit], "compute", 10)
    assert [rank["rank"] for rank in bundle["ranks"]] == list(range(num_ranks))
    assert {rank["stack"] for rank in bundle["ranks"]} == {STACK}


async def test_a_rank_that_hangs_is_ended_also_if_it_has_another_number_by_then(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another rank is lost while the stacks are read, and the others go on without it."""
    document = {**RECIPE, "resources": {"num_workers": 3}}
    group, reports = Standing(3), Reports()
    group.seen = [observation(0), observation(1), observation(2, age_s=60.0, state="T")]

    async def stacks(indices: Sequence[int]) -> dict[int, str]:
        if len(group.placed) == 3:
            group.placed = group.placed[1:]
            for rank, member in enumerate(group.placed):
                member.rank = rank
        return {}

    monkeypatch.setattr(group, "stacks", stacks)
    monitor = monitor_of(document, group, reports)
    kinds = []

    async def recover(lost: Any, *, kind: LossKind, began_at: float) -> bool:
        kinds.append((kind, [member.index for member in lost], monitor._hung))
        return False

    monkeypatch.setattr(monitor._recovery, "recover", recover)
    await asyncio.wait_for(monitor.watch(), PATIENCE_S)
    assert group.signals == [(2, signal.SIGKILL)]
    assert kinds == [(LossKind.HANG, [2], set())], "no rank is being ended any more"


async def test_a_hang_is_reported_once_however_long_its_end_takes() -> None:
    group, reports = Standing(1), Reports()
    group.takes_signals = False
    group.seen = [observation(0, age_s=60.0)]
    monitor = monitor_of(RECIPE | UNRECOVERED["a single rank"], group, reports)
    watching = asyncio.ensure_future(monitor.watch())
    async with asyncio.timeout(PATIENCE_S):
        while not group.signals or group.num_observed < 5:
            await asyncio.sleep(0.01)
    watching.cancel()
    assert group.signals == [(0, signal.SIGKILL)]
    assert len(reports.of(FrameKind.HANG)) == 1


@pytest.mark.parametrize(
    ("document", "is_prepared", "state", "is_spared"),
    [
        (SCRIPT, False, "S", True),
        (SCRIPT, True, "S", False),  # its steps count like a recipe's
        (SCRIPT, False, "T", False),  # how long it is stopped is to be known
        (RECIPE, False, "S", False),
    ],
)
async def test_a_script_that_is_not_prepared_is_observed_less_often(
    document: dict[str, Any], is_prepared: bool, state: str, is_spared: bool
) -> None:
    group, reports = Standing(2), Reports()
    group.seen = [
        replace(one, status=replace(one.status, is_prepared=is_prepared), state=state)
        for one in (observation(rank) for rank in (0, 1))
    ]
    monitor = monitor_of(document, group, reports, timings=replace(QUICK, script_period_s=3600.0))
    watching = asyncio.ensure_future(monitor.watch())
    monitor.look()
    async with asyncio.timeout(PATIENCE_S):
        while group.num_observed < (1 if is_spared else 3):
            await asyncio.sleep(0.01)
        assert monitor._pause_s() == (3600.0 if is_spared else QUICK.look_period_s)
        monitor.look()
        while group.num_observed < 2:
            await asyncio.sleep(0.01)
    watching.cancel()


async def test_without_culprits_the_attempt_ends_too() -> None:
    reports = Reports()
    group, watching = watched(RECIPE | UNRECOVERED["a sharded model"], reports)
    group.seen = [observation(rank, RankPhase.UPDATE, 41.0) for rank in (0, 1)]
    outcome = await asyncio.wait_for(watching, PATIENCE_S)
    message = "all ranks hung at the same point for 41.0 s"
    assert outcome == Outcome.of(Cause.WORKER_LOST, message)
    assert (group.signals, [bundle["culprits"] for bundle in reports.of(FrameKind.HANG)]) == (
        [],
        [[]],
    )


async def test_a_rank_that_was_lost_otherwise_is_not_blamed_for_a_hang() -> None:
    group, watching = watched(RECIPE | UNRECOVERED["a single rank"], Reports())
    group.seen = [observation(0)]
    await group.signal("n", 0, signal.SIGKILL)
    assert await asyncio.wait_for(watching, PATIENCE_S) is None


@pytest.mark.parametrize("limit_s", [60, None])
async def test_a_script_that_hangs_is_ended_with_the_rank_that_stands_apart(
    limit_s: int | None,
) -> None:
    document = SCRIPT | {"script": {"entrypoint": "train.py", "hang_limit_s": limit_s}}
    group, watching = watched(document, reports := Reports())
    waits = 'File "/p/torch/distributed/distributed_c10d.py", line 3 in all_reduce'
    group.stack_of = {0: waits}
    group.seen = [observation(rank, age_s=1000.0) for rank in (0, 1)]
    outcome = await asyncio.wait_for(watching, PATIENCE_S)
    message = "rank 1 made no progress for 1000.0 s in compute, and was killed"
    assert outcome == Outcome.of(Cause.USER_ERROR, message, 1)
    (bundle,) = reports.of(FrameKind.HANG)
    assert (bundle["culprits"], bundle["limit_s"]) == ([1], limit_s or 900.0)
    assert [rank["stack"] for rank in bundle["ranks"]] == [waits, STACK]
    assert [rank["collective"] for rank in bundle["ranks"]] == ["all_reduce", 5]


async def test_a_mute_script_is_ended_with_the_rank_that_has_not_joined_a_collective() -> None:
    """Its ranks wait on GPUs, which uses the CPU and shows in no stack."""
    quick = replace(QUICK, script_hang_s=0.02)
    group = Standing(2)
    monitor = monitor_of(SCRIPT, group, reports := Reports(), timings=quick)
    group.seen = [observation(rank, age_s=9.0, first_at=0.0) for rank in (0, 1)]
    record = "\nCollectives of torch.distributed:\n  group 0: "
    group.stack_of = {
        0: f"{STACK}{record}3 begun, in number 3 (nccl:all_reduce) for 950.0 s\n",
        1: f"{STACK}{record}2 begun\n",
    }
    group.busy = {0}
    outcome = await asyncio.wait_for(monitor.watch(), PATIENCE_S)
    message = "rank 1 made no progress for 950.0 s in compute, and was killed"
    assert outcome == Outcome.of(Cause.USER_ERROR, message, 1)
    (bundle,) = reports.of(FrameKind.HANG)
    assert bundle["ranks"][1]["stack"].endswith(
        "This rank has not joined collective 3 (nccl:all_reduce) of group 0, in which "
        "rank 0 is waiting.\n"
    )


async def test_a_script_whose_ranks_all_stand_at_the_same_point_is_ended_as_a_whole() -> None:
    document = SCRIPT | {"script": {"entrypoint": "train.py", "hang_limit_s": 60}}
    group, watching = watched(document, Reports())
    group.seen = [observation(rank, age_s=61.0) for rank in (0, 1)]
    outcome = await asyncio.wait_for(watching, PATIENCE_S)
    message = "all ranks hung at the same point for 61.0 s"
    assert outcome == Outcome.of(Cause.USER_ERROR, message)
    assert group.signals == []


async def test_a_script_that_is_silent_and_shows_no_other_sign_goes_on() -> None:
    group, watching = watched(SCRIPT, reports := Reports())
    group.seen = [observation(rank, age_s=1000.0) for rank in (0, 1)]
    group.stack_of = {0: STACK, 1: ""}
    async with asyncio.timeout(PATIENCE_S):
        while group.num_observed < 20:
            await asyncio.sleep(0.01)
    watching.cancel()
    assert (group.signals, reports.all) == ([], [])
