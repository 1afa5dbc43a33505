"""The monitor of a group waits for its end, and carries out the decisions."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import pytest

from dray.drills import DrillKind, DrillState
from ray_workers.shared.commands import Drill, Limit
from ray_workers.shared.contracts import LEFT_EXIT_CODE, Cause, Frame, FrameKind, Outcome
from ray_workers.shared.heartbeat import RankObservation, RankPhase, RankStatus, TimeCategory
from ray_workers.supervision.fault_injection import FaultInjector
from ray_workers.supervision.recovery import RecoveryController
from ray_workers.supervision.rules.failure_attribution import RankExit
from tests.unit.workers.supervision.observed import Reports, observation
from tests.unit.workers.supervision.standing_group import (
    PATIENCE_S,
    QUICK,
    RECIPE,
    SCRIPT,
    SERVED,
    UNRECOVERED,
    Standing,
    monitor_of,
    watched,
)


@pytest.mark.parametrize(
    ("step", "first_at", "use", "otherwise"),
    [
        (0, 0.0, TimeCategory.STARTING, TimeCategory.STARTING),
        (0, 0.0, TimeCategory.UNREPORTED, TimeCategory.UNREPORTED),
        (0, 1.0, TimeCategory.USEFUL, TimeCategory.IDLE),  # a script that counts its steps from 0
        (9, 1.0, TimeCategory.USEFUL, TimeCategory.IDLE),
    ],
)
async def test_time_that_no_process_accounts_for_is_of_no_use_once_there_was_a_step(
    step: int, first_at: float, use: TimeCategory, otherwise: TimeCategory
) -> None:
    group = Standing(2)
    monitor = monitor_of(SCRIPT, group, Reports())
    assert monitor.use is TimeCategory.STARTING
    status = RankStatus(step, RankPhase.COMPUTE, 0, 0.0, 0, 0, first_at, 100, use, {}, False)
    group.seen = [RankObservation(0, 0, status, 0.1, "S")]
    await monitor.observe()
    assert monitor.use is otherwise


async def test_a_group_ends_with_the_ranks_that_are_served() -> None:
    roles = {"ps": {"num_workers": 1}, "worker": {"num_workers": 2}}
    document = {
        "script": {"entrypoint": "train.py", "roles": roles},
        "resources": {"num_workers": 3},
    }
    group, watching = watched(document, Reports())
    for member in group.placed[1:]:
        await asyncio.sleep(0.02)
        assert not watching.done()
        member.end = RankExit.of(member.rank, 0)
        member.exit.set_result(member.end)
    assert await asyncio.wait_for(watching, PATIENCE_S) is None
    assert [member.rank for member in group.running] == [0]


async def test_a_group_ends_with_a_server_that_fails() -> None:
    roles = {"ps": {"num_workers": 1}, "worker": {"num_workers": 1}}
    document = {
        "script": {"entrypoint": "train.py", "roles": roles},
        "resources": {"num_workers": 2},
    }
    group, watching = watched(document, Reports())
    group.placed[0].exit.set_result(group.placed[0].end)
    group.placed[1].exit.set_result(group.placed[1].end)  # the echo
    assert await asyncio.wait_for(watching, PATIENCE_S) is None


async def test_a_group_whose_ranks_end_well_ends_without_an_outcome() -> None:
    group, watching = watched(SCRIPT, reports := Reports())
    for member in group.placed:
        member.end = RankExit.of(member.rank, 0)
        member.exit.set_result(member.end)
    assert await asyncio.wait_for(watching, PATIENCE_S) is None
    assert reports.all == []


async def test_a_group_that_does_not_leave_in_time_is_ended_when_its_grace_is_over() -> None:
    grace_s, began = 0.2, time.monotonic()
    group, watching = watched_and_asked_to_leave(grace_s)
    outcome = await asyncio.wait_for(watching, PATIENCE_S)
    assert time.monotonic() - began >= grace_s
    message = f"was asked to release its slots, but did not finish within {grace_s:g} s"
    assert outcome == Outcome.of(Cause.PREEMPTED, message)
    assert group.asked_to_leave.is_set()
    assert group.running, "the supervisor ends the rest"


async def test_a_group_that_leaves_in_time_is_not_waited_for() -> None:
    group, watching = watched_and_asked_to_leave(600.0)
    await asyncio.wait_for(group.asked_to_leave.wait(), PATIENCE_S)
    left = RankExit.of(0, LEFT_EXIT_CODE)
    group.placed[0].end = left
    group.placed[0].exit.set_result(left)
    outcome = await asyncio.wait_for(watching, PATIENCE_S)
    assert outcome == Outcome.of(
        Cause.PREEMPTED, "saved a checkpoint and released its slots as requested"
    )


class Leaving(Standing):
    """A group that does nothing on its own when it is asked to leave."""

    def __init__(self, num_ranks: int) -> None:
        super().__init__(num_ranks)
        self.asked_to_leave = asyncio.Event()

    async def ask_to_leave(self) -> None:
        self.asked_to_leave.set()


def watched_and_asked_to_leave(grace_s: float) -> tuple[Leaving, asyncio.Future[Any]]:
    group = Leaving(2)
    monitor = monitor_of(RECIPE, group, Reports())
    group.seen = [observation(rank) for rank in (0, 1)]
    monitor.asked.leave(grace_s)
    return group, asyncio.ensure_future(monitor.watch())


@pytest.mark.parametrize(
    ("is_stopped", "expected"),
    [
        (True, Outcome.of(Cause.STOPPED, "stopped before it started")),
        (False, Outcome.of(Cause.PREEMPTED, "released its slots before it started")),
    ],
)
async def test_a_group_that_ends_before_it_trains_reports_whether_it_was_stopped_or_left(
    is_stopped: bool, expected: Outcome
) -> None:
    monitor = monitor_of(RECIPE, Standing(1), Reports())
    if is_stopped:
        monitor.asked.stop()
    else:
        monitor.asked.leave(1.0)
    assert await asyncio.wait_for(monitor.asked.before_training(), PATIENCE_S) == expected


async def test_a_fault_is_injected_into_a_rank_and_reported() -> None:
    group, reports = Standing(1), cast(Any, Reports())
    drills = FaultInjector(reports)
    monitor = monitor_of(RECIPE | UNRECOVERED["a single rank"], group, reports, drills)
    group.seen = [observation(0)]
    drills.add(Drill("d", DrillKind.KILL, 0, 10))
    assert await asyncio.wait_for(monitor.watch(), PATIENCE_S) is None
    assert group.signals == [(0, signal.SIGKILL)]
    states = [body["state"] for body in reports.of(FrameKind.DRILL)]
    assert states == [DrillState.WAITING, DrillState.STRUCK]


async def test_a_recipe_whose_rank_is_lost_when_another_is_through_has_succeeded() -> None:
    group, watching = watched(RECIPE, Reports())
    group.end(0, 0)
    await group.signal("n", 1, signal.SIGKILL)
    outcome = await asyncio.wait_for(watching, PATIENCE_S)
    assert outcome is not None
    assert outcome.cause is Cause.SUCCEEDED
    assert outcome.message.startswith("rank 0 had exited with code 0 when rank 1 was lost")


async def test_a_recipe_whose_ranks_end_while_it_is_asked_who_is_left_has_succeeded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    group = Standing(SERVED["resources"]["num_workers"])

    async def refuse(_recovery: RecoveryController, _lost: Sequence[Any], **_: Any) -> bool:
        group.end(0, 0)
        group.end(2, 0)
        return False  # no running rank holds the state

    monkeypatch.setattr(RecoveryController, "recover", refuse)
    watching = asyncio.ensure_future(monitor_of(SERVED, group, Reports()).watch())
    await group.signal("n", 1, signal.SIGKILL)
    outcome = await asyncio.wait_for(watching, PATIENCE_S)
    assert outcome is not None
    assert outcome.cause is Cause.SUCCEEDED


async def test_an_error_of_a_rank_when_another_is_through_is_its_own() -> None:
    group, watching = watched(RECIPE | UNRECOVERED["a sharded model"], Reports())
    group.end(0, 0)
    group.end(1, 1)
    assert await asyncio.wait_for(watching, PATIENCE_S) is None


async def test_the_end_of_a_job_does_not_wait_for_its_servers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A late replacement is connected to them, and on a slow machine the wait is long."""
    group = Standing(SERVED["resources"]["num_workers"])

    async def recover(recovery: RecoveryController, lost: Sequence[Any], **_: Any) -> bool:
        recovery.state = recovery.state.begin([member.rank for member in lost], 0.0, 10)
        group.end(0, 0)
        return group.replace(1)

    monkeypatch.setattr(RecoveryController, "recover", recover)
    monitor = monitor_of(SERVED, group, Reports(), timings=replace(QUICK, secondary_s=3600.0))
    watching = asyncio.ensure_future(monitor.watch())
    await group.signal("n", 1, signal.SIGKILL)
    outcome = await asyncio.wait_for(watching, PATIENCE_S)
    assert outcome is not None
    assert outcome.cause is Cause.SUCCEEDED


