"""The contenders. Each is started once, and each turn starts a job and waits for its end.

A turn raises BenchmarkError if the job does not train.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.first_step.work import NUM_RANKS, PLAIN_SCRIPT, recipe_job, script_job
from benchmarks.machine import BenchmarkError, clean_environment
from benchmarks.processes import running, service, torchrun_command
from benchmarks.ray_train import Driver, driver
from dray import Client
from dray.views import Job, JobState

TURN_TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Turn:
    """One start of a job. Times are in seconds since the submission, on this machine's clock."""

    first_step_s: float
    """End of the first optimizer step, on the clock of the first rank that completed it."""
    marks: Mapping[str, float]
    """Milestones in chronological order."""


class Dray:
    """A running service with its embedded Ray, and the ways of submitting to it."""

    def __init__(self, home: Path, client: Client) -> None:
        self._home = home
        self._client = client

    def recipe(self) -> Turn:
        """Run the recipe. Its first step is the one reported by the API, on the worker's clock."""
        asked, job, seen = self._run(recipe_job())
        if job.first_step_at is None:
            raise BenchmarkError(f"job {job.id} has trained, but has no first_step_at")
        claimed = next(e.time for e in self._client.events(job.id) if e.code == "claimed")
        moments = {
            "job row written": job.created_at,
            "claimed": claimed,
            "slots given": self._client.attempts(job.id)[0].started_at,
            "first step": job.first_step_at,
        }
        marks = {k: at.timestamp() - asked for k, at in moments.items() if at is not None}
        return Turn(marks["first step"], marks | {"a client sees it": seen - asked})

    def script(self) -> Turn:
        """Run the same script as torchrun."""
        folder = Path(tempfile.mkdtemp(dir=self._home))
        asked, job, _ = self._run(script_job(folder))
        slots = self._client.attempts(job.id)[0].started_at
        given = {"slots given": slots.timestamp() - asked} if slots is not None else {}
        turn = _read_marks(folder, asked)
        return Turn(turn.first_step_s, given | dict(turn.marks))

    def _run(self, document: Mapping[str, Any]) -> tuple[float, Job, float]:
        """Return (when it was posted, the finished job, when a waiting client learned that it is
        training)."""
        asked = time.time()
        job = self._client.submit(document)
        stops = [state for state in JobState if state.is_terminal]
        self._client.wait(job.id, TURN_TIMEOUT_S, [JobState.RUNNING, *stops])
        seen = time.time()
        job = self._client.wait(job.id, TURN_TIMEOUT_S)
        if job.state is not JobState.SUCCEEDED:
            raise BenchmarkError(f"dray's job ended {job.state}: {job.reason.message}")
        return asked, job, seen


@contextlib.contextmanager
def dray(home: Path) -> Iterator[Dray]:
    """Run a service with an embedded Ray with two slots."""
    with service(home, num_slots=NUM_RANKS) as client:
        yield Dray(home, client)


class RayTrain:
    """A driver on a separate Ray cluster, both of which are running before the first turn."""

    def __init__(self, home: Path, driver: Driver) -> None:
        self._home = home
        self._driver = driver

    def turn(self) -> Turn:
        folder = Path(tempfile.mkdtemp(dir=self._home))
        self._driver.begin(folder)
        return _read_marks(folder, float(self._driver.answer()["called"]))


@contextlib.contextmanager
def ray_train(home: Path) -> Iterator[RayTrain]:
    """Start the driver and its cluster, and stop both afterwards."""
    with driver("benchmarks.first_step.ray_train_driver", home) as started:
        yield RayTrain(home, started)


class Torchrun:
    """A cold `torchrun --nproc-per-node 2`, with a fixed free port, so that it does not have to
    find one."""

    def __init__(self, home: Path) -> None:
        self._home = home

    def turn(self) -> Turn:
        folder = Path(tempfile.mkdtemp(dir=self._home))
        command = torchrun_command(PLAIN_SCRIPT, str(folder), num_ranks=NUM_RANKS)
        log = self._home / "torchrun.log"
        asked = time.time()
        with running(command, clean_environment(), log) as process:
            if process.wait(TURN_TIMEOUT_S) != 0:
                raise BenchmarkError(f"torchrun failed:\n{log.read_text()[-2000:]}")
        return _read_marks(folder, asked)


def _read_marks(folder: Path, asked: float) -> Turn:
    """Return the times that the ranks of the plain script wrote. For each milestone, the earliest
    rank counts, which is the most favourable choice for a peer."""
    ranks = [json.loads(path.read_text()) for path in folder.iterdir()]
    if len(ranks) != NUM_RANKS:
        raise BenchmarkError(
            f"only {len(ranks)} of {NUM_RANKS} ranks wrote their times to {folder}"
        )
    names = {
        "entered": "training code begins",
        "imported": "torch imported",
        "joined": "group formed",
        "loaded": "data loaded",
        "built": "model built",
        "first_step": "first step",
    }
    marks = {shown: min(rank[name] for rank in ranks) - asked for name, shown in names.items()}
    return Turn(marks["first step"], marks)
