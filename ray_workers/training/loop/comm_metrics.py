"""The price that a rank pays for keeping in step: the same figures for every kind of `sync`."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ray_workers.shared.contracts import ALL_SENT_BYTES, COMPUTE_TIME, SENT_BYTES
from ray_workers.training.elastic import process_group

VALUE_BYTES = 4


class CommMetrics:
    """Gives, of each step:

    - `perf/sent_bytes`, that this rank has sent to others, as the kernel counts them;
    - `perf/compression`, how many times as many bytes a ring all-reduce of the whole gradient in
      fp32 sends;
    - `perf/compute_time_s`, how long this rank computed a share of the batch until it had to do
      with others. Ranks differ in it as they differ in speed, whoever waits for whom.
    """

    def __init__(self, num_elements: int, *, times_compute: bool) -> None:
        """num_elements: of the gradient. times_compute: the time of a call is that of its
        computing, as it is not on a GPU."""
        self._num_elements = num_elements
        self._times_compute = times_compute
        self._count: Callable[[], int | None] = lambda: None
        self._world_size = 1
        self._before: int | None = None
        self._shares_s: list[float] = []
        self._sent = self._num_steps = 0
        """In how many steps how many bytes were sent since the last evaluation."""

    def watch(self, count: Callable[[], int | None], world_size: int) -> None:
        """Take the bytes that were sent since the group was formed from `count` from now on; None
        where they are not counted."""
        self._count, self._world_size = count, world_size

    def begin_step(self) -> None:
        self._before = self._count()
        self._shares_s.clear()

    def computed(self, seconds: float) -> None:
        """A share took so long until the rank had to do with others."""
        if self._times_compute:
            self._shares_s.append(seconds)

    def of_step(self) -> dict[str, float]:
        """The metrics of the step that has just ended; without what was not counted."""
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
        """The metrics of an evaluation. A collective, unless bytes are not counted. world_size: of
        the group that evaluates; without another rank in it there are no metrics."""
        if world_size == 1 or self._count() is None:
            return {}
        sent = torch.tensor([self._sent], dtype=torch.float64, device=device)
        process_group.add_up(sent, world_size)
        num_steps = self._num_steps
        self._sent = self._num_steps = 0
        return {ALL_SENT_BYTES: sent.item() / num_steps} if num_steps else {}
