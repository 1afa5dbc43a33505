"""The node agent: one detached actor per node, which keeps the node ready and its spools.

It holds the forkserver with torch imported, so that a rank starts in milliseconds, and answers
for the spool files of the node's ranks, also after those ranks and their supervisor are dead.
"""

from __future__ import annotations

import asyncio
import os
import platform
import socket
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import ray

import dray
from ray_workers import spool
from ray_workers.contracts import Frame, FrameKind
from ray_workers.forking import ForkFailed, list_tasks
from ray_workers.paths import runtime_dir, socket_path, spool_dir
from ray_workers.spool import SpoolRead

CODE_ROOT = Path(__file__).resolve().parent.parent
POLL_S = 0.05
"""Pause between two looks at the spools while a reader waits; a look is a few stat calls."""


@dataclass(frozen=True)
class NodeReport:
    """What a node says of itself when it joins."""

    node_id: str
    hostname: str
    address: str
    version: str
    python: str
    storage_nonce: str | None
    """What this node reads in the storage's nonce file; None if it can't be read."""
    problem: str | None
    """Why ranks can't be started here, such as a failed import of torch."""


def own_address() -> str:
    """This node's address, as other nodes reach it."""
    address: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
    return address


@ray.remote(num_cpus=0, max_restarts=-1)
class NodeAgent:
    """See the module's docstring. Methods run concurrently on one event loop."""

    def __init__(self, deployment_id: str) -> None:
        self._deployment_id = deployment_id
        self._node_id: str = ray.get_runtime_context().get_node_id()
        self._directory = runtime_dir(deployment_id, self._node_id)
        self._directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._socket_path = socket_path(deployment_id, self._node_id)
        self._log_path = self._directory / "forkserver.log"
        self._forkserver = self._start_forkserver()

    def _start_forkserver(self) -> subprocess.Popen[bytes]:
        Path(self._socket_path).unlink(missing_ok=True)
        environment = dict(os.environ)
        environment.setdefault("OMP_NUM_THREADS", "1")
        environment["PYTHONPATH"] = os.pathsep.join(
            [str(CODE_ROOT), *filter(None, [environment.get("PYTHONPATH")])]
        )
        with self._log_path.open("wb") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "ray_workers.forkserver", self._socket_path],
                stdin=subprocess.PIPE,  # its lifeline: closes when this actor's process ends
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )

    async def describe(self, nonce_path: Path | None) -> NodeReport:
        """Answer once the forkserver serves, or say why it does not."""
        problem = await self._wait_for_forkserver()
        return NodeReport(
            node_id=self._node_id,
            hostname=socket.gethostname(),
            address=own_address(),
            version=dray.__version__,
            python=platform.python_version(),
            storage_nonce=_read_text(nonce_path) if nonce_path else None,
            problem=problem,
        )

    async def _wait_for_forkserver(self) -> str | None:
        while True:
            code = self._forkserver.poll()
            if code is not None:
                tail = self._log_path.read_text(errors="replace")[-2000:]
                self._forkserver = self._start_forkserver()
                return f"its forkserver ended with code {code}: {tail.strip().splitlines()[-1:]}"
            try:
                await list_tasks(self._socket_path)
            except ForkFailed:
                await asyncio.sleep(POLL_S)
            else:
                return None

    async def running(self, job_id: str, attempt: int) -> int:
        """How many processes of an attempt still run here."""
        try:
            tasks = await list_tasks(self._socket_path)
        except ForkFailed:
            return 0  # its end took every process along
        return sum(task["job_id"] == job_id and task["attempt"] == attempt for task in tasks)

    async def read(
        self,
        job_id: str,
        attempt: int,
        cursor: Mapping[str, int],
        max_bytes: int,
        wait_s: float,
    ) -> SpoolRead:
        """New frames of each spool of an attempt; waits up to `wait_s` for the first.

        What lies before `cursor` was stored by the service, and is deleted here.
        """
        directory = spool_dir(self._deployment_id, self._node_id, job_id, attempt)
        deadline = asyncio.get_running_loop().time() + wait_s
        while True:
            keys = _spool_keys(directory)
            if any(spool.has_more(directory / key, cursor.get(key, 0)) for key in keys):
                break
            if asyncio.get_running_loop().time() >= deadline:
                break
            await asyncio.sleep(POLL_S)
        return spool.read_all(directory, keys, cursor, max_bytes)

    async def errors(self, job_id: str, attempt: int) -> list[Frame]:
        """The ERROR frames that the ranks of an attempt left here as their last words."""
        directory = spool_dir(self._deployment_id, self._node_id, job_id, attempt)
        return [
            frame
            for key in _spool_keys(directory)
            for frame in spool.decode(key, spool.tail(directory / key))
            if frame.kind is FrameKind.ERROR
        ]

    async def drop(self, job_id: str, attempt: int) -> None:
        """Delete an attempt's spools: everything in them was stored."""
        spool.remove(spool_dir(self._deployment_id, self._node_id, job_id, attempt))

    async def spooled(self) -> list[tuple[str, int]]:
        """(job, attempt) of the spools on this node."""
        root = self._directory / "spool"
        return [(path.parent.name, int(path.name)) for path in root.glob("*/*")]


def _spool_keys(directory: Path) -> list[str]:
    try:
        return sorted((path.name for path in directory.iterdir()), key=spool.parse_key)
    except FileNotFoundError:
        return []


def _read_text(path: Path) -> str | None:
    try:
        return path.read_text()
    except OSError:
        return None
