"""Ray Train as a contender: a driver on a separate Ray cluster, both of which are already running.

For each line of standard input, a JSON list of a folder and further arguments, the driver trains
once and writes a line of JSON: when `fit()` was called, in Unix seconds, and the error if it
failed. Everything that Ray prints goes to standard error.
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
"""The ranks use two CPUs, which leaves enough for Ray Train's own actors and the raylet's idle
workers."""


class Driver:
    """The measurement's side of the driver."""

    def __init__(self, process: subprocess.Popen[str], log: Path) -> None:
        self._process = process
        self._log = log

    def begin(self, folder: Path, *more: str) -> None:
        """Start training. The ranks write their results to the folder. more: further arguments of
        the driver's `trainer_of`."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([str(folder), *more]) + "\n")
        self._process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        """Wait until training has ended. Raises BenchmarkError if it failed."""
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
    """Start the module, which calls `serve`. The cluster and the driver end when its standard input
    is closed."""
    log = home / "driver.log"
    command = [sys.executable, "-m", module, str(home)]
    with running(command, clean_environment(), log, pipes=True) as process:
        started = Driver(process, log)
        started.answer()
        yield started
        assert process.stdin is not None
        process.stdin.close()
        process.wait(STOP_TIMEOUT_S)


def serve(home: Path, trainer_of: Callable[..., Any]) -> None:
    """Run the driver's side. trainer_of: creates a trainer for a folder, with the given unique
    name, and with the further arguments given to `Driver.begin`."""
    import ray

    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    ray.init(num_cpus=NUM_CPUS, include_dashboard=False, _temp_dir=str(home / "ray"))
    answers.write("{}\n")
    for number, line in enumerate(sys.stdin):
        folder, *more = json.loads(line)
        trainer = trainer_of(Path(folder), f"run-{number}", *more)
        called, error = time.time(), ""
        try:
            trainer.fit()
        except Exception as failed:
            error = f"{type(failed).__name__}: {failed}"
        answers.write(json.dumps({"called": called, "error": error}) + "\n")
    ray.shutdown()
