"""Decides when rank 0 saves during training, and measures the cost of each save."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from dray import train
from ray_workers.shared.job_log import log
from ray_workers.training.checkpoint.checkpoint_files import CheckpointMetadata
from ray_workers.training.checkpoint.interval import CheckpointInterval, StallMeter
from ray_workers.training.checkpoint.manager import CheckpointManager

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
        self._reported_at = -1

    def starts_at(self, step: int, world_size: int) -> None:
        """Record that training begins after this step, on `world_size` workers."""
        if self._interval is not None:
            self._interval.starts_at(step, world_size)

    def is_due(self, step: int) -> bool:
        """Whether `auto` requires a save; the calendar determines the other saves."""
        return self._interval is not None and self._interval.is_due(step)

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
        if self._manager.commits:
            self._meter.began(time.perf_counter() - began)
        if self._interval is not None:
            self._interval.saved_at(about.step)

    def settle(self, step: int) -> None:
        """Wait for the previous save before saving this step, and report how long it stalled
        training."""
        if self._meter.is_open and self._manager.commits:
            began = time.perf_counter()
            self._manager.wait_for(step)
            self._report(step, self._meter.ended(time.perf_counter() - began))
        self._manager.wait()

    def _report(self, step: int, stall_s: float) -> None:
        values = {"perf/checkpoint_stall_s": stall_s}
        if self._interval is not None and self._meter.step_s > 0.0:
            every = self._interval.measured(stall_s, self._manager.write_s, self._meter.step_s)
            values["perf/checkpoint_every_steps"] = every
            self._log_interval(every, stall_s)
        if step > self._reported_at:  # report each key once per step
            self._reported_at = step
            train.report(step, values)

    def _log_interval(self, every: int, stall_s: float) -> None:
        logged = self._logged_every
        if logged is not None and logged / WORTH_LOGGING < every < logged * WORTH_LOGGING:
            return
        self._logged_every = every
        log(
            f"saving a checkpoint every {every} steps ({every * self._meter.step_s:.0f} s): each "
            f"save delays training by {stall_s * 1e3:.0f} ms"
        )
