"""Turns at questions that take long to answer, such as when a job would start.

Each of them plays the scheduler, in one of the few threads that read the database for everybody. So
a caller has some answered at once, has some more wait, and is refused any further ones; and all
callers together leave threads for other requests.
"""

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
class TurnLimits:
    """Questions that are answered, or wait, at one time."""

    at_once: int = 4
    """Of all callers: half of the threads that read the database."""
    of_caller: int = 2
    waiting_of_caller: int = 16


class Turns:
    """The questions of one application."""

    def __init__(self, limits: TurnLimits) -> None:
        self._limits = limits
        self._all = asyncio.Semaphore(limits.at_once)
        self._asked: Counter[str] = Counter()
        self._of_caller: dict[str, asyncio.Semaphore] = {}

    @asynccontextmanager
    async def turn(self, caller: str) -> AsyncIterator[None]:
        """Wait for the caller's turn, in the order of asking; Refused if too many wait already."""
        limits = self._limits
        if self._asked[caller] >= limits.of_caller + limits.waiting_of_caller:
            detail = (
                f"{limits.of_caller} questions of this kind are answered of a caller at a time, "
                f"and {limits.waiting_of_caller} more wait"
            )
            raise Refused(TOO_MANY, detail, None, "ask again when some of them are answered")
        self._asked[caller] += 1
        mine = self._of_caller.setdefault(caller, asyncio.Semaphore(limits.of_caller))
        try:
            async with mine, self._all:
                yield
        finally:
            self._asked[caller] -= 1
            if not self._asked[caller]:
                del self._asked[caller], self._of_caller[caller]
