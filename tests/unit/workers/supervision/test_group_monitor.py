"""The monitor of a group waits for its end, and carries out the decisions."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from dray.drills import DrillKind, DrillState
from dray.spec import JobSpec
from ray_workers.node.forkserver.client import ForkFailed
from ray_workers.shared.commands import Drill
from ray_workers.shared.contracts import (
    LEFT_EXIT_CODE,
    AttemptSpec,
    Cause,
    Frame,
    FrameKind,
    Outcome,
    Slice,
)
from ray_workers.shared.frames import LossKind
from ray_workers.shared.heartbeat import RankObservation, RankPhase, RankStatus, TimeCategory
from ray_workers.shared.processes.machine_pace import MachinePace
from ray_workers.shared.processes.procfs import Activity
from ray_workers.supervision.fault_injection import FaultInjector
from ray_workers.supervision.group_monitor import GroupMonitor
from ray_workers.supervision.recovery import RecoveryController
from ray_workers.supervision.rules.failure_attribution import RankExit
from ray_workers.supervision.rules.recovery_rules import MOST_RESTARTS
from ray_workers.supervision.rules.timings import Timings
from service.domain.attempts.group_traits import traits_of
from service.domain.documents import CheckedDocument
from tests.unit.workers.supervision.observed import Reports, observation
from tests.unit.workers.supervision.recovering import recovery_of
from tests.wire import attempt_spec

UNRECOVERED: dict[str, dict[str, Any]] = {
    "a single rank": {"resources": {"num_workers": 1}},
    "a sharded model": {"parallel": {"shard": 2}},
    "ranks that step by themselves": {"sync": {"every": 4}},
    "GPUs": {"resources": {"num_workers": 2, "gpus_per_worker": 1}},
}
PATIENCE_S = 60.0
QUICK = Timings(
    look_period_s=0.01,
    script_period_s=0.01,
    sure_s=0.0,
    script_look_period_s=0.01,
    script_stacks_apart_s=0.0,
    echo_s=0.01,
)
RECIPE = {"recipe": "image_classification", "resources": {"num_workers": 2}}
SERVED = {
    "recipe": "image_classification",
    "resources": {"num_workers": 3},
    "sync": {"kind": "parameter_server", "servers": 1},
}
SCRIPT = {"script": {"entrypoint": "train.py"}, "resources": {"num_workers": 2}}
STACK = 'Thread 0x1 (most recent call first):\n  File "loop.py", line 1 in _step\n'


def attempt(document: dict[str, Any]) -> AttemptSpec:
    workers = document["resources"]["num_workers"]
    has_gpus = "gpus_per_worker" in document["resources"]
    job = CheckedDocument.of(JobSpec.model_validate(document))
    return attempt_spec(
        spec=document,
        slices=(Slice("n", workers),),
        bundle={"CPU": 1.0} | ({"GPU": 1.0} if has_gpus else {}),
        traits=traits_of(job, has_gpus=has_gpus),
    )


class Standing:
    """A group whose observations a test sets; a rank that is killed ends."""

    def __init__(self, num_ranks: int) -> None:
        self.seen: list[RankObservation] = []
        self.signals: list[tuple[int, int]] = []
        self.takes_signals = True
        self.num_observed = 0
        self.slots: list[Any] = []
        self.stack_of: dict[int, str] = {}
        self.busy: set[int] = set()
        """Ranks that use a CPU all the time."""
        self.left: list[Frame] = []
        """ERROR frames."""
        self.num_errors_asked = 0
        self._exits: list[asyncio.Future[RankExit]] = [
            asyncio.get_running_loop().create_future() for _ in range(num_ranks)
        ]
        self.placed = [self._member(rank, ends) for rank, ends in enumerate(self._exits)]

    def _member(self, rank: int, ends: asyncio.Future[RankExit]) -> Any:
        killed = RankExit.of(rank, -signal.SIGKILL)
        return SimpleNamespace(
            seat=rank, incarnation=0, rank=rank, node_id="n", exit=ends, end=killed
        )

    @property
    def running(self) -> list[Any]:
        return [member for member in self.placed if not member.exit.done()]

    async def store_is_lost(self) -> None:
        await asyncio.Event().wait()

    async def observations(self) -> list[RankObservation]:
        self.num_observed += 1
        return self.seen

    async def stacks(self, seats: Sequence[int]) -> dict[int, str]:
        return {seat: self.stack_of.get(seat, STACK) for seat in seats}

    async def activity(self) -> dict[tuple[int, int], Activity]:
        used = {rank: time.monotonic() for rank in self.busy}
        return {
            (one.rank, one.incarnation): Activity(used.get(one.rank, 1.0), 0) for one in self.seen
        }

    async def errors(self) -> list[Frame]:
        self.num_errors_asked += 1
        return self.left

    def ended(self) -> list[RankExit]:
        return [member.end for member in self.placed if member.exit.done()]

    def end(self, rank: int, code: int) -> None:
        status = next((one.status for one in self.seen if one.rank == rank), None)
        self.placed[rank].end = replace(RankExit.of(rank, code), last_status=status)
        self._exits[rank].set_result(self.placed[rank].end)

    def replace(self, rank: int) -> bool:
        """Another process runs in the place of one that has ended."""
        self._exits[rank] = asyncio.get_running_loop().create_future()
        self.placed[rank] = self._member(rank, self._exits[rank])
        return True

    async def signal(self, node_id: str, seat: int, number: int) -> bool:
        self.signals.append((seat, number))
        if number == signal.SIGKILL and self.takes_signals:
            self._exits[seat].set_result(RankExit.of(seat, -signal.SIGKILL))
        return True


async def _prepared(_node_ids: Any) -> None:
    """Every node is ready."""


def monitor_of(
    document: dict[str, Any],
    group: Any,
    reports: Any,
    drills: FaultInjector | None = None,
    timings: Timings = QUICK,
) -> GroupMonitor:
    parts = (attempt(document), group, group, reports)
    pace = MachinePace()
    changes = recovery_of(parts, _prepared, pace, timings)
    return GroupMonitor(*parts, drills or FaultInjector(reports), *changes, pace, timings)


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


def watched(document: dict[str, Any], reports: Reports) -> tuple[Standing, asyncio.Future[Any]]:
    group = Standing(document["resources"]["num_workers"])
    return group, asyncio.ensure_future(monitor_of(document, group, reports).watch())


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
    message = f"rank {culprit} stood still for 6.0 s in compute, and was ended"
    assert outcome == Outcome.of(Cause.WORKER_LOST, message, culprit)
    assert group.signals == [(culprit, signal.SIGKILL)]
    (bundle,) = reports.of(FrameKind.HANG)
    assert (bundle["culprits"], bundle["phase"], bundle["step"]) == ([culprit], "compute", 10)
    assert [rank["rank"] for rank in bundle["ranks"]] == list(range(num_ranks))
    assert {rank["stack"] for rank in bundle["ranks"]} == {STACK}


async def test_a_rank_that_hangs_is_ended_also_if_it_has_another_number_by_then(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another rank is lost while the stacks are read, and the others continue without it."""
    document = {**RECIPE, "resources": {"num_workers": 3}}
    group, reports = Standing(3), Reports()
    group.seen = [observation(0), observation(1), observation(2, age_s=60.0, state="T")]

    async def stacks(seats: Sequence[int]) -> dict[int, str]:
        if len(group.placed) == 3:
            group.placed = group.placed[1:]
            for rank, member in enumerate(group.placed):
                member.rank = rank
        return {}

    monkeypatch.setattr(group, "stacks", stacks)
    monitor = monitor_of(document, group, reports)
    kinds = []

    async def recover(lost: Any, *, kind: LossKind, began_at: float) -> bool:
        kinds.append((kind, [member.seat for member in lost], monitor._hung))
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
    message = "all ranks stood still at the same place for 41.0 s"
    assert outcome == Outcome.of(Cause.WORKER_LOST, message)
    assert (group.signals, [bundle["culprits"] for bundle in reports.of(FrameKind.HANG)]) == (
        [],
        [[]],
    )


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
    """Its processes can be restarted."""

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
        "rank 2 (worker 1) was killed by SIGKILL; the others go on"
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


