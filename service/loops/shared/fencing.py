"""The database of the loops, with its own clock; it accepts writes only under a valid lease."""

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
    """The lease is lost, so another process may run the loops; nothing was written."""


@dataclass(frozen=True)
class Term:
    """The fencing token of a process's writes."""

    holder: str
    number: int


class LoopDatabase:
    """Runs the loops' transactions, each with the database's time as its second argument."""

    def __init__(self, database: Database, term: Term | None = None) -> None:
        self._database = database
        self._term = term
        """None if no other process can run the loops, so that there is no lease."""
        self.lost = asyncio.Event()
        """Set when a write found that the lease is lost."""

    @property
    def meter(self) -> Meter:
        return self._database.meter

    async def read(self, work: Work[T]) -> T:
        return await self._database.read(lambda s: work(s, self._database.time(s)))

    async def write(self, work: Work[T]) -> T:
        """Return the result of `work` after it was committed under the lease.

        Does not return if the lease is lost: the leader waits for `lost` and cancels the loops, so
        that no loop continues with a state that another process may have changed.
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
                raise LeaseLost(f"term {number} of {holder} is over")
        return work(session, now)
