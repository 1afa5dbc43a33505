"""`dray cluster` shows withheld nodes and self-tests, which other commands release and request."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest
from sqlalchemy.orm import Session

from ray_workers.shared.self_tests import DeviceOutcome, NodeTest, TestedDevice, TestPhase
from service.cluster.port import ClusterSnapshot
from service.db.repositories.scheduling import node_checks as repository
from service.lifecycle import node_checks
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


ODD = "rack 1/gpu-7%2F?#ö//check"
"""A host name that has a meaning in URLs unless it is quoted."""


def see(server: LiveServer, *hostnames: str) -> None:
    nodes = (cluster_node(f"node-{name}", {"GPU": 4.0}, hostname=name) for name in hostnames)
    snapshot = ClusterSnapshot("session-1", "ray://x", None, False, tuple(nodes))
    server.hands.database.write_sync(lambda s: node_table.store(s, snapshot, None, AT))


@contextlib.contextmanager
def answering(server: LiveServer, test: NodeTest) -> Iterator[None]:
    """Store this result for every test that is requested."""
    database, is_over = server.hands.database, threading.Event()

    def settle(session: Session) -> None:
        for row in repository.in_states(session, node_checks.OPEN):
            node_checks.settle(session, row.hostname, row.id, test, AT)

    def answer() -> None:
        while not is_over.wait(0.02):
            database.write_sync(settle)

    thread = threading.Thread(target=answer, daemon=True)
    thread.start()
    yield
    is_over.set()
    thread.join()


def result_of(outcome: DeviceOutcome, reason: str = "") -> NodeTest:
    values = {"product_s": 0.00312}
    device = TestedDevice("GPU-1", 3, "H100", outcome, reason, values)
    return NodeTest(TestPhase.DONE, (device,))


def test_a_node_with_an_odd_name_is_tested_withheld_and_released(
    cli: Cli, server: LiveServer
) -> None:
    see(server, ODD, "gpu-8")
    assert cli("cluster", "check", ODD, "--wait", "0") == (
        f"{ODD}: the self-test waits: anonymous asked for it\n"
    )
    line = f"{ODD}: the self-test waits: anonymous asked for it"
    assert line in cli("cluster").splitlines()
    with answering(server, result_of(DeviceOutcome.FAILED, "a word differed")):
        out = cli("cluster", "check", ODD, "--wait", "60", exits=1)
    assert out.splitlines() == [
        f"{ODD}: GPU 3 failed the self-test: a word differed; the node gets no new work until an "
        "admin releases it (2026-01-02 03:04:05 UTC)",
        f"{ODD}: GPU 3: product_s 0.00312",
    ]
    assert f"{ODD}: no new work since" in cli("cluster")
    released = f"{ODD}: released: GPU 3 failed the self-test: a word differed\n"
    assert cli("cluster", "release", ODD) == released
    cli("cluster", "check", "gpu-9", exits=3)
    assert "there is no node named 'gpu-9'" in cli.err
    cli("cluster", "check", ODD, "--wait", "nan", exits=2)


def test_all_nodes_are_tested_by_default(cli: Cli, server: LiveServer) -> None:
    see(server, "gpu-1", "gpu-2")
    with answering(server, result_of(DeviceOutcome.PASSED)):
        found = cli.json("cluster", "check")
    assert [(one["hostname"], one["outcome"]) for one in found] == [
        ("gpu-1", "passed"),
        ("gpu-2", "passed"),
    ]
