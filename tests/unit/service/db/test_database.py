"""Transactions run one at a time; they are atomic, retried if that can help, and signal their
changes after the commit."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import sqlite3
import threading
from collections.abc import Callable
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psycopg
import pytest
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from sqlalchemy import event, text
from sqlalchemy.exc import IntegrityError, OperationalError, StatementError
from sqlalchemy.orm import Session

from dray.views import JobState
from service.db import notifications
from service.db import session as db_session
from service.db.engines import VANISHED_HOST, normalise_url, with_limits
from service.db.migrate import SchemaTooNew, SchemaTooOld, migrate
from service.db.models import Base, DeploymentRow
from service.db.notifications import Signals
from service.db.repositories.scheduling.cluster import ensure_deployment
from service.db.session import Database, notify
from service.db.types import from_json
from service.domain.errors import DatabaseUnavailable
from service.domain.ids import new_job_id

PATIENCE_S = 60.0
NOW = datetime(2026, 1, 1, 12, 0, 0, 123456, tzinfo=UTC)


def add(session: Session, name: str, at: datetime = NOW) -> None:
    session.add(DeploymentRow(id=name, created_at=at))


def names(database: Database) -> list[str]:
    query = "SELECT id FROM deployment ORDER BY created_at, id"
    return database.read_sync(lambda s: list(s.scalars(text(query))))


async def test_the_migrated_schema_is_the_models_schema(database: Database) -> None:
    migrate(database)
    with database.engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        assert compare_metadata(context, Base.metadata) == []


@pytest.mark.parametrize(
    ("revision", "error", "why"),
    [
        ("9999", SchemaTooNew, "run the newer version"),
        ("0041", SchemaTooOld, "start dray at commit [0-9a-f]{8} once"),
    ],
)
async def test_a_database_that_can_not_be_upgraded_is_refused_with_who_can(
    database: Database, revision: str, error: type[Exception], why: str
) -> None:
    current = text("SELECT version_num FROM alembic_version")
    before = database.read_sync(lambda s: s.execute(current).scalar_one())
    other = text("UPDATE alembic_version SET version_num = :revision")
    database.write_sync(lambda s: s.execute(other, {"revision": revision}))
    try:
        with pytest.raises(error, match=why):
            migrate(database)
    finally:
        database.write_sync(lambda s: s.execute(other, {"revision": before}))


async def test_a_write_that_fails_leaves_nothing(database: Database) -> None:
    def work(session: Session) -> None:
        add(session, "half")
        session.flush()
        raise RuntimeError("in the middle")

    with pytest.raises(RuntimeError, match="in the middle"):
        await database.write(work)
    assert names(database) == []


async def test_a_read_can_not_write_on_sqlite(sqlite_url: str) -> None:
    database = Database(sqlite_url)
    with pytest.raises(OperationalError, match="readonly"):
        database._read_once(lambda s: s.execute(text("DELETE FROM deployment")))
    database.close()


async def test_a_read_sees_one_moment(database: Database) -> None:
    def work(session: Session) -> tuple[int, int]:
        count = text("SELECT count(*) FROM deployment")
        before = session.execute(count).scalar_one()
        other = threading.Thread(target=database.write_sync, args=(lambda s: add(s, "meanwhile"),))
        other.start()
        other.join()
        return before, session.execute(count).scalar_one()

    assert database.read_sync(work) == (0, 0)
    assert names(database) == ["meanwhile"]


async def test_many_writers_at_once_all_succeed(database: Database) -> None:
    await asyncio.gather(*(database.write(lambda s, n=n: add(s, f"d{n:02d}")) for n in range(24)))
    assert len(names(database)) == 24


class Held:
    """A SQLite writer that is blocked while other writes are queued; counts commits."""

    def __init__(self, sqlite_url: str) -> None:
        self.database = Database(sqlite_url)
        migrate(self.database)
        self.commits = 0
        event.listen(self.database.engine, "commit", self._count)
        self._has_begun, self._gate = threading.Event(), threading.Event()
        self._holding = asyncio.ensure_future(self.database.write(self._hold))

    @classmethod
    async def on(cls, sqlite_url: str) -> Held:
        held = cls(sqlite_url)
        await asyncio.to_thread(held._has_begun.wait)
        return held

    def _hold(self, _: Session) -> None:
        self._has_begun.set()
        self._gate.wait()

    def _count(self, _: object) -> None:
        self.commits += 1

    async def let_go(self, *writes: asyncio.Future[None]) -> list[BaseException | None]:
        """Unblock the writer, and return the exception of each write, or None if it succeeded."""
        await asyncio.sleep(0)  # they are queued
        self._gate.set()
        await self._holding
        return await asyncio.gather(*writes, return_exceptions=True)

    def write(self, work: Callable[[Session], None]) -> asyncio.Future[None]:
        return asyncio.ensure_future(self.database.write(work))


async def test_writes_that_wait_for_the_writer_share_a_commit(
    sqlite_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(db_session, "MAX_SHARED_S", 60.0)  # regardless of the load
    held = await Held.on(sqlite_url)
    writes = [held.write(lambda s, n=n: add(s, f"d{n}")) for n in range(5)]
    assert await held.let_go(*writes) == [None] * 5
    assert names(held.database) == [f"d{n}" for n in range(5)]
    assert held.commits == 1
    held.database.close()


async def test_of_writes_that_share_a_commit_one_that_fails_fails_alone(sqlite_url: str) -> None:
    held = await Held.on(sqlite_url)
    changed: list[frozenset[str] | None] = []

    def refused(session: Session) -> None:
        add(session, "half")
        session.flush()
        raise ValueError("no")

    def good(session: Session) -> None:
        add(session, "good")
        notify(session, "job-01arz3ndektsv4rrffq69g5fav")

    held.database.on_commit(changed.append)
    first, second = await held.let_go(held.write(refused), held.write(good))
    assert isinstance(first, ValueError)
    assert second is None
    assert names(held.database) == ["good"]
    assert changed == [None, frozenset({"job-01arz3ndektsv4rrffq69g5fav"})]
    held.database.close()


async def test_an_error_of_the_database_is_of_the_write_that_made_it(sqlite_url: str) -> None:
    held = await Held.on(sqlite_url)
    writes = [held.write(lambda s, n=n: add(s, n)) for n in ("a", "b", "a", "c")]
    answers = await held.let_go(*writes)
    assert [type(answer) for answer in answers] == [
        *(type(None), type(None)),
        *(IntegrityError, type(None)),
    ]
    assert names(held.database) == ["a", "b", "c"]
    held.database.close()


async def test_a_write_whose_caller_has_gone_is_not_made(sqlite_url: str) -> None:
    held = await Held.on(sqlite_url)
    gone, stays = (held.write(lambda s, n=n: add(s, n)) for n in ("gone", "stays"))
    await asyncio.sleep(0)
    gone.cancel()
    await held.let_go(gone, stays)
    assert names(held.database) == ["stays"]
    held.database.close()


async def test_more_writes_than_fit_into_one_commit_are_all_made(
    sqlite_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(db_session, "MAX_SHARED_S", 0.0)
    monkeypatch.setattr(db_session, "MAX_SHARED_WRITES", 3)
    held = await Held.on(sqlite_url)
    await held.let_go(*(held.write(lambda s, n=n: add(s, f"d{n:02d}")) for n in range(10)))
    assert names(held.database) == [f"d{n:02d}" for n in range(10)]
    held.database.close()


async def test_times_come_back_in_utc_and_sort_as_times(database: Database) -> None:
    east = timezone(timedelta(hours=9))
    database.write_sync(lambda s: add(s, "later", NOW + timedelta(microseconds=1)))
    database.write_sync(lambda s: add(s, "earlier", NOW.astimezone(east)))
    assert names(database) == ["earlier", "later"]
    row = database.read_sync(lambda s: s.get_one(DeploymentRow, "earlier"))
    assert (row.created_at, row.created_at.tzinfo) == (NOW, UTC)


async def test_a_time_without_a_zone_is_refused(database: Database) -> None:
    with pytest.raises(StatementError, match="no time zone"):
        database.write_sync(lambda s: add(s, "naive", datetime(2026, 1, 1)))


async def test_the_deployment_keeps_its_id(database: Database) -> None:
    made = database.write_sync(lambda s: ensure_deployment(s, NOW))
    assert made == database.write_sync(lambda s: ensure_deployment(s, NOW + timedelta(days=1)))
    assert names(database) == [made]


async def test_who_waits_is_woken_after_the_commit_and_not_without_one(
    database: Database,
) -> None:
    def work(session: Session, *, fail: bool) -> None:
        add(session, "told")
        notify(session, "topic")
        if fail:
            raise RuntimeError("no commit")

    with database.signals.subscribe("topic", "other") as woken:
        with pytest.raises(RuntimeError):
            await database.write(lambda s: work(s, fail=True))
        assert not await woken.wait(0.05)
        await database.write(lambda s: work(s, fail=False))
        assert await woken.wait(PATIENCE_S)
        assert names(database) == ["told"]
        assert not await woken.wait(0)


async def test_processes_on_one_postgresql_wake_each_other(postgres_url: str) -> None:
    here, there = Database(postgres_url), Database(postgres_url)
    try:
        here.listen()
        assert here.listener is not None
        assert await asyncio.to_thread(here.listener.listening.wait, PATIENCE_S)
        with here.signals.subscribe("job-x") as woken:
            await there.write(lambda s: notify(s, "job-y", "job-x"))
            assert await woken.wait(PATIENCE_S)
    finally:
        here.close()
        there.close()


async def test_a_process_is_not_woken_again_by_its_own_messages(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = Database(postgres_url), Database(postgres_url)
    published: list[str] = []
    publish = here.signals.publish

    def note(topic: str) -> None:
        published.append(topic)
        publish(topic)

    try:
        for each in (here, there):
            each.listen()
            assert each.listener is not None
            assert await asyncio.to_thread(each.listener.listening.wait, PATIENCE_S)
        monkeypatch.setattr(here.signals, "publish", note)
        with here.signals.subscribe("theirs") as woken, there.signals.subscribe("ours") as sent:
            await here.write(lambda s: notify(s, "ours"))
            assert await sent.wait(PATIENCE_S)
            await there.write(lambda s: notify(s, "theirs"))
            assert await woken.wait(PATIENCE_S), "and messages come in their order"
        assert published.count("ours") == 1
    finally:
        here.close()
        there.close()


async def test_messages_that_could_not_be_sent_are_sent_again(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notifications, "RECONNECT_S", 0.01)
    here, there = Database(postgres_url), Database(postgres_url)
    try:
        here.listen()
        assert here.listener is not None
        assert await asyncio.to_thread(here.listener.listening.wait, PATIENCE_S)
        with here.signals.subscribe("first") as first, here.signals.subscribe("second") as second:
            await there.write(lambda s: notify(s, "first"))
            assert await first.wait(PATIENCE_S)
            end_senders(postgres_url)
            await there.write(lambda s: notify(s, "second"))
            assert await second.wait(PATIENCE_S)
    finally:
        here.close()
        there.close()


async def test_the_last_messages_are_sent_though_the_connection_was_lost(postgres_url: str) -> None:
    here, there = Database(postgres_url), Database(postgres_url)
    try:
        here.listen()
        assert here.listener is not None
        assert await asyncio.to_thread(here.listener.listening.wait, PATIENCE_S)
        with here.signals.subscribe("first") as first, here.signals.subscribe("last") as last:
            await there.write(lambda s: notify(s, "first"))
            assert await first.wait(PATIENCE_S)
            end_senders(postgres_url)
            await there.write(lambda s: notify(s, "last"))
            await asyncio.to_thread(there.close)
            assert await last.wait(PATIENCE_S)
    finally:
        here.close()
        there.close()


def end_senders(postgres_url: str) -> None:
    with psycopg.connect(postgres_url, autocommit=True) as killer:
        killer.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
            "WHERE query LIKE '%pg_notify%' AND pid <> pg_backend_pid()"
        )


def test_a_sender_is_known_by_its_mark_whatever_process_of_the_server_sends() -> None:
    """After a restart, the server reuses its process ids."""
    announcer = notifications.PostgresAnnouncer("")
    listener = notifications.PostgresListener("", Signals(), own=announcer)
    payloads = [f"{announcer.mark} own", "from:elsewhere other", "of an older release"]
    connection: Any = SimpleNamespace(
        notifies=lambda timeout: (psycopg.Notify("dray", each, 1) for each in payloads)
    )
    found = list(itertools.islice(listener._topics(connection), 6))
    assert [topic for topic in found if not topic.startswith("from:")] == [
        *("other", "of", "an", "older", "release")
    ]


def test_many_topics_are_sent_in_messages_that_postgresql_takes() -> None:
    topics = [f"{new_job_id(datetime.now(UTC))}/events" for _ in range(1000)]
    payloads = list(notifications._payloads(topics, "from:here"))
    sent = [payload.split() for payload in payloads]
    assert {first for first, *_ in sent} == {"from:here"}
    assert [topic for _, *others in sent for topic in others] == topics
    assert max(map(len, payloads)) < 8000
    assert len(payloads) < 10


async def test_a_lost_connection_to_postgresql_is_not_seen_by_the_caller(
    postgres_url: str,
) -> None:
    database = Database(postgres_url)
    ran = []

    def work(session: Session) -> None:
        pid = session.execute(text("SELECT pg_backend_pid()")).scalar_one()
        add(session, "once")
        session.flush()
        ran.append(pid)
        if len(ran) == 1:
            with psycopg.connect(postgres_url, autocommit=True) as killer:
                killer.execute("SELECT pg_terminate_backend(%s)", (pid,))

    try:
        await database.write(work)
        assert len(ran) == 2
        assert names(database) == ["once"]
    finally:
        database.close()


async def test_connections_that_were_lost_while_idle_are_replaced(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(db_session, "FIRST_PAUSE_S", 0.0)
    database = Database(postgres_url)
    gate = threading.Barrier(3)

    def work(session: Session) -> int:
        pid: int = session.execute(text("SELECT pg_backend_pid()")).scalar_one()
        gate.wait(PATIENCE_S)
        return pid

    try:
        before = await asyncio.gather(*(database.write(work) for _ in range(3)))
        with psycopg.connect(postgres_url, autocommit=True) as killer:
            killer.execute("SELECT pg_terminate_backend(pid) FROM unnest(%s) AS pid", (before,))
        gate = threading.Barrier(1)
        found = [
            await database.read(work),
            await database.look_up(work),
            await database.write(work),
        ]
        assert not set(found) & set(before)
    finally:
        database.close()


async def test_a_listener_that_lost_its_connection_listens_again(postgres_url: str) -> None:
    database = Database(postgres_url)
    try:
        database.listen()
        listener = database.listener
        assert listener is not None
        assert await asyncio.to_thread(listener.listening.wait, PATIENCE_S)
        with database.signals.subscribe("topic") as woken:
            await woken.wait(0.2)
            with psycopg.connect(postgres_url, autocommit=True) as killer:
                killer.execute(
                    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                    "WHERE query LIKE 'LISTEN%' AND pid <> pg_backend_pid()"
                )
            assert await woken.wait(20), "everyone is woken once it listens again"
    finally:
        database.close()


async def test_a_database_that_stays_away_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("service.db.session.FIRST_PAUSE_S", 0.001)
    database = Database("postgresql://nobody@127.0.0.1:1/none")
    try:
        with pytest.raises(DatabaseUnavailable, match="does not respond"):
            await database.read(lambda s: s.execute(text("SELECT 1")))
    finally:
        database.close()


async def test_every_commit_on_sqlite_is_synced_and_one_connection_checkpoints(
    sqlite_url: str,
) -> None:
    database = Database(sqlite_url)

    def pragmas(session: Session) -> list[object]:
        asked = ("journal_mode", "synchronous", "foreign_keys", "wal_autocheckpoint")
        return [session.execute(text(f"PRAGMA {name}")).scalar_one() for name in asked]

    try:
        full = 2
        assert database.write_sync(pragmas) == ["wal", full, 1, 1000]
        assert database.read_sync(pragmas)[3] == 0
    finally:
        database.close()
    with sqlite3.connect(sqlite_url.removeprefix("sqlite:///")) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)


@pytest.mark.parametrize(
    ("url", "driver"),
    [
        ("postgresql://u:p@h/d", "postgresql+psycopg"),
        ("postgres://u@h/d", "postgresql+psycopg"),
        ("postgresql+psycopg2://u@h/d", "postgresql+psycopg"),
        ("sqlite:////tmp/x.db", "sqlite"),
    ],
)
async def test_urls_name_the_drivers_that_are_used(url: str, driver: str) -> None:
    assert normalise_url(url).drivername == driver


def test_the_wait_for_a_vanished_database_host_is_limited_unless_the_url_sets_a_limit() -> None:
    found = with_limits(normalise_url("postgresql://u@h/d?keepalives_idle=7&sslmode=require"))
    assert dict(found.query) == {**VANISHED_HOST, "keepalives_idle": "7", "sslmode": "require"}


@pytest.mark.parametrize("url", ["mysql://h/d", "sqlite://", "sqlite:///:memory:"])
async def test_other_databases_are_refused_with_what_to_use(url: str) -> None:
    with pytest.raises(ValueError, match="use sqlite:"):
        normalise_url(url)


async def test_a_subscription_ends_with_its_block() -> None:
    signals = Signals()
    with signals.subscribe("a", "b") as woken:
        await asyncio.to_thread(signals.publish, "b")
        assert await woken.wait(PATIENCE_S)
        await asyncio.to_thread(signals.publish_all)
        assert await woken.wait(PATIENCE_S)
    signals.publish("a")
    assert signals._subscribers == {}


@pytest.mark.parametrize(
    "value",
    [
        {"a": [1, 2.5, None, True, math.nan, -math.inf, 1e16, 5e-324, -0.0], "é\u2028": "\0😀"},
        [10**400, -(10**30), (1, 2), {1: {1.5: {True: {}}}}, JobState.QUEUED],
        "half of a pair: \ud800",
    ],
)
def test_json_is_read_as_python_reads_it(value: object) -> None:
    stored = json.dumps(value)
    assert repr(from_json(stored)) == repr(json.loads(stored))


def test_half_of_a_surrogate_pair_is_read_as_it_was_stored() -> None:
    for stored in ('"\\ud800"', '{"a": [1, 2.5, null, NaN], "b": "\\u00e9"}'):
        assert repr(from_json(stored)) == repr(json.loads(stored))


def test_a_start_logs_one_line_for_the_schema(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    database = Database(f"sqlite:///{tmp_path}/new.db")
    try:
        with caplog.at_level("INFO", logger="service.db.migrate"):
            for _ in range(2):
                migrate(database)
    finally:
        database.close()
    lines = [each.getMessage() for each in caplog.records if each.name == "service.db.migrate"]
    assert len(lines) == 1
    assert lines[0].startswith("creating the database schema at revision ")
