"""A service without loops, for each kind of database."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from service.db.session import Database
from service.storage.storage import Storage
from tests.unit.service.helpers import Service


@pytest.fixture
def storage(tmp_path: Path) -> Storage:
    return Storage((tmp_path / "storage").as_uri())


@pytest.fixture
def service(database: Database, storage: Storage, tmp_path: Path) -> Service:
    return Service(database, storage, tmp_path)


@pytest.fixture
def sqlite_service(sqlite_url: str, storage: Storage, tmp_path: Path) -> Iterator[Service]:
    """A service that uses SQLite."""
    database = Database(sqlite_url)
    yield Service(database, storage, tmp_path)
    database.close()
