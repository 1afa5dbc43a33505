"""Decides when a checkpoint is saved during training, and measures the cost of each save.

If the state is divided, all ranks must save at the same step, but only rank 0 has the measurements
that determine when a save is due. Therefore the ranks exchange their measurements in steps that all
ranks know: about once per `EXCHANGE_S` seconds, and at each save. The interval is based on the
highest costs of all ranks.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping
from typing import Any, Self

import torch
from torch import Tensor

from dray import train
from ray_workers.shared.contracts import RankTask
from ray_workers.shared.job_log import log
from ray_workers.training.checkpoint.interval import CheckpointInterval, StallMeter
from ray_workers.training.checkpoint.manager import CheckpointManager
from ray_workers.training.checkpoint.manifests import CheckpointMetadata
from ray_workers.training.checkpoint.save_group import SaveGroup
from ray_workers.training.core.schedule import Calendar
from ray_workers.training.elastic import process_group

EXCHANGE_S = 1.0
"""With a divided state and `every_steps: auto`, seconds between two exchanges of measurements."""
WORTH_LOGGING = 1.5
"""Factor by which the interval must change before it is logged again."""


class CheckpointTriggers:
    """Reports `perf/checkpoint_stall_s` for every save, and with `every_steps: auto` also
    `perf/checkpoint_every_steps`, at the step in which the save ended."""

    def __init__(self, manager: CheckpointManager, interval: CheckpointInterval | None) -> None:
        self._manager = manager
        self._interval = interval
        self._meter = StallMeter()
        self._logged_every: int | None = None
        self._reported_at = self._chosen_at = -1
        self._device = torch.device("cpu")
        self._next_exchange = 0
        """The step after which the ranks of a divided state exchange their measurements."""
        self._costs = (0.0, 0.0)
        """The stall and the duration of this rank's last save, in seconds."""

    @classmethod
    def of(cls, task: RankTask, manager: CheckpointManager, calendar: Calendar) -> Self:
        auto = calendar.save_every_steps is None
        return cls(manager, CheckpointInterval(task.worker_mtbf_s) if auto else None)

    def join(self, group: SaveGroup, device: torch.device) -> None:
        """Save together with the other ranks of a group. device: the device for collective
        operations."""
        self._manager.group, self._device = group, device

    def starts_at(self, step: int, world_size: int) -> None:
        """Record that training begins after this step, on `world_size` workers. If the state is
        divided, all ranks must call this with the same step."""
        self._next_exchange = step + 1
        if self._interval is not None:
            self._interval.starts_at(step, world_size)

    def is_due(self, step: int) -> bool:
        """Whether `auto` requires a save; the calendar determines the other saves. If the state is
        divided, this is a collective operation, and all ranks get the same result."""
        if self._interval is None:
            return False
        if self._manager.group is None:
            return self._interval.is_due(step)
        return step >= self._next_exchange and self._exchanged(step, self._interval)

    def _exchanged(self, step: int, interval: CheckpointInterval) -> bool:
        """Exchange measurements, and return whether a save is due. A collective operation."""
        group = self._manager.group
        assert group is not None
        of_rank_0 = (interval.is_due(step), interval.steps_left(step))
        decided = of_rank_0 if group.rank == 0 else (False, 0)
        mine = [*decided, self._meter.is_open, *self._costs, self._step_s]
        is_due, steps_left, is_open, stall_s, write_s, step_s = process_group.maxima(
            mine, self._device, group.world_size
        )
        if group.rank == 0 and interval.is_measuring and not is_open and step_s > 0.0:
            self._choose(step, interval, stall_s, write_s, step_s)
        num_steps = max(1, int(EXCHANGE_S / step_s)) if step_s > 0.0 else 1
        self._next_exchange = step + min(num_steps, int(steps_left) or num_steps)
        return bool(is_due)

    @property
    def _step_s(self) -> float:
        """The usual duration of a step in seconds; 0 before the first step."""
        return 0.0 if math.isnan(self._meter.step_s) else self._meter.step_s

    def step_took(self, step: int, seconds: float) -> None:
        if self._interval is not None:
            self._interval.step_took(seconds)
        stall_s = self._meter.step_took(seconds, is_saving=self._manager.is_saving)
        if stall_s is not None:
            self._report(step, stall_s)

    def save(
        self,
        about: CheckpointMetadata,
        state: Mapping[str, Any],
        *,
        volatile: Iterable[Tensor] = (),
    ) -> None:
        """Begin a save; see `CheckpointManager.save`."""
        if self._manager.group is None and self._manager.has(about.step):
            return
        self.settle(about.step)
        began = time.perf_counter()
        self._manager.save(about, state, volatile=volatile)
        if self._manager.commits or self._interval is not None:
            self._meter.began(time.perf_counter() - began)
        if self._interval is not None:
            self._interval.saved_at(about.step)

    def settle(self, step: int) -> None:
        """Wait for the previous save before saving this step, and report how long the previous save
        stalled training."""
        if self._meter.is_open:
            began = time.perf_counter()
            self._manager.wait_for(step)
            self._report(step, self._meter.ended(time.perf_counter() - began))
        self._manager.wait()
        if self._interval is not None and self._manager.group is not None:
            self._exchanged(step, self._interval)

    def _report(self, step: int, stall_s: float) -> None:
        self._costs = (stall_s, self._manager.write_s)
        values = {"perf/checkpoint_stall_s": stall_s}
        if not self._manager.commits:
            return
        if self._interval is not None and self._manager.group is None and self._step_s > 0.0:
            every = self._interval.measured(*self._costs, self._step_s)
            values["perf/checkpoint_every_steps"] = every
            self._log_interval(every, stall_s, self._step_s)
        if step > self._reported_at:  # report each key once per step
            self._reported_at = step
            train.report(step, values)

    def _choose(
        self, step: int, interval: CheckpointInterval, stall_s: float, write_s: float, step_s: float
    ) -> None:
        """Choose the interval on rank 0, based on the highest costs among all ranks."""
        every = interval.measured(stall_s, write_s, step_s)
        self._log_interval(every, stall_s, step_s)
        if step > self._chosen_at:
            self._chosen_at = step
            train.report(step, {"perf/checkpoint_every_steps": every})

    def _log_interval(self, every: int, stall_s: float, step_s: float) -> None:
        logged = self._logged_every
        if logged is not None and logged / WORTH_LOGGING < every < logged * WORTH_LOGGING:
            return
        self._logged_every = every
        log(
            f"saving a checkpoint every {every} steps ({every * step_s:.0f} s): each "
            f"save delays training by {stall_s * 1e3:.0f} ms"
        )
