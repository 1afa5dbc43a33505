from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from service.db.session import Database
from service.storage.storage import Storage
from tests.unit.service.helpers import START
from tests.unit.service.webhooks.hooked import Hooked


@pytest.fixture
def hooked(database: Database, storage: Storage, tmp_path: Path) -> Hooked:
    """On the clock of the database, which is that of this machine."""
    hooked = Hooked(database, storage, tmp_path)
    hooked.now = database.clock()
    return hooked


@pytest.fixture
def timed(sqlite_url: str, storage: Storage, tmp_path: Path) -> Iterator[Hooked]:
    """On SQLite, on a clock that the test moves."""
    now = START

    def clock() -> object:
        return hooked.now

    database = Database(sqlite_url, clock=clock)  # type: ignore[arg-type]
    hooked = Hooked(database, storage, tmp_path)
    hooked.now = now
    yield hooked
    database.close()
