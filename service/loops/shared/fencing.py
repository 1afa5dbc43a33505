"""The loops' access to the database, which provides the database's clock and accepts writes only
under a valid lease."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import TypeVar

from sqlalchemy.orm import Session

from service.db.repositories.scheduling import leases as repository
from service.db.session import Database
from service.domain import leases
from service.domain.meter import Meter

T = TypeVar("T")
Work = Callable[[Session, datetime], T]


class LeaseLost(Exception):
    """Raised if the lease is lost, because another process might be running the loops. Nothing was
    written."""


@dataclass(frozen=True)
class Term:
    """The fencing token for the writes of a process."""

    holder: str
    number: int


class LoopDatabase:
    """Runs the loops' transactions. The database's time is passed to each transaction as the second
    argument."""

    def __init__(self, database: Database, term: Term | None = None) -> None:
        self._database = database
        self._term = term
        """None if there is no lease because no other process can run the loops."""
        self.lost = asyncio.Event()
        """Set when a write finds that the lease is lost."""

    @property
    def meter(self) -> Meter:
        return self._database.meter

    async def read(self, work: Work[T]) -> T:
        return await self._database.read(lambda s: work(s, self._database.time(s)))

    async def write(self, work: Work[T]) -> T:
        """Run `work`, commit it under the lease, and return its result.

        If the lease is lost, this method never returns: the leader waits for `lost` and cancels the
        loops, so that no loop continues with state that another process might have changed.
        """
        try:
            return await self._database.write(lambda s: self._fenced(s, work))
        except LeaseLost:
            self.lost.set()
            forever: asyncio.Future[T] = asyncio.get_running_loop().create_future()
            return await forever

    def _fenced(self, session: Session, work: Work[T]) -> T:
        if self._term is not None:
            repository.lock(session, alone=False)
        now = self._database.time(session)
        if self._term is not None:
            holder, number = self._term.holder, self._term.number
            if not leases.holds(repository.get(session), holder, number, now):
                raise LeaseLost(f"term {number} of {holder} has ended")
        return work(session, now)
