"""Records how long each of dray's own processes has been silent, and defines limits on the silence.

A suspended process closes no connection; the only sign of its state is that it does not respond to
requests. A process that sends requests to other processes uses a `Silence`, and acts when a limit
of `SilenceLimits` has passed. The service does this for its gateway, the gateway for supervisors
and node agents, a supervisor for its rank actors and its store, and a node agent for its
forkserver. Apart from the clocks, which are parameters, this module has no side effects.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Hashable
from dataclasses import dataclass
from typing import Protocol, TypeVar

MAX_GAP_S = 5.0
"""Maximum number of seconds of silence to count between two readings of the clock. This maximum is
longer than the pause in any loop."""


T = TypeVar("T")


class Clock(Protocol):
    def time(self) -> float:
        """Return the seconds since an arbitrary point in time."""
        ...


class AwakeClock:
    """A clock that counts the seconds during which this process itself ran.

    Processes should not count as silent because a laptop was asleep or a machine was paused, so at
    most `MAX_GAP_S` is counted between two readings.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._read_at = clock()
        self._awake_s = 0.0

    def time(self) -> float:
        now = self._clock()
        self._awake_s += min(max(now - self._read_at, 0.0), MAX_GAP_S)
        self._read_at = now
        return self._awake_s


@dataclass(frozen=True)
class SilenceLimits:
    """How long each kind of process may take to respond to a request, in seconds."""

    replace_s: float
    """Seconds of silence after which a supervisor or a node agent is killed and replaced."""

    @property
    def report_s(self) -> float:
        """Seconds of silence after which users are notified, and a silent node gets no more
        work."""
        return self.replace_s / 4

    @property
    def gateway_s(self) -> float:
        """Time limit for the gateway and for the forkserver. While one of them is silent, it holds
        up its only caller, a local process."""
        return self.replace_s / 2

    @property
    def rank_actor_s(self) -> float:
        return self.replace_s / 2

    @property
    def start_s(self) -> float:
        """Time limit for the first response of a process, which may still be importing modules."""
        return 3 * self.replace_s

    @property
    def ray_s(self) -> float:
        """Time limit for Ray itself, after which an embedded Ray is restarted."""
        return 2 * self.replace_s

    @property
    def join_s(self) -> float:
        """Time limit for a driver to join Ray. Joining takes several seconds of CPU time."""
        return 5 * self.replace_s

    @property
    def last_reports_s(self) -> float:
        """How long an attempt that has ended waits for reports from a live but silent node."""
        return 10 * self.replace_s


class Silence:
    """Records how long each of several processes has been silent."""

    def __init__(self, clock: Clock | None = None, wall: Callable[[], float] = time.time) -> None:
        self._clock: Clock = clock or AwakeClock()
        self._wall = wall
        self._asked: dict[Hashable, tuple[float, float]] = {}

    def asked(self, name: Hashable) -> None:
        """Record that a request was sent. If the process has not responded to an earlier request,
        the time of that request is kept."""
        self._asked.setdefault(name, (self._clock.time(), self._wall()))

    def answered(self, name: Hashable) -> None:
        self._clock.time()
        self._asked.pop(name, None)

    async def ask(self, name: Hashable, limit_s: float, answer: Awaitable[T]) -> T:
        """Return the response to a request that was just sent. Raises TimeoutError if the process
        does not respond within `limit_s`.

        A response that arrives after the limit still counts as a sign of life, because on an
        overloaded machine, every response may be late. The clock is read regularly while waiting,
        because a gap of more than `MAX_GAP_S` would be treated as a pause of this process itself.
        """
        self.asked(name)
        asking = asyncio.ensure_future(answer)
        asking.add_done_callback(lambda asked: self._came(name, asked))
        loop = asyncio.get_running_loop()
        ends_at = loop.time() + limit_s
        while not asking.done() and (left_s := ends_at - loop.time()) > 0:
            await asyncio.wait({asking}, timeout=min(left_s, MAX_GAP_S / 2))
            self._clock.time()
        if not asking.done():
            raise TimeoutError
        return asking.result()

    def _came(self, name: Hashable, asked: asyncio.Future[T]) -> None:
        if not asked.cancelled() and asked.exception() is None:
            self.answered(name)

    def seconds(self, name: Hashable) -> float:
        """Return the number of seconds for which a process has been silent, not counting pauses of
        this process."""
        now = self._clock.time()
        asked = self._asked.get(name)
        return 0.0 if asked is None else now - asked[0]

    def since(self, name: Hashable) -> float:
        """Return the Unix time in seconds of the oldest request without a response; the current
        time if there is none."""
        asked = self._asked.get(name)
        return self._wall() if asked is None else asked[1]
