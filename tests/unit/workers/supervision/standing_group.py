"""A group whose observations a test sets, and the monitor that watches it."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from dray.spec import JobSpec
from ray_workers.shared.contracts import AttemptSpec, Frame
from ray_workers.shared.heartbeat import RankObservation
from ray_workers.shared.processes.machine_speed import MachineSpeed
from ray_workers.shared.processes.procfs import Activity
from ray_workers.shared.slices import Slice
from ray_workers.supervision.fault_injection import FaultInjector
from ray_workers.supervision.group_monitor import GroupMonitor
from ray_workers.supervision.rules.failure_attribution import RankExit
from ray_workers.supervision.rules.timings import Timings
from service.domain.attempts.group_traits import traits_of
from service.domain.documents import CheckedDocument
from tests.unit.workers.supervision.observed import Reports
from tests.unit.workers.supervision.recovering import recovery_of
from tests.wire import attempt_spec

UNRECOVERED: dict[str, dict[str, Any]] = {
    "a single rank": {"resources": {"num_workers": 1}},
    "a sharded model": {"parallel": {"shard": 2}, "checkpoint": {"in_memory": "off"}},
    "ranks that step by themselves": {"sync": {"every": 4}},
    "balanced GPUs": {
        "resources": {"num_workers": 2, "gpus_per_worker": 1},
        "parallel": {"balance": "auto"},
    },
}
PATIENCE_S = 60.0
QUICK = Timings(
    look_period_s=0.01,
    script_period_s=0.01,
    sure_s=0.0,
    script_look_period_s=0.01,
    script_stacks_apart_s=0.0,
    secondary_s=0.01,
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
        self.spares: list[Any] = []
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
            index=rank, incarnation=0, rank=rank, node_id="n", exit=ends, end=killed
        )

    @property
    def running(self) -> list[Any]:
        return [member for member in self.placed if not member.exit.done()]

    async def store_is_lost(self) -> None:
        await asyncio.Event().wait()

    async def observations(self) -> list[RankObservation]:
        self.num_observed += 1
        return self.seen

    async def stacks(self, indices: Sequence[int]) -> dict[int, str]:
        return {index: self.stack_of.get(index, STACK) for index in indices}

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

    async def signal(self, node_id: str, index: int, number: int) -> bool:
        self.signals.append((index, number))
        if number == signal.SIGKILL and self.takes_signals:
            self._exits[index].set_result(RankExit.of(index, -signal.SIGKILL))
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
    speed = MachineSpeed()
    changes = recovery_of(parts, _prepared, speed, timings)
    return GroupMonitor(*parts, drills or FaultInjector(reports), *changes, speed, timings)


def watched(document: dict[str, Any], reports: Reports) -> tuple[Standing, asyncio.Future[Any]]:
    group = Standing(document["resources"]["num_workers"])
    return group, asyncio.ensure_future(monitor_of(document, group, reports).watch())
