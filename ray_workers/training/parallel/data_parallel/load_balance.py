"""Makes the ranks' shares of the batch proportional to their speeds, for groups on machines of
different speeds.

The ranks periodically compare their times per sample, and the following global batches are divided
in proportion to their speeds. A sample's weight in the gradient doesn't depend on the rank that
computes it, so the result is the same as with equal shares, except for the order of summation.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.distributed as dist

from dray import train
from ray_workers.shared.frames import StragglersReport
from ray_workers.training import devices
from ray_workers.training.data.prefetcher import Feed, Prefetcher
from ray_workers.training.parallel.data_parallel.ddp import Replicas
from ray_workers.training.parallel.gradients import EngineParts, GradientEngine, Pass
from ray_workers.training.parallel.strategy import StrategyContext

FIRST_AFTER, EVERY = 5, 20
"""The ranks compare their speeds for the first time after FIRST_AFTER steps, and then every EVERY
steps."""
WORTH_IT = 1.03
"""The shares change only if the change is expected to shorten a step by at least this factor."""
STRAGGLES, KEEPS_UP = 1.25, 1.1
"""A rank becomes a straggler when its time per sample exceeds STRAGGLES times the median, and
remains a straggler until this time is below KEEPS_UP times the median."""


class LoadBalancedDdp(Replicas):
    """Makes the size of each rank's share proportional to the rank's speed."""

    def __init__(self, given: StrategyContext) -> None:
        self._timed = TimedGradientEngine(given.engine_parts())
        super().__init__(given, self._timed)

    def prepare(self, feed: Feed, step: int) -> None:
        super().prepare(feed, step)
        assert isinstance(feed, Prefetcher)
        self._feed, self._begun_after = feed, step
        self._parts = [1 / self.world_size] * self.world_size
        self._reported: list[int] = []
        self._timed.seconds_per_sample.clear()

    def after_step(self, step: int) -> None:
        done = step - self._begun_after
        if self.world_size == 1 or (done != FIRST_AFTER and done % EVERY):
            return
        own = self._timed.seconds_per_sample
        num_steps = len(own)
        seconds = _everyones(statistics.median(own) if own else math.inf, self.device)
        own.clear()
        if math.inf in seconds:
            return  # the speed of a rank without samples is unknown
        if self.rank == 0:
            self._report(step, seconds, num_steps)
        parts = in_proportion(seconds)
        now = max(part * each for part, each in zip(self._parts, seconds, strict=True))
        then = max(part * each for part, each in zip(parts, seconds, strict=True))
        if now > WORTH_IT * then:
            self._parts = parts
            self._feed.cut_anew(parts, from_step=step + 1)

    def _report(self, step: int, seconds: Sequence[float], num_steps: int) -> None:
        """Report the stragglers, unless they are the same ranks as in the last report."""
        middle = statistics.median_low(seconds)
        limits = [KEEPS_UP if rank in self._reported else STRAGGLES for rank in range(len(seconds))]
        slow = [r for r, each in enumerate(seconds) if each > limits[r] * middle]
        if slow == self._reported:
            return
        self._reported = slow
        taken = [
            part * each * self.options.global_batch_size
            for part, each in zip(self._parts, seconds, strict=True)
        ]
        lost_s = max(taken) - statistics.median_low(taken)
        report = StragglersReport(
            step=step,
            ranks=slow,
            slowdown={str(rank): seconds[rank] / middle for rank in slow},
            lost_s=lost_s * num_steps,
            num_steps=num_steps,
        )
        train.emit(report.KIND, report.body())


class TimedGradientEngine(GradientEngine):
    """Measures the time per sample in each step, without the time spent waiting for other ranks."""

    def __init__(self, parts: EngineParts) -> None:
        super().__init__(parts)
        self.seconds_per_sample: list[float] = []

    def backward(self, work: Pass) -> None:
        mine = work.share
        # The unit of work is the forward pass of one sample. A backward pass takes about as long as
        # two forward passes, and the measurement ends before the backward pass of the last
        # micro-batch.
        num_passes = 3 * len(mine.batch.indices) - 2 * len(mine.micro_batches[-1][0])
        self._wait_for_device()  # unfinished operations belong to the previous step
        began = time.perf_counter()

        def timed() -> None:
            # After this call, the rank waits for other ranks' gradients; this waiting time must not
            # be measured.
            self._wait_for_device()
            if not mine.batch.is_empty:
                self.seconds_per_sample.append(3 * (time.perf_counter() - began) / num_passes)
            work.before_exchange()

        super().backward(replace(work, before_exchange=timed))

    def _wait_for_device(self) -> None:
        devices.synchronize(self._objective.slot.device)


def in_proportion(seconds: Sequence[float]) -> list[float]:
    """Return each rank's part of a batch such that all ranks take the same time. `seconds` is each
    rank's time per sample."""
    speeds = [1 / each for each in seconds]
    return [speed / sum(speeds) for speed in speeds]


def _everyones(seconds: float, device: torch.device) -> list[float]:
    mine = torch.tensor([seconds], dtype=torch.float64, device=device)
    found = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(found, mine)
    return [float(each) for each in found]
