"""Elects the process that runs the loops. Only one of the processes that share a database runs the
loops at a time.

With PostgreSQL, every process that could run the loops requests the lease. The process that gets
the lease runs the loops until a renewal or a write finds that the lease is lost. With SQLite there
is no lease, because the lock on the home directory admits only one process.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import socket
from collections.abc import Callable, Coroutine, Sequence
from datetime import datetime
from typing import Any

from sqlalchemy.orm import Session

from service.db.repositories.scheduling import leases as repository
from service.db.session import Database, notify, touch
from service.domain import leases
from service.domain.leases import Lease
from service.loops.shared.fencing import LoopDatabase, Term
from service.loops.shared.timings import LoopTimings

logger = logging.getLogger(__name__)

TOPIC = "lease"
"""Published when the lease is released before it expires."""

Loops = Sequence[tuple[str, Coroutine[Any, Any, None]]]
"""Pairs of a loop's name and its coroutine."""


def own_name() -> str:
    """Return a unique name under which this process holds the lease. The name contains the host and
    the process id."""
    return f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(4)}"


class Leader:
    """Runs the loops that `start` returns while this process holds the lease."""

    def __init__(
        self,
        database: Database,
        start: Callable[[LoopDatabase], Loops],
        timings: LoopTimings,
        *,
        name: str | None = None,
        alone: bool | None = None,
    ) -> None:
        self._database = database
        self._start = start
        self._timings = timings
        self._alone = database.is_sqlite if alone is None else alone
        self.name = name or own_name()
        self.lease: Lease | None = None
        """The lease of this process; None while it doesn't run the loops."""
        self.other: Lease | None = None
        """The lease of another process, as it was last read."""
        self.tasks: list[asyncio.Task[None]] = []

    @property
    def leads(self) -> bool:
        return bool(self.tasks)

    async def run(self) -> None:
        """Run until cancelled, then cancel the loops."""
        while True:
            term = None if self._alone else await self._wait_for_term()
            await self._lead(LoopDatabase(self._database, term))

    async def release(self) -> None:
        """Release the lease on a clean shutdown, so that another process gets it immediately."""
        lease, self.lease = self.lease, None
        if lease is not None:
            await self._database.write(lambda s: self._release(s, lease))

    async def _wait_for_term(self) -> Term:
        with self._database.signals.subscribe(TOPIC) as woken:
            while True:
                wait_s = self._timings.lease_retry_s
                try:
                    wait_s = max(wait_s, await self._database.read(self._left_s))
                    if self.other is None:
                        await self._ask()
                except Exception as error:
                    logger.warning("can't request the lease to run the loops: %s", error)
                if self.lease is not None:
                    term = self.lease.term
                    logger.info("%s now runs the loops, in term %d", self.name, term)
                    return Term(self.name, term)
                await woken.wait(wait_s)

    async def _ask(self) -> None:
        """Take the lease if it is free. A cancelled call still waits for the response. Without this
        wait, this process might take a lease without recording it, and never release the lease, so
        that other processes would have to wait until the lease expires.
        """
        asking = asyncio.ensure_future(self._database.write(self._take))
        try:
            self.lease = await asyncio.shield(asking)
        except asyncio.CancelledError:
            with contextlib.suppress(Exception):  # the cancellation is raised by the next statement
                self.lease = await asking
            raise

    def _left_s(self, session: Session) -> float:
        """Return the number of seconds until another process's lease expires, unless that process
        renews the lease."""
        found, now = repository.get(session), self._database.time(session)
        if found is None or self._taken(found, now) is not None:
            self.other = None
            return 0.0
        if self.other is None or self.other.holder != found.holder:
            logger.info(
                "%s is waiting for the lease, because %s runs the loops", self.name, found.holder
            )
        self.other = found
        return (found.expires_at - now).total_seconds()

    def _taken(self, found: Lease | None, now: datetime) -> Lease | None:
        return leases.taken(found, self.name, now, self._timings.lease_held_for)

    def _take(self, session: Session) -> Lease | None:
        """Take the lease once all writes under the previous lease have ended. Later writes wait
        until the lease is taken.

        Writes under an expired lease are aborted, because the writing process might be suspended in
        the middle of a write. If that process continues, it detects that it has lost the lease.
        """
        touch(session)
        if self._taken(repository.get(session), self._database.time(session)) is None:
            return None
        repository.end_writes(session)
        repository.lock(session, alone=True)
        taken = self._taken(repository.get(session), self._database.time(session))
        if taken is not None:
            repository.put(session, taken)
        return taken

    async def _lead(self, database: LoopDatabase) -> None:
        self.tasks = [asyncio.create_task(loop, name=name) for name, loop in self._start(database)]
        try:
            await self._keep(database)
        finally:
            for task in self.tasks:
                task.cancel()
            await asyncio.gather(*self.tasks, return_exceptions=True)
            self.tasks = []
        logger.warning("%s lost the lease to run the loops, and is stopping them", self.name)
        self.lease = None

    async def _keep(self, database: LoopDatabase) -> None:
        """Renew the lease until it is lost."""
        while True:
            try:
                async with asyncio.timeout(self._timings.lease_renewal_s):
                    await database.lost.wait()
                return
            except TimeoutError:
                pass
            try:
                if not await self._renew():
                    return
            except Exception as error:
                logger.warning("can't renew the lease to run the loops: %s", error)

    async def _renew(self) -> bool:
        """Renew the lease. Returns False if the lease was lost."""
        if self.lease is None:
            return True  # no other process can run the loops
        lease = self.lease
        self.lease = await self._database.write(lambda s: self._extend(s, lease))
        return self.lease is not None

    def _extend(self, session: Session, lease: Lease) -> Lease | None:
        """Return the renewed lease, or None if it was lost. Takes no lock that a write could hold
        for a long time."""
        touch(session)
        now = self._database.time(session)
        then = leases.renewed(lease, now, self._timings.lease_held_for)
        return then if repository.compare_and_set(session, lease, then, now) else None

    def _release(self, session: Session, lease: Lease) -> None:
        touch(session)
        now = self._database.time(session)
        if repository.compare_and_set(session, lease, leases.released(lease, now), now):
            notify(session, TOPIC)
