"""The monitor of a group has lost ranks replaced, and waits until the group has recovered."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import pytest

from dray.drills import DrillKind, DrillState
from ray_workers.node.forkserver.client import ForkFailed
from ray_workers.shared.commands import Drill
from ray_workers.shared.contracts import Cause, FrameKind
from ray_workers.shared.heartbeat import RankObservation
from ray_workers.supervision.fault_injection import FaultInjector
from ray_workers.supervision.recovery import RecoveryController
from ray_workers.supervision.rules.failure_attribution import RankExit
from ray_workers.supervision.rules.recovery_rules import MOST_RESTARTS
from tests.unit.workers.supervision.observed import Reports, observation
from tests.unit.workers.supervision.standing_group import (
    PATIENCE_S,
    QUICK,
    RECIPE,
    SCRIPT,
    SERVED,
    Standing,
    monitor_of,
    watched,
)

LONE: dict[str, Any] = {
    "script": {
        "entrypoint": "train.py",
        "framework": "tensorflow",
        "roles": {
            "chief": {"num_workers": 1},
            "worker": {"num_workers": 2},
            "ps": {"num_workers": 1},
        },
    },
    "resources": {"num_workers": 4},
}


class Respawning(Standing):
    """Its processes can be started again."""

    def __init__(self, num_ranks: int) -> None:
        super().__init__(num_ranks)
        self.restarted = asyncio.Queue[int]()
        self.has_room = True

    async def replace(self, members: Sequence[Any], round_number: int) -> None:  # type: ignore[override]
        if not self.has_room:
            raise ForkFailed("no room")
        for member in members:
            super().replace(member.rank)
            self.restarted.put_nowait(member.rank)


async def test_a_worker_of_a_coordinator_is_started_again_alone_so_often_within_a_time() -> None:
    reports, group = Reports(), Respawning(4)
    drills = FaultInjector(cast(Any, reports))
    monitor = monitor_of(LONE, group, reports, drills)
    watching = asyncio.ensure_future(monitor.watch())
    for _ in range(MOST_RESTARTS):
        group.end(2, -signal.SIGKILL)
        assert await asyncio.wait_for(group.restarted.get(), PATIENCE_S) == 2
    assert not watching.done()
    assert {one["message"] for one in reports.of(FrameKind.REGROUPING)} == {
        "rank 2 (worker 1) was killed by SIGKILL; the other ranks continue"
    }
    assert [(one["ranks"], one["world_size"]) for one in reports.of(FrameKind.REGROUPED)] == [
        ([2], 4)
    ] * MOST_RESTARTS
    group.end(2, -signal.SIGKILL)
    assert await asyncio.wait_for(watching, PATIENCE_S) is None
    assert [end.rank for end in group.ended()] == [2]


@pytest.mark.parametrize(
    ("rank", "code", "has_room"),
    [
        (3, -signal.SIGKILL, True),  # a server has a part of the weights
        (0, -signal.SIGKILL, True),
        (1, 1, True),  # it would fail again
        (1, None, True),  # no actor holds its port
        (1, -signal.SIGKILL, False),
    ],
)
async def test_the_loss_of_a_rank_that_is_not_started_alone_ends_the_group(
    rank: int, code: int | None, has_room: bool
) -> None:
    group = Respawning(4)
    group.has_room = has_room
    watching = asyncio.ensure_future(monitor_of(LONE, group, Reports()).watch())
    group.placed[rank].end = RankExit.of(rank, code)
    group.placed[rank].exit.set_result(group.placed[rank].end)
    assert await asyncio.wait_for(watching, PATIENCE_S) is None
    assert group.restarted.empty()
    assert [end.rank for end in group.ended()] == [rank]


async def test_a_drill_passes_once_a_standalone_rank_is_restarted() -> None:
    reports, group = Reports(), Respawning(4)
    drills = FaultInjector(cast(Any, reports))
    monitor = monitor_of(LONE, group, reports, drills)
    watching = asyncio.ensure_future(monitor.watch())
    drills.add(Drill("d", DrillKind.KILL, 1, None))
    group.seen = [observation(rank) for rank in range(4)]
    monitor.look()
    assert await asyncio.wait_for(group.restarted.get(), PATIENCE_S) == 1
    async with asyncio.timeout(PATIENCE_S):
        while reports.of(FrameKind.DRILL)[-1]["state"] != DrillState.PASSED:
            await asyncio.sleep(0.01)
    group.end(0, 0)
    assert await asyncio.wait_for(watching, PATIENCE_S) is None, "the chief has ended"


@pytest.mark.parametrize("is_prepared", [False, True])
async def test_a_killed_rank_of_a_script_is_replaced_if_the_script_is_prepared(
    is_prepared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Sequence[Any]] = []

    async def recover(_: Any, lost: Sequence[Any], **kind: Any) -> bool:
        asked.append(lost)
        return False

    monkeypatch.setattr(RecoveryController, "recover", recover)
    group, watching = watched(SCRIPT, Reports())
    group.seen = [observation(0, is_prepared=is_prepared)]
    await group.signal("n", 1, signal.SIGKILL)
    if not is_prepared:  # the others fail in the collective without it
        await group.signal("n", 0, signal.SIGKILL)
    assert await asyncio.wait_for(watching, PATIENCE_S) is None
    assert bool(asked) is is_prepared


@pytest.mark.parametrize(
    ("document", "cause"),
    [(RECIPE, Cause.SUCCEEDED), (SERVED, Cause.SUCCEEDED), (SCRIPT, Cause.WORKER_LOST)],
)
async def test_a_replacement_does_not_wait_for_a_rank_that_is_through(
    document: dict[str, Any], cause: Cause, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = range(document["resources"]["num_workers"])
    group = Standing(len(ranks))

    async def recover(recovery: RecoveryController, lost: Sequence[Any], **_: Any) -> bool:
        recovery.state = recovery.state.begin([member.rank for member in lost], 0.0, 10)
        replaced = group.replace(1)
        group.end(0, 0)  # it was at its end already
        return replaced

    monkeypatch.setattr(RecoveryController, "recover", recover)
    monitor = monitor_of(document, group, Reports())
    group.seen = [observation(rank, is_prepared=True) for rank in ranks]
    watching = asyncio.ensure_future(monitor.watch())
    await group.signal("n", 1, signal.SIGKILL)
    outcome = await asyncio.wait_for(watching, PATIENCE_S)
    assert outcome is not None
    assert outcome.cause is cause
    assert [member.rank for member in group.running] == [*ranks[1:]], (
        "ending it is for the supervisor"
    )


@pytest.mark.parametrize(
    ("document", "has_first_ended", "node_answers"),
    [
        (RECIPE, False, False),
        (RECIPE, True, False),
        (SCRIPT, False, False),
        (SCRIPT, True, False),
        (SERVED, False, False),
        (SERVED, True, True),  # the first worker is in no group with the replaced one
    ],
)
async def test_a_group_that_ends_before_it_was_seen_again_has_recovered(
    document: dict[str, Any],
    has_first_ended: bool,
    node_answers: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The exits of its ranks show that. has_first_ended: the others run still."""
    num_ranks = document["resources"]["num_workers"]
    group, reports, never = Standing(num_ranks), Reports(), replace(QUICK, look_period_s=3600.0)
    never = replace(never, quick_look_period_s=3600.0, script_period_s=3600.0)

    async def observations() -> list[RankObservation]:
        has_begun = any(member.end.last_status for member in group.placed)
        return [] if has_begun and not node_answers else group.seen

    monkeypatch.setattr(group, "observations", observations)

    async def recover(recovery: RecoveryController, lost: Sequence[Any], **_: Any) -> bool:
        recovery.state = recovery.state.begin([member.rank for member in lost], 0.0, 10)
        group.seen = [
            observation(rank, round_number=1, resumed_step=10, first_at=2.0, is_prepared=True)
            for rank in range(num_ranks)
        ]
        replaced = group.replace(1)
        for rank in range(1 if has_first_ended else num_ranks):
            group.end(rank, 0)
        return replaced

    monkeypatch.setattr(RecoveryController, "recover", recover)
    monitor = monitor_of(document, group, reports, timings=never)
    group.seen = [observation(rank, is_prepared=True) for rank in range(num_ranks)]
    watching = asyncio.ensure_future(monitor.watch())
    await group.signal("n", 1, signal.SIGKILL)
    async with asyncio.timeout(PATIENCE_S):
        while not reports.of(FrameKind.REGROUPED):
            await asyncio.sleep(0.001)
    for member in group.running:
        group.end(member.rank, 0)
    assert await asyncio.wait_for(watching, PATIENCE_S) is None
    (report,) = reports.of(FrameKind.REGROUPED)
    assert (report["ranks"], report["steps_lost"]) == ([1], 0)


