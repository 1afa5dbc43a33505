"""A forkserver for tests, and the processes that it forks."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ray_workers.node.forkserver.client import ForkedProcess
from tests.wire import rank_task

ROOT = Path(__file__).resolve().parents[3]
PATIENCE_S = 60.0


class Server:
    """A forkserver held like by its node agent: through the pipe on its standard input."""

    def __init__(self, module: str) -> None:
        # Not pytest's folder: the path of a socket has at most 107 bytes.
        self._directory = tempfile.TemporaryDirectory(prefix="fork")
        self.path = str(Path(self._directory.name, "fork.sock"))
        self.log = Path(self._directory.name, "log")
        self._module = module
        self.process = self._spawn()

    def _spawn(self) -> subprocess.Popen[bytes]:
        with self.log.open("wb") as log:
            return subprocess.Popen(
                [sys.executable, "-m", self._module, self.path],
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            )

    def start_again(self) -> None:
        """Clean up after its end, as its node agent does."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(timeout=PATIENCE_S)
        Path(self.path).unlink(missing_ok=True)
        self.process = self._spawn()

    async def serves(self) -> None:
        def answers() -> bool:
            assert self.process.poll() is None, self.log.read_text()
            return Path(self.path).exists()

        await until(answers, "the forkserver does not serve")

    async def fork(self, code: str, **fields: Any) -> Forked:
        """Run a string of Python as a rank."""
        return await fork(self.path, code, **fields)

    def close_lifeline(self) -> None:
        """Close the lifeline, as the end of the node agent would."""
        assert self.process.stdin is not None
        self.process.stdin.close()

    def close(self) -> None:
        self.close_lifeline()
        self.process.wait(timeout=PATIENCE_S)
        self._directory.cleanup()


async def fork(socket_path: str, code: str, **fields: Any) -> Forked:
    request = {"op": "rank", "task": json.loads(rank_task(spec={"code": code}, **fields).to_json())}
    return Forked(await ForkedProcess.start(socket_path, request))


class Forked:
    """A forked process and what it has said."""

    def __init__(self, process: ForkedProcess) -> None:
        self.process = process
        self._file = open(process.output, "rb")  # noqa: SIM115

    @property
    def pid(self) -> int:
        return self.process.pid

    async def line(self) -> str:
        return (await asyncio.to_thread(self._file.readline)).decode().strip()

    async def end(self) -> tuple[int | None, str]:
        """Exit code and the rest of the output."""
        text = (await asyncio.to_thread(self._file.read)).decode()
        code = await asyncio.wait_for(self.process.wait(), PATIENCE_S)
        self._file.close()
        return code, text


async def until(probe: Callable[[], bool], why: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not probe():
        assert time.monotonic() < deadline, why
        await asyncio.sleep(0.01)


def is_alive(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return False
    return stat[stat.rindex(b")") + 2 :].split()[0] not in (b"Z", b"X")


@pytest.fixture
def light() -> Iterator[Server]:
    server = Server("tests.unit.workers.light_forkserver")
    yield server
    server.close()


@pytest.fixture
async def server(light: Server) -> Server:
    """One whose ranks run the text in their task."""
    await light.serves()
    return light
