"""Rank 0's saves in the course of training: when one is due, and what each one cost."""

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

WORTH_TELLING = 1.5
"""The log tells of an interval that changed by this factor."""


class CheckpointTriggers:
    """Tells of every save `perf/checkpoint_stall_s`, and of `every_steps: auto`
    `perf/checkpoint_every_steps`, at the step in which the save was over."""

    def __init__(self, manager: CheckpointManager, pace: CheckpointInterval | None) -> None:
        self._manager = manager
        self._pace = pace
        self._meter = StallMeter()
        self._told_every: int | None = None
        self._told_at = -1

    def starts_at(self, step: int) -> None:
        if self._pace is not None:
            self._pace.starts_at(step)

    def is_due(self, step: int) -> bool:
        """By the measure of `auto`; the calendar has the other saves."""
        return self._pace is not None and self._pace.is_due(step)

    def step_took(self, step: int, seconds: float) -> None:
        if self._pace is not None:
            self._pace.step_took(seconds)
        stall_s = self._meter.step_took(seconds, is_saving=self._manager.is_saving)
        if stall_s is not None:
            self._tell(step, stall_s)

    def save(
        self,
        about: CheckpointMetadata,
        state: Mapping[str, Any],
        *,
        volatile: Iterable[Tensor] = (),
    ) -> None:
        """Begin to save; see `Keeper.save`."""
        if self._manager.has(about.step):
            return
        began = time.perf_counter()
        if self._meter.is_open:  # its end is what this one waits for
            self._manager.wait_for(about.step)
            self._tell(about.step, self._meter.ended(time.perf_counter() - began))
            began = time.perf_counter()
        self._manager.save(about, state, volatile=volatile)
        self._meter.began(time.perf_counter() - began)
        if self._pace is not None:
            self._pace.saved_at(about.step)

    def _tell(self, step: int, stall_s: float) -> None:
        values = {"perf/checkpoint_stall_s": stall_s}
        if self._pace is not None and self._meter.step_s > 0.0:
            every = self._pace.measured(stall_s, self._manager.write_s, self._meter.step_s)
            values["perf/checkpoint_every_steps"] = every
            self._log_interval(every, stall_s)
        if step > self._told_at:  # a key is told once for a step
            self._told_at = step
            train.report(step, values)

    def _log_interval(self, every: int, stall_s: float) -> None:
        told = self._told_every
        if told is not None and told / WORTH_TELLING < every < told * WORTH_TELLING:
            return
        self._told_every = every
        log(
            f"a checkpoint every {every} steps, or {every * self._meter.step_s:.0f} s: saving one "
            f"costs {stall_s * 1e3:.0f} ms of training"
        )