async def test_a_drill_passes_once_a_lone_rank_is_started_again() -> None:
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


async def test_a_group_whose_ranks_end_well_ends_without_an_outcome() -> None:
    group, watching = watched(SCRIPT, reports := Reports())
    for member in group.placed:
        member.end = RankExit.of(member.rank, 0)
        member.exit.set_result(member.end)
    assert await asyncio.wait_for(watching, PATIENCE_S) is None
    assert reports.all == []


async def test_a_rank_that_was_lost_otherwise_is_not_blamed_for_a_hang() -> None:
    group, watching = watched(RECIPE | UNRECOVERED["a single rank"], Reports())
    group.seen = [observation(0)]
    await group.signal("n", 0, signal.SIGKILL)
    assert await asyncio.wait_for(watching, PATIENCE_S) is None


async def test_a_group_that_does_not_leave_in_time_is_ended_when_its_grace_is_over() -> None:
    grace_s, began = 0.2, time.monotonic()
    group, watching = watched_and_asked_to_leave(grace_s)
    outcome = await asyncio.wait_for(watching, PATIENCE_S)
    assert time.monotonic() - began >= grace_s
    message = f"asked to leave its slots; it did not end by itself within {grace_s:g} s"
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
    assert outcome == Outcome.of(Cause.PREEMPTED, "saved a checkpoint and left its slots as asked")


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
        (False, Outcome.of(Cause.PREEMPTED, "left its slots before it started")),
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


