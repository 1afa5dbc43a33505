"""`dray cluster` shows withheld nodes, and `dray cluster release` releases them."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from service.cluster.port import ClusterSnapshot
from service.lifecycle.withholding import withhold
from service.nodes import node_table
from tests.unit.api.serving import LiveServer, serving
from tests.unit.cli.running import Cli
from tests.wire import cluster_node

AT = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)


@pytest.fixture
def cli(server: LiveServer, capsys: pytest.CaptureFixture[str]) -> Cli:
    return Cli(server.url, capsys)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[LiveServer]:
    """A server whose cluster has nodes, unlike that of the other tests."""
    with serving(tmp_path) as server:
        yield server


def test_a_withheld_node_is_shown_and_released(cli: Cli, server: LiveServer) -> None:
    host = "gpu-7.lan"
    node = cluster_node("node-a", {"CPU": 8.0, "GPU": 4.0}, hostname=host)
    snapshot = ClusterSnapshot("session-1", "ray://x", None, False, (node,))
    server.hands.database.write_sync(lambda s: node_table.store(s, snapshot, None, AT))
    reason = "GPU 3: Xid 79: the GPU has fallen off the bus"
    server.hands.database.write_sync(lambda s: withhold(s, host, reason, code="xid_79", now=AT))
    line = f"{host}: no new work since 2026-01-02 03:04:05 UTC: {reason}"
    assert line in cli("cluster").splitlines()
    (shown,) = cli.json("cluster")["nodes"][0]["withheld"]
    assert (shown["code"], shown["gpu"], shown["reason"]) == ("xid_79", None, reason)
    assert cli("cluster", "release", host) == f"{host}: released: {reason}\n"
    assert line not in cli("cluster")
    cli("cluster", "release", host, exits=3)
    assert "no slots of" in cli.err
    assert "dray cluster" in cli.err
    cli("cluster", "release", "knöten ä", exits=3)
