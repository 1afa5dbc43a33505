"""The limit of an attempt's running time."""

from __future__ import annotations

import asyncio
import time

from ray_workers.shared.commands import Limit
from ray_workers.shared.contracts import Cause, Outcome


class RunningTime:
    """Measures the running time from `begin`, and knows its limit, which the service can change."""

    def __init__(self, max_runtime_s: float | None) -> None:
        self._limit = Limit(0, max_runtime_s)
        self._began = time.monotonic()
        self.changed = asyncio.Event()

    def begin(self) -> None:
        self._began = time.monotonic()

    def set_limit(self, command: Limit) -> None:
        """Change the limit, unless a newer command has already changed it."""
        if command.number > self._limit.number:
            self._limit = command
            self.changed.set()

    def left_s(self) -> float | None:
        """Return the seconds until the limit is reached; None if there is no limit."""
        most_s = self._limit.max_runtime_s
        return None if most_s is None else max(self._began + most_s - time.monotonic(), 0.0)

    def exceeded(self) -> Outcome:
        """Return the outcome of an attempt that has reached the limit."""
        message = f"reached max_runtime_s after {self._limit.max_runtime_s:g} s in this attempt"
        return Outcome.of(Cause.RUNTIME_EXCEEDED, message)
