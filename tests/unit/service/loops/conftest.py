"""A complete service on the fake cluster, with each kind of database, and with short pauses."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from service.db import notifications
from service.domain.attempts import retries
from tests.unit.service.loops.world import World


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("USER_BACKOFF_S", "INFRA_BACKOFF_S", "FREE_BACKOFF_S"):
        monkeypatch.setattr(retries, name, 0.02)
    monkeypatch.setattr(notifications, "LISTEN_WAIT_S", 0.05)


@pytest.fixture
async def world(database_url: str, tmp_path: Path) -> AsyncIterator[World]:
    world = World(database_url, tmp_path)
    yield world
    await world.close()


@pytest.fixture
async def postgres_world(postgres_url: str, tmp_path: Path) -> AsyncIterator[World]:
    world = World(postgres_url, tmp_path)
    yield world
    await world.close()
