"""The speed of a machine relative to its usual speed, and limits that adapt to it.

The kernel counts, for each process, how long it waited for a CPU while it could have run
(proc_pid_schedstat(5)). A process that waited for 59 of the last 60 seconds runs 60 times slower
than usual, whatever the reason: too many processes, a low priority, or a quota of its control
group. A process that hangs or sleeps does not wait for a CPU, so its limits are not extended.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple, TypeVar

from ray_workers.shared.processes.procfs import stat_fields
from ray_workers.shared.processes.silence import AwakeClock

MAX_SLOWNESS = 30.0
"""Maximum factor by which limits are extended, so that a hang on an overloaded machine is also
detected."""
OVERLOADED = 4.0
"""Minimum slowness at which timeouts are attributed to the machine."""
WINDOW_S = 10.0
"""Length of the period, in seconds, over which a process's waiting time is measured."""
LEAST_S = 1.0
"""Number of seconds before the first measurement of a process."""
CHECK_S = 0.5
"""Seconds between two checks of a limit. A limit is checked repeatedly because speeds change."""
USUAL = 1.0

T = TypeVar("T")


class CpuTime(NamedTuple):
    """CPU time of a thread, in seconds since its start."""

    ran_s: float
    waited_s: float
    """Time spent waiting for a CPU, not including the current wait."""
    is_runnable: bool


def cpu_time(pid: int) -> CpuTime | None:
    """Return the CPU time of the thread with this native id, or of a process's main thread; None if
    it no longer exists, or the kernel does not count it."""
    try:
        ran, waited, _ = Path(f"/proc/{pid}/schedstat").read_text().split()
    except (OSError, ValueError):
        return None
    return CpuTime(int(ran) / 1e9, int(waited) / 1e9, stat_fields(pid)[:1] == [b"R"])


class WaitMeter:
    """Measures how slow processes on a machine are, based on consecutive calls to `sample`."""

    def __init__(
        self,
        read: Callable[[int], CpuTime | None] = cpu_time,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._read = read
        self._clock = clock
        self._samples: deque[tuple[float, Mapping[int, CpuTime]]] = deque()

    def sample(self, pids: Iterable[int]) -> float:
        """Return how many times slower than usual the slowest of these processes has recently
        run."""
        now = self._clock()
        read = {pid: seen for pid in pids if (seen := self._read(pid)) is not None}
        while len(self._samples) > 1 and self._samples[1][0] <= now - WINDOW_S:
            self._samples.popleft()
        found = [self._slowness(pid, seen, now) for pid, seen in read.items()]
        self._samples.append((now, read))
        return max(found, default=USUAL)

    def _slowness(self, pid: int, seen: CpuTime, now: float) -> float:
        for then, others in self._samples:
            before = others.get(pid)
            if before is not None and now - then >= LEAST_S:
                return _times_slower(before, seen, now - then)
        return USUAL


def _times_slower(before: CpuTime, after: CpuTime, passed_s: float) -> float:
    waited_s = after.waited_s - before.waited_s
    if before.is_runnable and before == after:
        waited_s = passed_s  # the process had no CPU during the entire time
    return min(MAX_SLOWNESS, passed_s / max(passed_s - max(waited_s, 0.0), passed_s / MAX_SLOWNESS))


class MachineSpeed:
    """Measures time so that the limits for an attempt's start and recovery are extended while its
    machines are slow.

    A limit is in seconds at the machines' usual speed: if everything takes ten times as long, the
    limit expires after ten times as many seconds.
    """

    def __init__(self, clock: Callable[[], float] | None = None) -> None:
        """`clock` returns the number of seconds during which this process itself ran."""
        self._clock = clock or AwakeClock().time
        self._looked_at = self._clock()
        self._time_s = 0.0
        self.slowness = USUAL
        self._overrun = USUAL

    def learn(self, slowness: float) -> None:
        """Set the current slowness of the slowest machine."""
        self.time()
        self.slowness = min(max(slowness, USUAL), MAX_SLOWNESS)

    def time(self) -> float:
        """Return the number of seconds that would have elapsed at the machines' usual speed."""
        now = self._clock()
        self._time_s += (now - self._looked_at) / self.slowness
        self._looked_at = now
        return self._time_s

    def stretched(self, limit_s: float) -> float:
        """Convert a limit to seconds at the machines' current speed."""
        return limit_s * self.slowness

    def is_over(self, since: float, limit_s: float) -> bool:
        """Return whether more than `limit_s` has passed since `since`, which is a value of `time`.
        If so, record an overrun."""
        if self.time() - since <= limit_s:
            return False
        self.ran_out()
        return True

    async def within(self, limit_s: float, work: Awaitable[T]) -> T:
        """Return the result of `work`. If `work` takes longer than `limit_s`, cancel it and raise
        TimeoutError."""
        began = self.time()
        task = asyncio.ensure_future(work)
        try:
            while not task.done():
                if self.is_over(began, limit_s):
                    raise TimeoutError(f"the operation took more than {limit_s:g} s{self.why()}")
                await asyncio.wait({task}, timeout=CHECK_S)
            return task.result()
        finally:
            if not task.done():
                task.cancel()
                await asyncio.wait({task})

    def ran_out(self) -> None:
        """Record that a limit was exceeded."""
        self._overrun = max(self._overrun, self.slowness)

    def caught_up(self) -> None:
        """Reset the overrun, because the attempt continues."""
        self._overrun = USUAL

    @property
    def overrun(self) -> float:
        """Return the slowness of the machines when a limit was exceeded; `USUAL` if no limit was
        exceeded."""
        return self._overrun

    def why(self) -> str:
        """Return a note about the overload to append to a message; empty if the machines are not
        overloaded."""
        return overload_note(self.slowness)


def overload_note(slowness: float) -> str:
    """Return a note about the overload to append to a message; empty if `slowness` is below
    `OVERLOADED`."""
    if slowness < OVERLOADED:
        return ""
    return f" (the machine is overloaded, {slowness:.0f} times slower than usual)"
