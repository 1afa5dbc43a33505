"""Starting the processes of a measurement, including a service."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from benchmarks.machine import ROOT, BenchmarkError, clean_environment
from dray import Client

START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 60.0
CHECK_S = 0.1


@contextlib.contextmanager
def running(
    command: Sequence[str], environment: Mapping[str, str], log_path: Path, *, pipes: bool = False
) -> Iterator[subprocess.Popen[str]]:
    """Run a command in a separate session. Processes that remain at the end are killed."""
    pipe = subprocess.PIPE if pipes else None
    with log_path.open("a") as log:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=dict(environment),
            stdin=pipe or subprocess.DEVNULL,
            stdout=pipe or log,
            stderr=log,
            text=True,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@contextlib.contextmanager
def service(
    home: Path, *, num_slots: int, environment: Mapping[str, str] = MappingProxyType({})
) -> Iterator[Client]:
    """Start `python -m api` with an embedded Ray with `num_slots` slots, and stop it afterwards.

    environment: additional variables.
    """
    port = free_port()
    whole = {
        **clean_environment(),
        "DRAY_HOME": str(home),
        "DRAY_PORT": str(port),
        "DRAY_LOCAL_SLOTS": str(num_slots),
        **environment,
    }
    command, log = [sys.executable, "-m", "api"], home / "service.log"
    with (
        running(command, whole, log) as process,
        Client(f"http://127.0.0.1:{port}") as client,
    ):
        _wait_until_it_takes_jobs(client, process, log)
        yield client


def torchrun_command(*arguments: str, num_ranks: int) -> list[str]:
    """Return a torchrun command for this machine, with a fixed free port, so that it does not have
    to find one."""
    return [
        *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(num_ranks)),
        *("--master-addr", "127.0.0.1", "--master-port", str(free_port())),
        *arguments,
    ]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _wait_until_it_takes_jobs(client: Client, process: subprocess.Popen[str], log: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(Exception):  # not listening yet
            if any(node.accepted for node in client.cluster().nodes):
                return
        time.sleep(CHECK_S)
    raise BenchmarkError(f"the service does not accept jobs:\n{log.read_text()[-3000:]}")