async def test_a_recipe_whose_rank_is_lost_when_another_is_through_has_succeeded() -> None:
    group, watching = watched(RECIPE, Reports())
    group.end(0, 0)
    await group.signal("n", 1, signal.SIGKILL)
    outcome = await asyncio.wait_for(watching, PATIENCE_S)
    assert outcome is not None
    assert outcome.cause is Cause.SUCCEEDED
    assert outcome.message.startswith("rank 0 had ended with code 0 when rank 1 was lost")


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
    monitor = monitor_of(SERVED, group, Reports(), timings=replace(QUICK, echo_s=3600.0))
    watching = asyncio.ensure_future(monitor.watch())
    await group.signal("n", 1, signal.SIGKILL)
    outcome = await asyncio.wait_for(watching, PATIENCE_S)
    assert outcome is not None
    assert outcome.cause is Cause.SUCCEEDED


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
async def test_a_rank_that_is_taken_in_does_not_wait_for_those_that_are_through(
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
    assert "when the group was to change its size" in outcome.message


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
    message = "rank 1 stood still for 1000.0 s in compute, and was ended"
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
    message = "rank 1 stood still for 950.0 s in compute, and was ended"
    assert outcome == Outcome.of(Cause.USER_ERROR, message, 1)
    (bundle,) = reports.of(FrameKind.HANG)
    assert bundle["ranks"][1]["stack"].endswith(
        "Has not joined collective 3 (nccl:all_reduce) of group 0, in which rank 0 waits.\n"
    )


async def test_a_script_whose_ranks_all_stand_at_the_same_place_is_ended_as_a_whole() -> None:
    document = SCRIPT | {"script": {"entrypoint": "train.py", "hang_limit_s": 60}}
    group, watching = watched(document, Reports())
    group.seen = [observation(rank, age_s=61.0) for rank in (0, 1)]
    outcome = await asyncio.wait_for(watching, PATIENCE_S)
    message = "all ranks stood still at the same place for 61.0 s"
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


async def test_the_rank_that_the_others_lost_has_time_to_report_why() -> None:
    group, watching = watched(SCRIPT, Reports())
    echo = {"cause": "worker_lost", "message": "Connection closed by peer"}
    group.left = [Frame(0, 0, FrameKind.ERROR, 1.0, {**echo, "seat": 0, "incarnation": 0})]
    group.end(0, 1)
    async with asyncio.timeout(PATIENCE_S):
        while not group.num_errors_asked:
            await asyncio.sleep(0.01)
    assert not watching.done()
    group.end(1, 1)
    assert await asyncio.wait_for(watching, PATIENCE_S) is None
