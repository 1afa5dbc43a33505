"""Ray Train as a contender: a driver on a Ray cluster of its own, both of which run beforehand.

The driver reads a folder per line from standard input, trains once, and answers with a line of
JSON: when `fit()` was called, in Unix seconds, and how it ended if not well. Everything that Ray
prints goes to standard error.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.machine import BenchmarkError, clean_environment
from benchmarks.processes import STOP_TIMEOUT_S, running

NUM_CPUS = 4
"""The ranks take two; Ray Train's own actors and the raylet's idle workers are not short."""


class Driver:
    """The driver, as the measurement sees it."""

    def __init__(self, process: subprocess.Popen[str], log: Path) -> None:
        self._process = process
        self._log = log

    def begin(self, folder: Path) -> None:
        """Start the training; the ranks write their results into the folder."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{folder}\n")
        self._process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        """Wait until the training is over; BenchmarkError if it failed."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise BenchmarkError(f"Ray Train's driver ended:\n{self._log.read_text()[-3000:]}")
        answer: dict[str, Any] = json.loads(line)
        if answer.get("error"):
            raise BenchmarkError(f"Ray Train failed: {answer['error']}")
        return answer


@contextlib.contextmanager
def driver(module: str, home: Path) -> Iterator[Driver]:
    """Start the module, which calls `serve`; cluster and driver end with its standard input."""
    log = home / "driver.log"
    command = [sys.executable, "-m", module, str(home)]
    with running(command, clean_environment(), log, pipes=True) as process:
        started = Driver(process, log)
        started.answer()
        yield started
        assert process.stdin is not None
        process.stdin.close()
        process.wait(STOP_TIMEOUT_S)


def serve(home: Path, trainer_of: Callable[[Path, str], Any]) -> None:
    """The driver's side. `trainer_of` makes a trainer for a folder, with a name of its own."""
    import ray

    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    ray.init(num_cpus=NUM_CPUS, include_dashboard=False, _temp_dir=str(home / "ray"))
    answers.write("{}\n")
    for number, line in enumerate(sys.stdin):
        trainer = trainer_of(Path(line.strip()), f"run-{number}")
        called, error = time.time(), ""
        try:
            trainer.fit()
        except Exception as failed:
            error = f"{type(failed).__name__}: {failed}"
        answers.write(json.dumps({"called": called, "error": error}) + "\n")
    ray.shutdown()
