"""Compares the replicas of the model during training, and injects the fault of a drill."""

from __future__ import annotations

import signal
import socket
import threading
import time
from typing import Any

import torch

from dray import train
from dray.spec import JobSpec
from ray_workers.shared.commands import CORRUPT_SIGNAL
from ray_workers.shared.frames import Culprit, ReplicasReport
from ray_workers.training import devices
from ray_workers.training.checkpoint.manager import CheckpointManager
from ray_workers.training.core.errors import CorruptedReplicaError, ReplicasDifferError
from ray_workers.training.elastic import process_group
from ray_workers.training.parallel import Strategy
from ray_workers.training.parallel.replicas import ReplicaComparison

NUM_DIFFERING, CHECK_TIME = "check/replicas_differ", "perf/check_time_s"


class ReplicaCheck:
    """The comparisons of one rank. All ranks make the same calls."""

    def __init__(self, spec: JobSpec, device: torch.device, checkpoints: CheckpointManager) -> None:
        """checkpoints: learns after which step the replicas were last equal."""
        self._checkpoints = checkpoints
        self._every = None if spec.check is None else spec.check.replicas_every
        self._num_parts = spec.parallel.num_parts
        """Number of ranks in a single replica, which has nothing to be compared with."""
        self._device = device
        self._seen = 0
        self._is_asked = self._is_drill = False
        if self._every is not None and threading.current_thread() is threading.main_thread():
            signal.signal(CORRUPT_SIGNAL, self._ask)

    def _ask(self, *_: Any) -> None:
        self._is_asked = True

    def starts_at(self, step: int) -> None:
        """Count the steps from `step`, after which all ranks have the same state."""
        self._seen = step
        if self._every is not None:
            self._checkpoints.checked_step = step

    def after_step(self, step: int, strategy: Strategy) -> None:
        """Compare the replicas if a comparison is due. A collective operation. Raises
        ReplicasDifferError if they differ."""
        every = self._every
        is_due = every is not None and step // every > self._seen // every
        if is_due and strategy.world_size > self._num_parts:
            self._compare(step, strategy)
        self._seen = step
        if self._is_asked:
            self._is_asked, self._is_drill = False, True
            strategy.flip_bit()

    def _compare(self, step: int, strategy: Strategy) -> None:
        began = time.perf_counter()
        found = strategy.compare_copies()
        if strategy.rank == 0:
            took = time.perf_counter() - began
            train.report(step, {NUM_DIFFERING: found.num_differing, CHECK_TIME: took})
        if found.num_differing:
            self._fail(step, strategy, found)
        self._checkpoints.checked_step = step
        if strategy.rank == 0:
            _report(ReplicasReport(step, 0, [], is_drill=False))

    def _fail(self, step: int, strategy: Strategy, found: ReplicaComparison) -> None:
        """Report the differing replicas, and raise the error that ends the attempt."""
        mine = socket.gethostname(), _described(self._device), self._is_drill
        everyones = process_group.gathered(mine, strategy.world_size)
        culprits = [Culprit(rank, *everyones[rank][:2]) for rank in found.culprits]
        is_drill = any(one[2] for one in everyones)
        reporter = next(r for r in range(strategy.world_size + 1) if r not in found.culprits)
        if strategy.rank == reporter:
            _report(ReplicasReport(step, found.num_differing, culprits, is_drill=is_drill))
        kind = CorruptedReplicaError if strategy.rank in found.culprits else ReplicasDifferError
        raise kind(sentence(step, culprits))


def sentence(step: int, culprits: list[Culprit]) -> str:
    """Return what a comparison that failed has shown."""
    start = f"after step {step}, the replicas of the model are not equal"
    if not culprits:
        return f"{start}. No majority of them is equal, so the wrong replica is not known"
    named = ", ".join(f"rank {one.rank} on {one.hostname} ({one.device})" for one in culprits)
    return f"{start}: {named} differs from the majority"


def _report(report: ReplicasReport) -> None:
    train.emit(report.KIND, report.body())


def _described(device: torch.device) -> str:
    if not devices.is_gpu(device):
        return str(device)
    found = devices.module_of(device).get_device_properties(device)
    return f"{device} {getattr(found, 'uuid', '')}".strip()
