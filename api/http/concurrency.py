"""Limits concurrent requests that take a long time, such as predicting when a job would start.

A request for a prediction simulates the scheduler in one of the few threads that read the database
for all requests. The server therefore processes only a few of a caller's requests at a time, lets a
few more wait, and refuses the rest. A limit across all callers keeps threads free for other kinds
of requests."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from api.problems import Refused

TOO_MANY = "too_many_requests"
"""Problem code of the refusal."""


@dataclass(frozen=True)
class ConcurrencyLimits:
    """Limits on the number of requests that are processed or waiting at the same time."""

    at_once: int = 4
    """Limit for all callers together: half of the threads that read the database."""
    of_caller: int = 2
    waiting_of_caller: int = 16


class ConcurrencyLimiter:
    """The concurrency limiter of one application."""

    def __init__(self, limits: ConcurrencyLimits) -> None:
        self._limits = limits
        self._all = asyncio.Semaphore(limits.at_once)
        self._asked: Counter[str] = Counter()
        self._of_caller: dict[str, asyncio.Semaphore] = {}

    @asynccontextmanager
    async def acquire(self, caller: str) -> AsyncIterator[None]:
        """Wait for permission, first come first served. Raises Refused if too many requests are
        waiting."""
        limits = self._limits
        if self._asked[caller] >= limits.of_caller + limits.waiting_of_caller:
            detail = (
                f"the server processes {limits.of_caller} requests of this kind per caller at a "
                f"time, and {limits.waiting_of_caller} more are waiting"
            )
            raise Refused(
                TOO_MANY, detail, None, "try again when some of your requests have finished"
            )
        self._asked[caller] += 1
        mine = self._of_caller.setdefault(caller, asyncio.Semaphore(limits.of_caller))
        try:
            async with mine, self._all:
                yield
        finally:
            self._asked[caller] -= 1
            if not self._asked[caller]:
                del self._asked[caller], self._of_caller[caller]