async def test_ends_of_ranks_without_a_last_status_show_no_recovery(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    group, reports = Standing(2), Reports()

    async def recover(recovery: RecoveryController, lost: Sequence[Any], **_: Any) -> bool:
        recovery.state = recovery.state.begin([member.rank for member in lost], 0.0, 10)
        group.replace(1)
        for rank in range(2):
            group.end(rank, 0)
        return True

    monkeypatch.setattr(RecoveryController, "recover", recover)
    watching = asyncio.ensure_future(monitor_of(RECIPE, group, reports).watch())
    await group.signal("n", 1, signal.SIGKILL)
    outcome = await asyncio.wait_for(watching, PATIENCE_S)
    assert outcome is not None
    assert outcome.cause is Cause.SUCCEEDED
    assert reports.of(FrameKind.REGROUPED) == []


@pytest.mark.parametrize(
    ("document", "num_trained", "cause"),
    [
        (RECIPE, 3, Cause.SUCCEEDED),
        (SCRIPT, 2, Cause.SUCCEEDED),
        (SCRIPT, 3, Cause.WORKER_LOST),  # rank 2 has taken steps, and may have some left
    ],
)
async def test_an_added_rank_does_not_wait_for_ranks_that_have_ended(
    document: dict[str, Any], num_trained: int, cause: Cause
) -> None:
    group = Standing(3)
    monitor = monitor_of(document, group, Reports())
    trained = [observation(rank) for rank in range(num_trained)]
    coming = [observation(rank, step=0, first_at=0.0) for rank in range(num_trained, 3)]
    group.seen = trained + coming
    recovery = monitor._recovery
    recovery.state = recovery.state.begin([], 0.0, 10)  # rank 2 is being added
    await monitor.observe()
    watching = asyncio.ensure_future(monitor.watch())
    for rank in (0, 1):
        group.end(rank, 0)
    outcome = await asyncio.wait_for(watching, PATIENCE_S)
    assert outcome is not None
    assert outcome.cause is cause
    assert "when the group was about to change its size" in outcome.message
