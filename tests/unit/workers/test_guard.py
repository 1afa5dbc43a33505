"""A group that hangs is looked at, told of, and ended where it does not recover in place."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from dray.spec import JobSpec
from ray_workers.shared.contracts import AttemptSpec, Cause, FrameKind, Outcome, Slice
from ray_workers.shared.frames import Report
from ray_workers.shared.heartbeat import RankObservation, RankPhase, RankStatus, TimeCategory
from ray_workers.shared.machine_pace import MachinePace
from ray_workers.supervision import group_monitor as guarding
from ray_workers.supervision import hang_detector, node_clients
from ray_workers.supervision.failure_attribution import RankExit
from ray_workers.supervision.fault_injection import FaultInjector
from ray_workers.supervision.group_monitor import GroupMonitor
from ray_workers.supervision.hang_detector import FIRST_STEP_LEAST_S, LEAST_S, PATIENCE, Hang
from ray_workers.supervision.recovery import RecoveryController
from ray_workers.supervision.recovery_rules import why_never
from tests.wire import attempt_spec

pytestmark = pytest.mark.anyio

UNMENDED: dict[str, dict[str, Any]] = {
    "a single rank": {"resources": {"num_workers": 1}},
    "a sharded model": {"parallel": {"shard": 2}},
    "ranks that step by themselves": {"sync": {"every": 4}},
    "GPUs": {"resources": {"num_workers": 2, "gpus_per_worker": 1}},
}
PATIENCE_S = 60.0
RECIPE = {"recipe": "image_classification", "resources": {"num_workers": 2}}
SCRIPT = {"script": {"entrypoint": "train.py"}, "resources": {"num_workers": 2}}
STACK = 'Thread 0x1 (most recent call first):\n  File "loop.py", line 1 in _step\n'


def attempt(document: dict[str, Any]) -> AttemptSpec:
    workers = document["resources"]["num_workers"]
    has_gpus = "gpus_per_worker" in document["resources"]
    unmended = why_never(JobSpec.model_validate(document), num_workers=workers, has_gpus=has_gpus)
    return attempt_spec(
        spec=document,
        slices=(Slice("n", workers),),
        bundle={"CPU": 1.0} | ({"GPU": 1.0} if has_gpus else {}),
        recovers_in_place=unmended is None,
    )


class Heard:
    """What a supervisor reports."""

    def __init__(self) -> None:
        self.told: list[tuple[FrameKind, Any]] = []

    def report(self, report: Report) -> None:
        self.told.append((report.KIND, report.body()))

    @property
    def hangs(self) -> list[Any]:
        return [body for kind, body in self.told if kind is FrameKind.HANG]


class Standing:
    """A group of which a test says where its ranks stand; who is killed ends."""

    def __init__(self, num_ranks: int) -> None:
        self.seen: list[RankObservation] = []
        self.signals: list[tuple[int, int]] = []
        self.slots: list[Any] = []
        self.num_looks = 0
        self._exits: list[asyncio.Future[RankExit]] = [
            asyncio.get_running_loop().create_future() for _ in range(num_ranks)
        ]
        self.placed = [self._member(rank, ends) for rank, ends in enumerate(self._exits)]

    def _member(self, rank: int, ends: asyncio.Future[RankExit]) -> Any:
        killed = RankExit(rank, -signal.SIGKILL)
        return SimpleNamespace(
            seat=rank, incarnation=0, rank=rank, node_id="n", exit=ends, end=killed
        )

    @property
    def running(self) -> list[Any]:
        return [member for member in self.placed if not member.exit.done()]

    async def store_is_lost(self) -> None:
        await asyncio.Event().wait()

    async def observations(self) -> list[RankObservation]:
        self.num_looks += 1
        return self.seen

    async def stacks(self, seats: Sequence[int]) -> dict[int, str]:
        return dict.fromkeys(seats, STACK)

    async def errors(self) -> dict[int, Any]:
        return {}

    async def signal(self, node_id: str, seat: int, number: int) -> bool:
        self.signals.append((seat, number))
        if number == signal.SIGKILL:
            self._exits[seat].set_result(RankExit(seat, -signal.SIGKILL))
        return True


def observation(
    rank: int,
    phase: RankPhase = RankPhase.COMPUTE,
    age_s: float = 0.1,
    *,
    state: str = "S",
    step: int = 50,
    collective: int = 50,
) -> RankObservation:
    look = RankStatus(step, phase, collective, 0.0, 0, 0, 1.0, 100 + rank, TimeCategory.USEFUL, {})
    return RankObservation(rank, 0, look, age_s, state)


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
    spec = attempt(SCRIPT)
    group: Any = Standing(2)
    drills = FaultInjector(heard := cast(Any, Heard()))
    pace = MachinePace()
    recovery = RecoveryController(spec, group, group, heard, drills, lambda: None, pace)
    guard = GroupMonitor(spec, group, group, heard, drills, recovery, pace)
    assert guard.use is TimeCategory.STARTING
    look = RankStatus(step, RankPhase.COMPUTE, 0, 0.0, 0, 0, first_at, 100, use, {})
    group.seen = [RankObservation(0, 0, look, 0.1, "S")]
    await guard.see()
    assert guard.use is otherwise


def watched(document: dict[str, Any], heard: Any) -> tuple[Standing, asyncio.Future[Any]]:
    spec = attempt(document)
    group = Standing(document["resources"]["num_workers"])
    everybody: Any = group
    drills = FaultInjector(heard)
    pace = MachinePace()
    recovery = RecoveryController(spec, everybody, everybody, heard, drills, lambda: None, pace)
    guard = GroupMonitor(spec, everybody, everybody, heard, drills, recovery, pace)
    return group, asyncio.ensure_future(guard.watch())


@pytest.fixture(autouse=True)
def _quick_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guarding, "LOOK_S", 0.01)
    monkeypatch.setattr(hang_detector, "SURE_S", 0.02)


@pytest.mark.parametrize("kind", UNMENDED)
async def test_a_stopped_rank_of_what_is_not_mended_ends_the_attempt_and_is_told_of(
    kind: str,
) -> None:
    document = RECIPE | UNMENDED[kind]
    num_ranks = document["resources"]["num_workers"]
    heard, culprit = Heard(), num_ranks - 1
    group, watching = watched(document, heard)
    waiting = [observation(rank, RankPhase.EXCHANGE, 6.0, collective=51) for rank in range(culprit)]
    group.seen = [*waiting, observation(culprit, age_s=6.0, state="T")]
    outcome = await asyncio.wait_for(watching, PATIENCE_S)
    said = f"rank {culprit} stood still for 6.0 s in compute, and was ended"
    assert outcome == Outcome(Cause.WORKER_LOST, said, culprit)
    assert group.signals == [(culprit, signal.SIGKILL)]
    (bundle,) = heard.hangs
    assert (bundle["culprits"], bundle["phase"], bundle["step"]) == ([culprit], "compute", 50)
    assert [rank["rank"] for rank in bundle["ranks"]] == list(range(num_ranks))
    assert {rank["stack"] for rank in bundle["ranks"]} == {STACK}


async def test_it_is_given_more_time_where_a_false_alarm_costs_more() -> None:
    heard = Heard()
    group, watching = watched(RECIPE | UNMENDED["a single rank"], heard)
    group.seen = [observation(0, age_s=LEAST_S[RankPhase.COMPUTE] * PATIENCE - 0.1)]
    await asyncio.sleep(0.1)
    assert not watching.done()
    group.seen = [observation(0, age_s=LEAST_S[RankPhase.COMPUTE] * PATIENCE + 0.1)]
    outcome = await asyncio.wait_for(watching, PATIENCE_S)
    assert outcome == Outcome(
        Cause.WORKER_LOST, "rank 0 stood still for 40.1 s in compute, and was ended", 0
    )


async def test_one_look_proves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hang_detector, "SURE_S", 600.0)
    heard = Heard()
    group, watching = watched(RECIPE, heard)
    waits = observation(0, RankPhase.EXCHANGE, 30.0, collective=51)
    group.seen = [waits, observation(1, age_s=30.0)]
    async with asyncio.timeout(PATIENCE_S):
        while group.num_looks < 3:
            await asyncio.sleep(0.01)
    watching.cancel()
    assert (group.signals, heard.hangs) == ([], [])


async def test_where_nobody_is_to_blame_the_attempt_ends_too() -> None:
    heard = Heard()
    group, watching = watched(RECIPE | UNMENDED["a sharded model"], heard)
    group.seen = [observation(rank, RankPhase.UPDATE, 41.0) for rank in (0, 1)]
    outcome = await asyncio.wait_for(watching, PATIENCE_S)
    message = "all ranks stood still at the same place for 41.0 s"
    assert outcome == Outcome(Cause.WORKER_LOST, message)
    assert (group.signals, [bundle["culprits"] for bundle in heard.hangs]) == ([], [[]])


async def test_a_script_is_not_watched_for_it_says_nothing() -> None:
    heard = Heard()
    group, watching = watched(SCRIPT, heard)
    group.seen = [observation(rank, age_s=10_000.0, state="T", step=0) for rank in (0, 1)]
    await asyncio.sleep(0.1)
    assert (group.signals, heard.told) == ([], [])
    for member in group.placed:
        member.end = RankExit(member.rank, 0)
        member.exit.set_result(member.end)
    assert await asyncio.wait_for(watching, PATIENCE_S) is None


async def test_whoever_is_lost_otherwise_is_judged_as_ever() -> None:
    """The verdict of a hang is for a hang only."""
    group, watching = watched(RECIPE | UNMENDED["a single rank"], Heard())
    group.seen = [observation(0)]
    await group.signal("n", 0, signal.SIGKILL)
    assert await asyncio.wait_for(watching, PATIENCE_S) is None


async def test_a_group_that_does_not_leave_in_time_is_ended_when_its_grace_is_over() -> None:
    grace_s, began = 0.2, time.monotonic()
    group, watching = watched_and_asked_to_leave(grace_s)
    outcome = await asyncio.wait_for(watching, PATIENCE_S)
    assert time.monotonic() - began >= grace_s
    message = f"asked to leave its slots; it did not end by itself within {grace_s:g} s"
    assert outcome == Outcome(Cause.PREEMPTED, message)
    assert group.asked_to_leave == 1
    assert group.running, "ending what is left is for the supervisor"


async def test_a_group_that_leaves_in_time_is_not_waited_for() -> None:
    group, watching = watched_and_asked_to_leave(600.0)
    while not group.asked_to_leave:
        await asyncio.sleep(0.01)
    left = RankExit(0, guarding.LEFT_EXIT_CODE)
    group.placed[0].end = left
    group.placed[0].exit.set_result(left)
    outcome = await asyncio.wait_for(watching, PATIENCE_S)
    assert outcome == Outcome(Cause.PREEMPTED, "saved a checkpoint and left its slots as asked")


class Leaving(Standing):
    """One that can be asked to leave, and does nothing about it by itself."""

    asked_to_leave = 0

    async def ask_to_leave(self) -> None:
        self.asked_to_leave += 1


def watched_and_asked_to_leave(grace_s: float) -> tuple[Leaving, asyncio.Future[Any]]:
    spec, group, heard = attempt(RECIPE), Leaving(2), Heard()
    everybody: Any = group
    parts: tuple[Any, Any, Any, FaultInjector] = (everybody, everybody, heard, FaultInjector(heard))  # type: ignore[arg-type]
    pace = MachinePace()
    guard = GroupMonitor(spec, *parts, RecoveryController(spec, *parts, lambda: None, pace), pace)
    group.seen = [observation(rank) for rank in (0, 1)]
    guard.leave(grace_s)
    return group, asyncio.ensure_future(guard.watch())


def test_a_bundle_says_who_is_to_blame_and_where_everyone_was() -> None:
    waits = observation(0, RankPhase.EXCHANGE, 6.5, step=50, collective=51)
    stuck = observation(1, RankPhase.DATA, 7.0, step=49, collective=50)
    bundle = node_clients.hang_report(Hang((stuck,), 6.5, 4.0), [waits, stuck], {0: STACK}).body()
    assert bundle == {
        "culprits": [1],
        "step": 49,
        "phase": "data",
        "waited_s": 6.5,
        "limit_s": 4.0,
        "ranks": [
            {
                "rank": 0,
                "step": 50,
                "phase": "exchange",
                "collective": 51,
                "since_s": 6.5,
                "stack": STACK,
            },
            {
                "rank": 1,
                "step": 49,
                "phase": "data",
                "collective": 50,
                "since_s": 7.0,
                "stack": "",
            },
        ],
    }


def test_a_bundle_without_a_culprit_says_what_all_were_at() -> None:
    everyone = [observation(rank, RankPhase.UPDATE, 41.0) for rank in (0, 1)]
    bundle = node_clients.hang_report(Hang((), 41.0, FIRST_STEP_LEAST_S), everyone, {}).body()
    assert (bundle["culprits"], bundle["step"], bundle["phase"]) == ([], 50, "update")
