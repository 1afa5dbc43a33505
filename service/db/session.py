"""Transactions on SQLite and PostgreSQL.

`write` and `read` call a function with a Session, as exactly one transaction, in a thread. After a
lost connection or a deadlock, the function may be run again, even though the first commit might
have succeeded. Therefore, every write must be a compare-and-set.

SQLite has one writing connection behind a lock, and only this connection checkpoints the
write-ahead log; readers have separate, read-only connections. Each commit is synced to disk
(`synchronous=FULL`), because an acknowledged job must survive a power failure. Writes that are
waiting during a commit share the next commit, each in its own savepoint. PostgreSQL groups commits
itself.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import UTC, datetime
from typing import Any, Generic, TypeVar

from sqlalchemy import Connection, Engine, create_engine, func, select
from sqlalchemy.exc import (
    DataError,
    DBAPIError,
    IntegrityError,
    InterfaceError,
    OperationalError,
    StatementError,
)
from sqlalchemy.orm import Session

from service.db import damage
from service.db.engines import THREADS, limit_idling, normalise_url, sqlite_engine, with_limits
from service.db.notifications import PostgresAnnouncer, PostgresListener, Signals
from service.db.types import from_json, server_now
from service.domain.errors import DatabaseUnavailable
from service.domain.ids import is_job_id
from service.domain.meter import Meter, ServiceMetric, cells_of

T = TypeVar("T")
Work = Callable[[Session], T]

logger = logging.getLogger(__name__)

MAX_TRIES = 5
FIRST_PAUSE_S = 0.05
MAX_SHARED_WRITES = 50
MAX_SHARED_S = 0.05
"""On SQLite, up to MAX_SHARED_WRITES writes that run within MAX_SHARED_S seconds share a commit."""
RETRIED_SQLSTATES = frozenset({"40001", "40P01", "57P01", "57P02", "57P03", "55P03", "25P03"})
"""SQLSTATEs after which a transaction is retried: serialization failure, deadlock, server stopping
or starting, lock not available, idle transaction."""

OF_VALUES = (
    *(ValueError, TypeError, LookupError, ArithmeticError, AttributeError),
    *(AssertionError, RecursionError, StatementError),
)
"""Types of exceptions that can be raised when unexpected values are processed or stored."""

_TOPICS = "topics"
_TOUCHED = "touched"
_AT_END = "at_end"
_MEASURED = "measured"


def notify(session: Session, *topics: str) -> None:
    """Publish these topics when, and only if, the transaction is committed."""
    session.info.setdefault(_TOPICS, {}).update(dict.fromkeys(topics))


def touch(session: Session, *job_ids: str) -> None:
    """Declare that this transaction affects only responses about these jobs, and about jobs whose
    topics are passed to `notify`. Does not wake any task."""
    session.info.setdefault(_TOUCHED, set()).update(job_ids)


def wait_for_others(session: Session, key: int) -> None:
    """Take an advisory lock until this transaction ends. On SQLite, no other transaction can write
    at the same time."""
    if session.get_bind().dialect.name == "postgresql":
        session.execute(select(func.pg_advisory_xact_lock(key)))


def at_end(session: Session, work: Callable[[Session], None]) -> None:
    """Run `work` at the end of this transaction. If the same function is passed repeatedly, it runs
    only once."""
    session.info.setdefault(_AT_END, {})[work] = None


def measure(session: Session, metric: ServiceMetric, amount: float = 1.0, label: str = "") -> None:
    """Add to a metric of this process when, and only if, the transaction is committed."""
    measured = session.info.setdefault(_MEASURED, [])
    measured.append(cells_of(metric, amount, label))


def _finish(session: Session) -> None:
    for work in list(session.info.pop(_AT_END, ())):
        work(session)


def utc_now() -> datetime:
    return datetime.now(UTC)


class Database:
    """The connections to the database, and the threads that use the connections."""

    def __init__(self, url: str, *, clock: Callable[[], datetime] = utc_now) -> None:
        self.clock = clock
        """The clock of this process. To make decisions based on times that other processes wrote,
        use `time` instead."""
        self.url = normalise_url(url)
        self.signals = Signals()
        self.meter = Meter()
        self.is_sqlite = self.url.get_backend_name() == "sqlite"
        self.damage: str | None = None
        """A message about the damage; None until a statement finds that the database is damaged."""
        self._announcer: PostgresAnnouncer | None = None
        self._listener: PostgresListener | None = None
        self._write_lock = threading.Lock()
        self._queued: deque[_Queued[Any]] = deque()
        """Writes that wait for SQLite's writer."""
        self._watchers: list[Callable[[frozenset[str] | None], None]] = []
        if self.is_sqlite:
            self.engine = sqlite_engine(self.url, writes=True)
            self._read_engine = sqlite_engine(self.url, writes=False)
            self._near_engine = sqlite_engine(self.url, writes=False, pool_size=1)
        else:
            # Don't use `pool_pre_ping`, which would add a round trip to each transaction. A lost
            # connection invalidates the pool, and `_retrying` then uses a new connection.
            self.engine = create_engine(
                with_limits(self.url),
                pool_size=THREADS,
                max_overflow=THREADS,
                json_deserializer=from_json,
            )
            self._read_engine = self.engine
            self._announcer = PostgresAnnouncer(self._conninfo)
            limit_idling(self.engine)
            # A single statement doesn't need BEGIN and COMMIT to be consistent.
            self._near_engine = self.engine.execution_options(isolation_level="AUTOCOMMIT")
        self._readers = ThreadPoolExecutor(THREADS, thread_name_prefix="dray-db-read")
        self._writers = ThreadPoolExecutor(
            1 if self.is_sqlite else THREADS, thread_name_prefix="dray-db-write"
        )

    def time(self, session: Session) -> datetime:
        """Return the current time of the database server or (on SQLite) of this process."""
        return self.clock() if self.is_sqlite else server_now(session)

    async def read(self, work: Work[T]) -> T:
        """Run `work` on one consistent snapshot of the database, and return its result."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._readers, self.read_sync, work)

    async def look_up(self, work: Work[T]) -> T:
        """Like `read`, but for a single statement that looks up a row by its key.

        On SQLite, a look-up by key is faster than a switch to another thread, so it runs in the
        caller's thread, on a separate connection. Readers never wait for the writer.
        """

        def once() -> T:
            return self._read_once(work, self._near_engine)

        if self.is_sqlite:
            return self._retrying(once)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._readers, self._retrying, once)

    async def write(self, work: Work[T]) -> T:
        """Run `work`, commit it, and return its result. Any exception rolls the transaction
        back."""
        if not self.is_sqlite:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._writers, self.write_sync, work)
        queued = _Queued(work)
        self._queued.append(queued)
        self._writers.submit(self._write_queued)
        return await asyncio.wrap_future(queued.answer)

    def read_sync(self, work: Work[T]) -> T:
        return self._retrying(lambda: self._read_once(work))

    def write_sync(self, work: Work[T]) -> T:
        if not self.is_sqlite:
            return self._write_alone(work)
        with self._write_lock:
            return self._write_alone(work)

    def on_commit(self, watcher: Callable[[frozenset[str] | None], None]) -> None:
        """Call `watcher` after each commit of this process, before the writer continues.

        The argument of `watcher` is the set of jobs that the commit might have affected: the jobs
        passed to `touch`, and the jobs whose topics were passed to `notify`. If `touch` was
        not called and no job's topic was passed to `notify`, the argument is None, which means that
        any response might have changed.
        """
        self._watchers.append(watcher)

    def listen(self) -> None:
        """Start publishing the signals of other processes, and continue until `close` is called
        (PostgreSQL only)."""
        if self._announcer is None or self._listener is not None:
            return
        self._listener = PostgresListener(self._conninfo, self.signals, own=self._announcer)
        self._listener.start()

    @property
    def _conninfo(self) -> str:
        """The URL in the format of psycopg."""
        return (
            with_limits(self.url).set(drivername="postgresql").render_as_string(hide_password=False)
        )

    @property
    def listener(self) -> PostgresListener | None:
        return self._listener

    def close(self) -> None:
        """Wait for running transactions, and then close all connections. The writer's connection is
        closed last."""
        if self._listener is not None:
            self._listener.stop()
        self._readers.shutdown()
        self._writers.shutdown()
        if self._announcer is not None:
            self._announcer.stop()
        self._near_engine.dispose()
        self._read_engine.dispose()
        self.engine.dispose()

    def _read_once(self, work: Work[T], engine: Engine | None = None) -> T:
        with _OneTransaction(engine or self._read_engine, expire_on_commit=False) as session:
            if not self.is_sqlite and engine is None:
                session.connection(execution_options={"isolation_level": "REPEATABLE READ"})
            return work(session)

    def _write_once(self, work: Work[T]) -> T:
        with _OneTransaction(self.engine, expire_on_commit=False) as session:
            result = work(session)
            _finish(session)
            session.flush()
            session.commit()
        self._notify(session)
        return result

    def _notify(self, session: Session) -> None:
        """Notify watchers and waiting tasks about a committed transaction."""
        topics = session.info.get(_TOPICS, ())
        changed = _changed(topics, session.info.get(_TOUCHED))
        for watcher in self._watchers:
            watcher(changed)
        for topic in topics:
            self.signals.publish(topic)
        if self._announcer is not None:
            self._announcer.announce(topics)
        for cells in session.info.get(_MEASURED, ()):
            self.meter.add_all(cells)

    def _write_queued(self) -> None:
        """Perform at least one queued write on SQLite, if any write is queued. Called once for each
        queued write."""
        with self._write_lock:
            taken: list[_Queued[Any]] = []
            while self._queued and len(taken) < MAX_SHARED_WRITES:
                queued = self._queued.popleft()
                if queued.is_wanted():
                    taken.append(queued)
            if len(taken) > 1 and self._write_shared(taken):
                return
            for queued in taken:
                queued.settle(self._write_alone)

    def _write_alone(self, work: Work[T]) -> T:
        return self._retrying(lambda: self._write_once(work))

    def _write_shared(self, taken: Sequence[_Queued[Any]]) -> bool:
        """Perform as many writes in one transaction as fit within MAX_SHARED_S, and put the
        remaining writes back into the queue.

        Returns False after a database error, which rolls back all writes of the transaction; each
        write must then run in its own transaction.
        """
        until = time.monotonic() + MAX_SHARED_S
        written: list[tuple[_Queued[Any], Any, Session]] = []
        failed: list[tuple[_Queued[Any], Exception]] = []
        try:
            with self.engine.begin() as connection:
                for queued in taken:
                    if (written or failed) and time.monotonic() >= until:
                        break
                    try:
                        written.append((queued, *_within_savepoint(connection, queued.work)))
                    except DBAPIError:
                        raise
                    except Exception as error:
                        failed.append((queued, error))
        except Exception as error:
            logger.warning("retrying %d writes one by one: %r", len(taken), error)
            return False
        self._queued.extendleft(reversed(taken[len(written) + len(failed) :]))
        for queued, result, session in written:
            queued.settle(functools.partial(self._notified, session, result))
        for queued, failure in failed:
            queued.answer.set_exception(failure)
        return True

    def _notified(self, session: Session, result: T, _: Work[T]) -> T:
        self._notify(session)
        return result

    def _retrying(self, once: Callable[[], T]) -> T:
        tried = 0
        while True:
            try:
                return once()
            except DBAPIError as error:
                tried += 1
                if damage.is_damage(error):
                    self.damage = damage.sentence(self.url, error)
                    raise DatabaseUnavailable(
                        "the database is damaged", hint="contact the operator of this service"
                    ) from error
                if not _may_pass(error):
                    raise
                if self.is_sqlite or tried >= MAX_TRIES:
                    raise DatabaseUnavailable(
                        "the database does not respond", hint="try again in a moment"
                    ) from error
                logger.warning("retrying a transaction (%d): %s", tried, error.orig)
                time.sleep(FIRST_PAUSE_S * 2**tried * random.uniform(0.5, 1.0))


class _Queued(Generic[T]):
    """A write that waits for SQLite's writer."""

    def __init__(self, work: Work[T]) -> None:
        self.work = work
        self.answer: Future[T] = Future()

    def is_wanted(self) -> bool:
        """Return whether the caller is still waiting. After this call returns True, the caller
        can't cancel the write."""
        return self.answer.running() or self.answer.set_running_or_notify_cancel()

    def settle(self, write: Callable[[Work[T]], T]) -> None:
        try:
            self.answer.set_result(write(self.work))
        except Exception as error:
            self.answer.set_exception(error)


