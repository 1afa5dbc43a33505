"""Measures the cost of a rank's synchronisation, with the same metrics for each kind of `sync`."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ray_workers.shared.contracts import ALL_SENT_BYTES, COMPUTE_TIME, SENT_BYTES
from ray_workers.training import devices
from ray_workers.training.elastic import process_group
from ray_workers.training.parallel import Strategy

VALUE_BYTES = 4


class CommMetrics:
    """Returns for each step:

    - `perf/sent_bytes`: number of bytes that this rank sent to others, as counted by the kernel;
    - `perf/compression`: number of bytes that a ring all-reduce of the whole fp32 gradient would
      send, divided by the number of bytes sent;
    - `perf/compute_time_s`: number of seconds for which this rank computed its share of the batch
      before it had to communicate. This time doesn't include waiting for other ranks, so
      it depends only on the rank's own speed.
    """

    def __init__(self, num_elements: int, *, times_compute: bool) -> None:
        """num_elements: size of the gradient. times_compute: whether the duration of a call is the
        duration of its computation, which is not the case on a GPU."""
        self._num_elements = num_elements
        self._times_compute = times_compute
        self._count: Callable[[], int | None] = lambda: None
        self._world_size = 1
        self._before: int | None = None
        self._shares_s: list[float] = []
        self._sent = self._num_steps = 0
        """Number of bytes sent since the last evaluation, and number of steps in which they were
        sent."""

    @classmethod
    def of(cls, sync: object | None, strategy: Strategy) -> CommMetrics | None:
        """Return the metrics of a strategy; None if the job's document has no `sync`."""
        if sync is None:
            return None
        on_gpu = devices.is_gpu(strategy.device)
        return cls(strategy.gradients.num_elements, times_compute=not on_gpu)

    def watch(self, count: Callable[[], int | None], world_size: int) -> None:
        """Set the function that returns the number of bytes sent since the group was formed.
        `count` returns None if bytes are not counted."""
        self._count, self._world_size = count, world_size

    def begin_step(self) -> None:
        self._before = self._count()
        self._shares_s.clear()

    def computed(self, seconds: float) -> None:
        """Record how many seconds the computation of a share took before the rank had to
        communicate."""
        if self._times_compute:
            self._shares_s.append(seconds)

    def of_step(self) -> dict[str, float]:
        """Return the metrics of the step that has just ended, except for metrics that were not
        counted."""
        found: dict[str, float] = {}
        if self._shares_s:
            found[COMPUTE_TIME] = sum(self._shares_s) / len(self._shares_s)
        before, now = self._before, self._count()
        if before is None or now is None:
            return found
        sent = max(0, now - before)
        self._sent, self._num_steps = self._sent + sent, self._num_steps + 1
        if sent:
            share = 2 * (self._world_size - 1) / self._world_size
            dense = share * self._num_elements * VALUE_BYTES
            found |= {SENT_BYTES: sent, "perf/compression": dense / sent}
        return found

    def of_all(self, device: torch.device, world_size: int) -> dict[str, float]:
        """Return the metrics of an evaluation. If bytes are counted, this is a collective
        operation. world_size: size of the group that evaluates; a group of one rank has no
        metrics."""
        if world_size == 1 or self._count() is None:
            return {}
        sent = torch.tensor([self._sent], dtype=torch.float64, device=device)
        process_group.add_up(sent, world_size)
        num_steps = self._num_steps
        self._sent = self._num_steps = 0
        return {ALL_SENT_BYTES: sent.item() / num_steps} if num_steps else {}
