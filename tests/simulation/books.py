"""Databases for simulated services: the real repositories and transactions in virtual time.

A transaction runs without interruption by other tasks. Faults are injected before and after it.
"""

from __future__ import annotations

import sqlite3
import tempfile
from collections.abc import Callable
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any, Protocol, TypeVar

from sqlalchemy import Engine, create_engine, event, text
from sqlalchemy.orm import Session
from sqlalchemy.pool import StaticPool

from service.db.migrate import migrate
from service.db.models import Base
from service.db.notifications import Signals
from service.db.session import Database
from service.domain.meter import Meter

T = TypeVar("T")
Work = Callable[[Session], T]


class Gate(Protocol):
    """Hooks before and after each call of a process. Both may raise or take time."""

    async def before(self, call: str) -> None: ...

    async def after(self, call: str) -> None: ...

    def loses_commit(self) -> bool:
        """Whether the driver doesn't know if a commit succeeded, and repeats the transaction."""

    def publish(self, topics: tuple[str, ...]) -> None:
        """Wake the waiting tasks in every process."""


class Aborted(Exception):
    """Raised when the process dies in the middle of a transaction."""


class SimDatabase(Database):
    """A `Database` without threads, over an engine that all simulated processes share."""

    def __init__(
        self,
        engine: Engine,
        gate: Gate,
        time: Callable[[], datetime],
        clock: Callable[[], datetime],
    ) -> None:
        self.engine = self._read_engine = self._near_engine = engine
        self.is_sqlite = engine.dialect.name == "sqlite"
        self.url = engine.url
        self.clock = clock
        self.signals = Signals()
        self.meter = Meter()
        self._gate = gate
        self._time = time
        self._watchers = []
        self._announcer = self._listener = None

    def time(self, session: Session) -> datetime:
        return self._time()

    async def read(self, work: Work[T]) -> T:
        await self._gate.before("read")
        answer = self._read_once(work)
        await self._gate.after("read")
        return answer

    async def look_up(self, work: Work[T]) -> T:
        return await self.read(work)

    async def write(self, work: Work[T]) -> T:
        await self._gate.before("write")
        try:
            answer = self._write_once(work)
        except Aborted:
            await self._gate.after("write")
            raise
        if self._gate.loses_commit():
            answer = self._write_once(work)
        await self._gate.after("write")
        return answer

    def _write_once(self, work: Work[T]) -> T:
        topics: list[str] = []

        def noted(session: Session) -> T:
            answer = work(session)
            session.flush()
            topics.extend(session.info.pop("topics", ()))
            return answer

        answer = super()._write_once(noted)
        self._gate.publish(tuple(topics))
        return answer

    def close(self) -> None:
        """Do nothing: other processes share the engine."""


@cache
def memory_engine() -> Engine:
    """An in-memory SQLite database, reused by all simulations of this process in turn."""
    engine = create_engine(
        "sqlite://", poolclass=StaticPool, connect_args={"check_same_thread": False}
    )

    @event.listens_for(engine, "connect")
    def _configure(connection: Any, _: Any) -> None:
        connection.isolation_level = None
        connection.execute("PRAGMA foreign_keys=ON")

    @event.listens_for(engine, "begin")
    def _begin(connection: Any) -> None:
        connection.exec_driver_sql("BEGIN")

    return engine


@cache
def _template() -> bytes:
    """Return a migrated SQLite database as bytes."""
    with tempfile.TemporaryDirectory(prefix="dray-simulation-") as folder:
        path = Path(folder) / "template.db"
        database = Database(f"sqlite:///{path}")
        migrate(database)
        database.close()
        connection = sqlite3.connect(path)
        # In-memory databases have no write-ahead log.
        connection.execute("PRAGMA journal_mode=DELETE")
        content = connection.serialize()
        connection.close()
    return content


def empty_memory() -> Engine:
    """Return the in-memory database with the schema but without data."""
    engine = memory_engine()
    with engine.connect() as connection:
        raw = connection.connection.driver_connection
        assert isinstance(raw, sqlite3.Connection)
        connection.rollback()
        raw.deserialize(_template())
    return engine


def empty_postgres(engine: Engine) -> Engine:
    """Delete all rows of the database and return the engine."""
    tables = ", ".join(Base.metadata.tables)
    with engine.begin() as connection:
        connection.execute(text(f"TRUNCATE {tables} RESTART IDENTITY"))
        connection.execute(text("INSERT INTO queues (name) VALUES ('default')"))
    return engine