class _OneTransaction(Session):
    """A session for a single transaction, which looks up its connection only once."""

    _found: Connection | None = None

    def connection(
        self,
        bind_arguments: Any = None,
        execution_options: Mapping[str, Any] | None = None,
    ) -> Connection:
        if self._found is None:
            self._found = super().connection(bind_arguments, execution_options)
        return self._found


def _within_savepoint(connection: Connection, work: Work[T]) -> tuple[T, Session]:
    """Run `work` in a savepoint and return its result. Any exception rolls `work` back."""
    with _OneTransaction(
        connection, join_transaction_mode="create_savepoint", expire_on_commit=False
    ) as session:
        result = work(session)
        _finish(session)
        session.commit()
    return result, session


def _changed(topics: Iterable[str], touched: set[str] | None) -> frozenset[str] | None:
    jobs = frozenset(filter(is_job_id, topics))
    if touched is None:
        return jobs or None
    return jobs | touched


def _may_pass(error: DBAPIError) -> bool:
    """Whether the error was caused by the connection or by other transactions, rather than by the
    statement."""
    sqlstate = getattr(error.orig, "sqlstate", None)
    if error.connection_invalidated or sqlstate in RETRIED_SQLSTATES:
        return True
    return isinstance(error, OperationalError | InterfaceError) and (
        sqlstate is None or sqlstate.startswith("08")
    )


def is_of_values(error: Exception) -> bool:
    """Whether the error might be caused by the stored values, rather than by the database, schema
    or connection."""
    if isinstance(error, DBAPIError):
        return isinstance(error, DataError | IntegrityError)
    return isinstance(error, OF_VALUES)
