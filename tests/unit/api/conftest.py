"""One server for all tests in this folder. Each test creates its own jobs."""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from api import __main__ as program
from service.cluster.port import ClusterSnapshot
from service.nodes import node_table
from tests.unit.api.matrix import TOKEN, held
from tests.unit.api.serving import LiveServer, Refused, serving
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
    """A server with tokens that has recorded its cluster: one node with 4 CPUs."""
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
    """Check that the test left no rows or files behind."""
    before = held(site)
    yield
    assert held(site) == before


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Refused:
    """Start the server in this process, without changing the process, and return why it can't
    start."""
    for name in [name for name in os.environ if name.startswith("DRAY_")]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(sys, "argv", ["api", "--no-loops"])
    monkeypatch.setattr(program, "write_privately", lambda: None)
    monkeypatch.setattr(program, "raise_descriptor_limit", lambda: None)
    monkeypatch.setattr(program.logging_setup, "configure", lambda _: None)

    def start(home: Path, **environment: str) -> str:
        for name, value in {"DRAY_HOME": str(home), "DRAY_PORT": "0", **environment}.items():
            monkeypatch.setenv(name, value)
        assert program.main() == 1
        return capsys.readouterr().err

    return start
