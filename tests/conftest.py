"""Databases for tests: each test gets its own, migrated by Alembic, on SQLite and PostgreSQL."""

from __future__ import annotations

import gc
from collections.abc import Generator, Iterator
from pathlib import Path

import psycopg
import pytest
from hypothesis import settings

from service.db.session import Database
from tests.databases import (
    PostgresCleaner,
    migrate_as_at_start,
    migrated_sqlite,
    share_compiled_statements,
)
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
share_compiled_statements()

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
        migrate_as_at_start(server.get_uri())
        yield server.get_uri()
    finally:
        server.cleanup()


@pytest.fixture(scope="session")
def _cleaner(_postgres: str) -> Iterator[PostgresCleaner]:
    cleaner = PostgresCleaner(_postgres)
    yield cleaner
    cleaner.close()


@pytest.fixture
def postgres_url(_postgres: str, _cleaner: PostgresCleaner) -> Iterator[str]:
    """URL of an empty, migrated PostgreSQL database for this test alone."""
    yield _postgres
    _cleaner.empty()


@pytest.fixture(scope="module")
def module_postgres_url(_postgres: str, _cleaner: PostgresCleaner) -> Iterator[str]:
    """URL of a PostgreSQL database that all tests of a module share, empty and migrated."""
    yield _postgres
    _cleaner.empty()


@pytest.fixture
def sqlite_url(tmp_path: Path) -> str:
    """URL of an empty, migrated SQLite file for this test alone."""
    path = tmp_path / "dray.db"
    path.write_bytes(migrated_sqlite())
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
