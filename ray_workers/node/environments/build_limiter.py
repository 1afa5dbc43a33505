"""Limits concurrent builds on a node, in total and by user, and records which builds are still
wanted.

A build runs only as long as a job needs it. A build is charged to one of the users who request it.
Each user can run only a few builds at a time, so that users don't delay each other's builds."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator
from typing import Final

from ray_workers.node.shared_work import WANTED_S, Abandoned, Owner, WantedWork

BUILDS_AT_A_TIME: Final = 8
BUILDS_OF_A_USER: Final = 2


class BuildLimiter:
    """The wanted builds of a node, keyed by the build's key. Use each instance in only one event
    loop, except for `is_wanted`, which can be called from any thread."""

    def __init__(self) -> None:
        self._wanted = WantedWork()
        self._running: dict[str, Owner] = {}
        """The user for whom each build runs."""
        self._changed = asyncio.Event()

    def want(self, key: str, owner: Owner) -> None:
        self._wanted.want(key, owner)
        self._changed.set()

    def forget(self, key: str, owner: Owner) -> None:
        """Record that no job of the user still needs the build."""
        self._wanted.forget(key, owner)
        self._changed.set()

    def is_wanted(self, key: str) -> bool:
        return self._wanted.is_wanted(key)

    def why_waiting(self, key: str, owner: Owner) -> str | None:
        """Return why a build isn't running yet; None if it is running or about to run."""
        if key in self._running:
            return None
        if self._number_of(owner) >= BUILDS_OF_A_USER:
            return (
                f"waits for one of the user's {BUILDS_OF_A_USER} running builds on this node to "
                "finish"
            )
        if len(self._running) < BUILDS_AT_A_TIME:
            return None
        return f"waits for one of the {len(self._running)} running builds on this node to finish"

    @contextlib.asynccontextmanager
    async def acquire(self, key: str) -> AsyncIterator[None]:
        """Return a context that waits until the build can run. Raises Abandoned if no job still
        needs the build."""
        while not (owners := self._owners_with_capacity(key)):
            self._changed.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(WANTED_S):
                    await self._changed.wait()
        self._running[key] = owners[0]
        try:
            yield
        finally:
            del self._running[key]
            self._changed.set()

    def _owners_with_capacity(self, key: str) -> list[Owner]:
        """Return the users for whom the build may run now."""
        owners = self._wanted.owners(key)
        if not owners:
            raise Abandoned
        is_full = len(self._running) >= BUILDS_AT_A_TIME
        return [] if is_full else [o for o in owners if self._number_of(o) < BUILDS_OF_A_USER]

    def _number_of(self, owner: Owner) -> int:
        return Counter(self._running.values())[owner]
