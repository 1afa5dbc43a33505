"""Bytes that a rank sends to the others of its group in a step, as the kernel counts them."""

from __future__ import annotations

from collections.abc import Callable

VALUE_BYTES = 4


class CommMetrics:
    """Gives `perf/sent_bytes` of each step, and `perf/compression`: how many times as many bytes a
    ring all-reduce of the whole gradient in fp32 sends."""

    def __init__(self, num_elements: int) -> None:
        """num_elements: of the gradient."""
        self._num_elements = num_elements
        self._count: Callable[[], int | None] = lambda: None
        self._world_size = 1
        self._before: int | None = None

    def watch(self, count: Callable[[], int | None], world_size: int) -> None:
        """Take the bytes that were sent since the group was formed from `count` from now on; None
        where they are not counted."""
        self._count, self._world_size = count, world_size

    def begin_step(self) -> None:
        self._before = self._count()

    def of_step(self) -> dict[str, float]:
        """The metrics of the step that has just ended; empty if nothing was counted."""
        before, now = self._before, self._count()
        if before is None or now is None or now <= before:
            return {}
        sent = now - before
        share = 2 * (self._world_size - 1) / self._world_size
        dense = share * self._num_elements * VALUE_BYTES
        return {"perf/sent_bytes": sent, "perf/compression": dense / sent}
