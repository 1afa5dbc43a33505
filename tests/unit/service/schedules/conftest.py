from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from service.db.session import Database
from service.storage.storage import Storage
from tests.unit.service.schedules.scheduled import Scheduled


@pytest.fixture
def scheduled(database: Database, storage: Storage, tmp_path: Path) -> Scheduled:
    return Scheduled(database, storage, tmp_path)


@pytest.fixture
def on_sqlite(sqlite_url: str, storage: Storage, tmp_path: Path) -> Iterator[Scheduled]:
    database = Database(sqlite_url)
    yield Scheduled(database, storage, tmp_path)
    database.close()
