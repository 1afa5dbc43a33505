"""Databases for tests: each test gets its own, migrated by Alembic, on SQLite and PostgreSQL."""

from __future__ import annotations

import gc
import shutil
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
import pytest
from hypothesis import settings

from service.db.migrate import migrate
from service.db.models import Base
from service.db.repositories.catalog import document_values
from service.db.session import Database
from service.domain.tracking.document_values import defaults
from tests.integration.fixtures import client, embedded, script_path
from tests.marks import FRESH_SEEDS, ONE_SET, RULES, SOAK
from tests.postgres import new_postgres

settings.register_profile(
    "dray",
    deadline=None,  # a busy machine must not fail a test
    derandomize=not FRESH_SEEDS,
    print_blob=True,
)
settings.load_profile("dray")

__all__ = ["client", "embedded", "script_path"]


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Exclude everything that was imported and collected from garbage collection: it lives until
    the end, and each full collection would spend half a second on it. Collect the rest less often
    than by default, which saves 5% of the time."""
    gc.set_threshold(5_000, 10, 10)
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave tests of rules on PostgreSQL, and further parameters of costly tests, to `make
    soak`."""
    tried = set()
    for item in items:
        is_rule = item.get_closest_marker(RULES.name) and "[postgresql" in item.name
        test = item.nodeid.partition("[")[0]
        if is_rule or (item.get_closest_marker(ONE_SET.name) and test in tried):
            item.add_marker(SOAK)
        elif not item.get_closest_marker(SOAK.name):
            tried.add(test)


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


def _migrated(url: str) -> None:
    database = Database(url)
    try:
        migrate(database)
        # As the service does on startup.
        database.write_sync(lambda s: document_values.insert_shared(s, defaults()))
    finally:
        database.close()


@pytest.fixture(scope="session")
def _postgres() -> Iterator[str]:
    """URL of a migrated database on this session's PostgreSQL server."""
    server = new_postgres()
    try:
        with psycopg.connect(server.get_uri(), autocommit=True) as connection:
            for setting in ("fsync", "synchronous_commit", "full_page_writes"):
                connection.execute(
                    f"ALTER SYSTEM SET {setting} = off"
                )  # the data is never needed after a crash
            connection.execute("SELECT pg_reload_conf()")
        _migrated(server.get_uri())
        yield server.get_uri()
    finally:
        server.cleanup()


@pytest.fixture
def postgres_url(_postgres: str) -> Iterator[str]:
    """URL of an empty, migrated PostgreSQL database for this test alone."""
    with _emptied_afterwards(_postgres):
        yield _postgres


@pytest.fixture(scope="module")
def module_postgres_url(_postgres: str) -> Iterator[str]:
    """URL of a PostgreSQL database that all tests of a module share, empty and migrated."""
    with _emptied_afterwards(_postgres):
        yield _postgres


@contextmanager
def _emptied_afterwards(url: str) -> Iterator[None]:
    """Empty the database, because creating a new one takes a hundred times as long. Truncate only
    tables with rows, because truncating all of them takes three times as long as finding these."""
    yield
    with_rows = " UNION ALL ".join(
        f"SELECT '{name}' WHERE EXISTS (SELECT FROM {name})" for name in Base.metadata.tables
    )
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
            "WHERE datname = current_database() AND pid <> pg_backend_pid()"
        )
        tables = {name for (name,) in connection.execute(with_rows).fetchall()}
        if emptied := tables - {"document_values"}:
            connection.execute(f"TRUNCATE {', '.join(emptied)} CASCADE")
            connection.execute(
                "INSERT INTO queues (name) VALUES ('default')"
            )  # as the migrations do
        connection.execute("DELETE FROM document_values WHERE holder NOT LIKE 'defaults-%'")
        connection.execute(
            "SELECT setval(format('%I.%I', schemaname, sequencename)::regclass, start_value, false)"
            " FROM pg_sequences WHERE last_value IS NOT NULL"
        )


@pytest.fixture(scope="session")
def _sqlite_template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sqlite") / "template.db"
    _migrated(f"sqlite:///{path}")
    return path


@pytest.fixture
def sqlite_url(_sqlite_template: Path, tmp_path: Path) -> str:
    """URL of an empty, migrated SQLite file for this test alone."""
    path = tmp_path / "dray.db"
    shutil.copyfile(_sqlite_template, path)
    return f"sqlite:///{path}"


@pytest.fixture(params=["sqlite", "postgresql"])
def database_url(request: pytest.FixtureRequest) -> str:
    fixture = "sqlite_url" if request.param == "sqlite" else "postgres_url"
    url: str = request.getfixturevalue(fixture)
    return url


@pytest.fixture
def database(database_url: str) -> Iterator[Database]:
    database = Database(database_url)
    yield database
    database.close()
