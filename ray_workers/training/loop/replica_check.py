"""Compares the replicas of the model during training, and injects the fault of a drill."""

from __future__ import annotations

import signal
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dray import train
from ray_workers.shared.commands import CORRUPT_SIGNAL
from ray_workers.shared.frames import Culprit, ReplicasReport
from ray_workers.shared.job_log import log
from ray_workers.training import devices
from ray_workers.training.core.errors import CorruptedReplicaError, ReplicasDifferError
from ray_workers.training.elastic import process_group
from ray_workers.training.parallel.replicas import ReplicaComparison, ReplicaGroup

NUM_DIFFERING, CHECK_TIME = "check/replicas_differ", "perf/check_time_s"


class ReplicaCheck:
    """The comparisons of one rank. All ranks make the same calls."""

    def __init__(
        self, every: int | None, device: torch.device, agreed: Callable[[int], None]
    ) -> None:
        """every: number of steps between comparisons; None for no comparisons. agreed: is called
        with each step after which the replicas were equal."""
        self._every = every
        self._note_agreement = agreed
        self._device = device
        self._seen = 0
        self._compared: int | None = None
        """The last step after which the replicas were compared or were equal from the start."""
        self._is_noted = False
        self._is_asked = self._is_drill = False
        if self._every is not None and threading.current_thread() is threading.main_thread():
            signal.signal(CORRUPT_SIGNAL, self._ask)

    def _ask(self, *_: Any) -> None:
        self._is_asked = True

    def begins_at(self, step: int) -> None:
        """Count the steps from `step`, whose state all ranks have just loaded or initialised."""
        self._seen = self._compared = step
        if self._every is not None:
            self._note_agreement(step)

    def regrouped_at(self, step: int, rank: int, is_compared: bool) -> None:
        """Count the steps from `step`, after which a new group has formed. is_compared: whether the
        group has compared copies of its state, and found them equal."""
        self._seen = self._compared = step
        if self._every is not None and is_compared:
            self._agreed(step, rank)

    def after_step(self, step: int, strategy: ReplicaGroup, *, is_saved: bool) -> None:
        """Compare the replicas if a comparison is due, or if a checkpoint is saved after the step.
        A collective operation. Raises ReplicasDifferError if they differ."""
        is_due = self.is_due(step)
        if self._is_asked:  # before the comparison, so that no checkpoint is saved in between
            self._is_asked, self._is_drill = False, True
            strategy.flip_bit()
        if is_due or is_saved:
            self.compare(step, strategy)

    def before_update(self, step: int, loss: Tensor, strategy: ReplicaGroup) -> None:
        """Compare the replicas after `step` if the loss of the next step is not finite, because the
        optimizer would copy such values to all weights of all replicas. Raises ReplicasDifferError
        if the replicas differ. The loss is summed together with the gradients, so all ranks have
        the same loss, which has arrived."""
        if self._every is not None and not bool(loss.isfinite()):
            self.compare(step, strategy)

    def is_due(self, step: int) -> bool:
        """Whether a comparison is due after this step. The next calls count from this step, even if
        the group breaks before the comparison, because a replacement also counts from this step."""
        every, before = self._every, self._seen
        self._seen = step
        return every is not None and step // every > before // every

    def compare(self, step: int, strategy: ReplicaGroup, *, again: bool = False) -> None:
        """Compare the replicas, unless they were already compared after this step. A collective
        operation. Raises ReplicasDifferError if they differ. again: also compare replicas that were
        already compared."""
        is_known = step == self._compared
        if self._every is None or (is_known and not again) or strategy.world_size == 1:
            return
        self._compared = step
        began = time.perf_counter()
        found = strategy.compare_copies()
        self._note_hardware(strategy)
        if not found.num_compared:
            return
        if strategy.rank == 0 and not is_known:
            took = time.perf_counter() - began
            train.report(step, {NUM_DIFFERING: found.num_differing, CHECK_TIME: took})
        if found.num_differing:
            self._fail(step, strategy, found)
        self._agreed(step, strategy.rank)

    def _agreed(self, step: int, rank: int) -> None:
        self._note_agreement(step)
        if rank == 0:
            _report(ReplicasReport(step, 0, [], is_drill=False))

    def refuse(self, strategy: ReplicaGroup, step: int, is_copy: bool) -> None:
        """Report replicas that differ after the group was formed again, and raise
        ReplicasDifferError; do nothing if the document requests no comparisons. A collective
        operation. is_copy: whether this rank has just received its state from another rank."""
        if self._every is None:
            return
        receivers = process_group.gathered(strategy.rank if is_copy else None, strategy.world_size)
        found = strategy.compare_copies([rank for rank in receivers if rank is not None])
        if not found.num_differing:
            found = strategy.compare_copies()
        self._fail(step, strategy, found)

    def _note_hardware(self, strategy: ReplicaGroup) -> None:
        """Log once that ranks with different hardware are not compared."""
        kinds = strategy.hardware()
        if strategy.rank or self._is_noted or len(set(kinds)) < 2:
            return
        self._is_noted = True
        ranks = "; ".join(
            f"{', '.join(str(rank) for rank, other in enumerate(kinds) if other == kind)}: {kind}"
            for kind in dict.fromkeys(kinds)
        )
        log(
            "only replicas on equal hardware are compared, because the results of the same "
            f"operations can differ on other hardware; the ranks run on ({ranks})"
        )

    def _fail(self, step: int, strategy: ReplicaGroup, found: ReplicaComparison) -> None:
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
    """Return a message about a comparison in which the replicas differed."""
    start = f"after step {step}, the replicas of the model are not equal"
    if not culprits:
        return (
            f"{start}. There is no majority of equal replicas, so it is not known which replica is "
            "wrong"
        )
    named = ", ".join(f"rank {one.rank} on {one.hostname} ({one.device})" for one in culprits)
    return f"{start}: {named} differs from the majority"


def _report(report: ReplicasReport) -> None:
    train.emit(report.KIND, report.body())


def _described(device: torch.device) -> str:
    if not devices.is_gpu(device):
        return str(device)
    found = devices.module_of(device).get_device_properties(device)
    return f"{device} {getattr(found, 'uuid', '')}".strip()
