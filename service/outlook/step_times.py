"""Run times of earlier jobs, and step times of elastic jobs at each size."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from functools import cached_property
from typing import Any, NamedTuple

from sqlalchemy import Row
from sqlalchemy.orm import Session

from service.db.repositories import jobs as repository
from service.domain.scheduling.elastic.sizing import ElasticJob, ReportedStep

MAX_JOBS = 500
"""Maximum number of jobs to read, newest first."""
FRESH_FOR = timedelta(seconds=30)
"""Maximum age of the cached runs. A single additional run changes little."""
MAX_RUNS = 2000
"""Maximum number of runs to read, newest first."""


def elastic_jobs(session: Session) -> dict[str, ElasticJob]:
    """Return the unfinished elastic jobs that can save their state, keyed by id.

    Similar jobs of one owner share their reports: if a job has not yet run at a size, the reports
    of the other jobs at this size are used.
    """
    rows = repository.step_times(session, MAX_JOBS)
    of_kind: defaultdict[tuple[str, str], dict[tuple[int, ...], ReportedStep]] = defaultdict(dict)
    for row in reversed(rows):
        of_kind[row.owner, row.step_times["alike"]] |= _times(row)
    return {
        row.id: _elastic(row, of_kind[row.owner, row.step_times["alike"]] | _times(row))
        for row in rows
        if not row.state.is_terminal and row.yields and row.min_workers is not None
    }


def _times(row: Row[Any]) -> dict[tuple[int, ...], ReportedStep]:
    return {
        (workers, nodes, size): ReportedStep(workers, nodes, size, seconds)
        for workers, nodes, size, seconds in row.step_times["times"]
    }


def _elastic(row: Row[Any], times: dict[tuple[int, ...], ReportedStep]) -> ElasticJob:
    progress, known = row.progress or {}, row.step_times
    total, batch_size = progress.get("total_steps"), known["batch_size"]
    batch_range = known.get("batch_range")
    # If the job has a batch range, its progress is measured in steps of the smallest batch size.
    at_once = 1 if batch_range is None else batch_size / batch_range[0]
    return ElasticJob(
        least=row.min_workers,
        most=row.num_workers,
        batch_size=batch_size,
        micro_batch_size=known["micro_batch_size"],
        num_parts=row.num_parts,
        step_times=tuple(times.values()),
        in_place=True,
        steps_left=None if total is None else max(0, total - progress.get("step", 0)) / at_once,
        batch_range=None if batch_range is None else tuple(batch_range),
        noise_scale=known.get("noise_scale"),
    )


class Kind(NamedTuple):
    """The kind of a job. Jobs of the same kind have similar run times."""

    owner: str
    name: str
    num_workers: int


class RunTimes(dict[Kind, Sequence[float]]):
    """Run times, in seconds, of the successful jobs of each kind, newest last."""

    @cached_property
    def of_owners(self) -> Mapping[str, Sequence[float]]:
        """The run times of each owner's jobs, in seconds."""
        found: defaultdict[str, list[float]] = defaultdict(list)
        for kind, times in self.items():
            found[kind.owner] += times
        return found


class EarlierRuns:
    """Caches the run times of earlier jobs for `FRESH_FOR`."""

    def __init__(self) -> None:
        self._read_at: datetime | None = None
        self._runs = RunTimes()

    def get(self, session: Session, now: datetime) -> RunTimes:
        if self._read_at is None or not now - self._read_at < FRESH_FOR:
            self._runs, self._read_at = _read(session), now
        return self._runs


def _read(session: Session) -> RunTimes:
    runs: defaultdict[Kind, list[float]] = defaultdict(list)
    for owner, name, num_workers, ran_s in reversed(repository.run_times(session, MAX_RUNS)):
        runs[Kind(owner, name, num_workers)].append(ran_s)
    return RunTimes(runs)
