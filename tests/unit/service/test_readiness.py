"""The response of `/readyz` about the database and about nodes that get no work."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import psycopg

from service.cluster.port import ClusterNode, ClusterSnapshot
from service.config.settings import Settings
from service.runtime import READY_LIMIT_S, Runtime, refused_nodes

PATIENCE_S = 30.0


@contextmanager
def stopped(url: str) -> Iterator[None]:
    """Stops the server of this database and its processes with SIGSTOP."""
    with psycopg.connect(url) as connection:
        backend = connection.info.backend_pid
        server = int(Path(f"/proc/{backend}/stat").read_text().rpartition(")")[2].split()[1])
    pids = [server]
    try:
        os.kill(server, signal.SIGSTOP)  # first, so that it does not start others
        pids += map(int, Path(f"/proc/{server}/task/{server}/children").read_text().split())
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        yield
    finally:
        for pid in reversed(pids):
            os.kill(pid, signal.SIGCONT)


async def until_ready(runtime: Runtime) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not (await runtime.ready()).ok:
        assert time.monotonic() < deadline


async def test_a_stopped_database_is_named_in_time_and_answers_again(
    postgres_url: str, tmp_path: Path
) -> None:
    settings = Settings(
        home=tmp_path, database_url=postgres_url, storage_url="", ray_address="10.0.0.1:6379"
    )
    runtime = await Runtime.open(settings, loops=False)
    try:
        await until_ready(runtime)
        with stopped(postgres_url):
            for _ in range(2):
                began = time.monotonic()
                async with asyncio.timeout(PATIENCE_S):
                    found = await runtime.ready()
                assert (found.ok, found.checks["database"]) == (False, "does not answer")
                assert time.monotonic() - began < READY_LIMIT_S + 5.0
        await until_ready(runtime)
    finally:
        await runtime.stop()


def node(name: str, problem: str | None = None) -> ClusterNode:
    return ClusterNode(
        node_id=name,
        hostname=f"{name}.local",
        alive=True,
        resources={},
        available={},
        accepted=problem is None,
        problem=problem,
        full=None,
        quarantined=(),
        gpu_faults=(),
        memory_bytes=None,
        drained_by=None,
        labels={},
        is_starting=False,
        is_released=False,
        is_never_released=False,
    )


def test_only_nodes_that_get_no_work_are_refused_each_with_its_reason() -> None:
    nodes = (node("a"), node("b", "its node agent has not answered"), node("c", "it is drained"))
    snapshot = ClusterSnapshot("s", "head:6379", None, shared=False, nodes=nodes)
    assert refused_nodes(snapshot) == [
        "b.local: its node agent has not answered",
        "c.local: it is drained",
    ]


async def test_a_service_whose_only_node_starts_is_not_ready_yet(tmp_path: Path) -> None:
    settings = Settings(home=tmp_path, storage_url="", ray_address="10.0.0.1:6379")
    runtime = await Runtime.open(settings, loops=False)
    starting = replace(node("a", "its node agent starts"), is_starting=True)
    refused = node("b", "its version differs")
    try:
        for nodes, is_ready in (
            ((starting,), False),
            ((starting, refused), False),
            ((starting, node("c")), True),
            ((refused,), True),
            ((), True),  # an autoscaler could add some
        ):
            snapshot = ClusterSnapshot("s", "head:6379", None, shared=False, nodes=nodes)
            runtime.watch = SimpleNamespace(latest=snapshot, problem=None)  # type: ignore[assignment]
            found = await runtime.ready()
            assert found.ok is is_ready, nodes
            if not is_ready:
                assert f"{nodes[0].hostname}: {nodes[0].problem}" in found.checks["nodes"]
    finally:
        runtime.watch = None
        await runtime.stop()
