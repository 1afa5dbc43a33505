"""Starting the ranks of a measurement."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Sequence

from benchmarks.machine import ROOT, BenchmarkError, clean_environment


def torchrun(module: str, arguments: Sequence[str], *, num_ranks: int, timeout_s: float) -> None:
    """Run the module as so many ranks to their end. BenchmarkError if they fail."""
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(num_ranks)),
        *("--master-addr", "127.0.0.1", "--master-port", str(_free_port())),
        *("-m", module, *arguments),
    ]
    ended = subprocess.run(
        command,
        cwd=ROOT,
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
    if ended.returncode != 0:
        raise BenchmarkError(
            f"the ranks of {' '.join((module, *arguments))} failed:\n{ended.stderr[-3000:]}"
        )


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
