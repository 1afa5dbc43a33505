"""Start the ranks of a measurement."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.machine import ROOT, BenchmarkError, clean_environment
from benchmarks.processes import torchrun_command


def torchrun(module: str, arguments: Sequence[str], *, num_ranks: int, timeout_s: float) -> None:
    """Run the module as `num_ranks` ranks and wait for them. Raises BenchmarkError if they fail."""
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


def train(
    document: Mapping[str, Any],
    home: Path,
    *,
    num_ranks: int,
    timeout_s: float,
) -> None:
    """Train a recipe job to its end, with dray's loop and without its service.

    Writes its spools and artifacts to `home`. Raises BenchmarkError if training fails.
    """
    job = home / "job.json"
    job.write_text(json.dumps(document))
    torchrun("benchmarks.job_rank", [str(job), str(home)], num_ranks=num_ranks, timeout_s=timeout_s)
