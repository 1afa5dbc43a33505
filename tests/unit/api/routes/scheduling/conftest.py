"""A server that an admin and a user call with their tokens."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import httpx
import pytest

from tests.unit.api.matrix import TOKEN
from tests.unit.api.serving import LiveServer, serving


def hashed(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()


def as_(name: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {name}"}


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """A server with an admin, root, and a user, ann."""
    folder = tmp_path_factory.mktemp("queues")
    (folder / "tokens").write_text(f"root:{hashed('root')}:admin\nann:{hashed(TOKEN)}\n")
    with serving(folder / "home", tokens_file=folder / "tokens") as server:
        yield server


@pytest.fixture
def root(guarded: LiveServer) -> Iterator[httpx.Client]:
    with guarded.client(headers=as_("root")) as client:
        yield client


@pytest.fixture
def user(guarded: LiveServer) -> Iterator[httpx.Client]:
    with guarded.client(headers=as_(TOKEN)) as client:
        yield client