async def test_the_rank_that_the_others_lost_has_time_to_report_why() -> None:
    group, watching = watched(SCRIPT, Reports())
    echo = {"cause": "worker_lost", "type": "E", "message": "Connection closed by peer"}
    group.left = [Frame(0, 0, FrameKind.ERROR, 1.0, {**echo, "seat": 0, "incarnation": 0})]
    group.end(0, 1)
    async with asyncio.timeout(PATIENCE_S):
        while not group.num_errors_asked:
            await asyncio.sleep(0.01)
    assert not watching.done()
    group.end(1, 1)
    assert await asyncio.wait_for(watching, PATIENCE_S) is None


async def test_a_new_limit_of_the_running_time_replaces_the_first() -> None:
    group = Standing(SCRIPT["resources"]["num_workers"])
    monitor = monitor_of({**SCRIPT, "max_runtime_s": 600}, group, Reports())
    watching = asyncio.ensure_future(monitor.watch())
    await asyncio.sleep(0)
    monitor.running_time.set_limit(Limit(2, 0.05))
    monitor.running_time.set_limit(Limit(1, None))  # an older command arrives late
    outcome = await watching
    assert outcome is not None
    assert outcome.cause is Cause.RUNTIME_EXCEEDED
    assert outcome.message == "reached max_runtime_s after 0.05 s in this attempt"
