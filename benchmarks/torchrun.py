"""Starting the ranks of a measurement."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence

from benchmarks.machine import ROOT, BenchmarkError, clean_environment
from benchmarks.processes import torchrun_command


def torchrun(module: str, arguments: Sequence[str], *, num_ranks: int, timeout_s: float) -> None:
    """Run the module as so many ranks to their end. BenchmarkError if they fail."""
    command = torchrun_command("-m", module, *arguments, num_ranks=num_ranks)
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
