"""One server for all tests of this folder; each test makes jobs of its own."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import httpx
import pytest

from service.cluster.port import ClusterSnapshot
from service.nodes import node_table
from tests.unit.api.matrix import TOKEN, held
from tests.unit.api.serving import LiveServer, serving
from tests.wire import cluster_node


@pytest.fixture(scope="package")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with serving(tmp_path_factory.mktemp("home")) as server:
        yield server


@pytest.fixture
def http(server: LiveServer) -> Iterator[httpx.Client]:
    with server.client() as client:
        yield client


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """A server with tokens that has seen its cluster: one node with 4 CPUs."""
    home = tmp_path_factory.mktemp("site")
    (home / "tokens").write_text(f"ann:{hashlib.sha256(TOKEN.encode()).hexdigest()}\n")
    with serving(home / "home", tokens_file=home / "tokens") as site:
        node = cluster_node("node-a", {"CPU": 4.0})
        seen = ClusterSnapshot("session-1", "ray://x", "http://dash", False, (node,))
        hands = site.hands
        hands.database.write_sync(lambda session: node_table.store(session, seen, None, hands.now))
        yield site


@pytest.fixture
def ann(site: LiveServer) -> Iterator[httpx.Client]:
    headers = {"Authorization": f"Bearer {TOKEN}"}
    with site.client(headers=headers) as client:
        yield client


@pytest.fixture
def unchanged(site: LiveServer) -> Iterator[None]:
    """What the test did left no row and no file."""
    before = held(site)
    yield
    assert held(site) == before
