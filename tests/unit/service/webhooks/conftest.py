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
    """On the clock of the database, which is that of this machine."""
    hooked = Hooked(database, storage, tmp_path)
    hooked.now = database.clock()
    return hooked


@pytest.fixture
def timed(sqlite_url: str, storage: Storage, tmp_path: Path) -> Iterator[Hooked]:
    """On SQLite, on a clock that the test moves."""
    yield from _timed(sqlite_url, storage, tmp_path)


@pytest.fixture
def guarded(sqlite_url: str, storage: Storage, tmp_path: Path) -> Iterator[Hooked]:
    """A service with webhooks and a file of tokens: ann is an admin, bob is none."""
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
