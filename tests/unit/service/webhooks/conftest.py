from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from service.db.session import Database
from service.storage.storage import Storage
from tests.unit.service.helpers import START
from tests.unit.service.webhooks.hooked import Hooked, set_tokens


@pytest.fixture
def hooked(database: Database, storage: Storage, tmp_path: Path) -> Hooked:
    """Uses the clock of the database, which is this machine's clock."""
    hooked = Hooked(database, storage, tmp_path)
    hooked.now = database.clock()
    return hooked


@pytest.fixture
def timed(sqlite_url: str, storage: Storage, tmp_path: Path) -> Iterator[Hooked]:
    """Uses SQLite, and a clock controlled by the test."""
    yield from _timed(sqlite_url, storage, tmp_path)


@pytest.fixture
def guarded(sqlite_url: str, storage: Storage, tmp_path: Path) -> Iterator[Hooked]:
    """A service with webhooks and a tokens file in which ann is an admin and bob is not."""
    tokens = tmp_path / "tokens"
    set_tokens(tokens, "ann:admin", "bob")
    yield from _timed(sqlite_url, storage, tmp_path, tokens_file=tokens)


def _timed(url: str, storage: Storage, home: Path, **settings: Any) -> Iterator[Hooked]:
    def clock() -> object:
        return hooked.now

    database = Database(url, clock=clock)  # type: ignore[arg-type]
    hooked = Hooked(database, storage, home, **settings)
    hooked.now = START
    yield hooked
    database.close()
