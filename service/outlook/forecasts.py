"""Forecasts of starts and ends, as they are stored, and how far off they were."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import Row
from sqlalchemy.orm import Session

from dray import views
from dray.views import JobState
from service.db.models import ForecastRow, JobRow
from service.db.repositories.bulk import in_chunks
from service.db.repositories.scheduling import forecasts as repository
from service.db.repositories.scheduling.forecasts import ForecastOf
from service.db.session import touch
from service.domain.scheduling import policy
from service.domain.scheduling.outlook.simulation import Expected
from service.domain.scheduling.outlook.situation import UNKNOWN_S, Situation
from service.domain.scheduling.rules.obstacles import Reason
from service.lifecycle.resizing import HOLDING

COUNTED_FOR = timedelta(days=7)
"""Errors of forecasts whose event came longer ago are not counted any more."""
MAX_COUNTED = 1000
USUAL_RUNS = 50
"""Newest jobs whose running time stands for one that nobody knows."""
SAME_S = 5.0
SAME_SHARE = 0.05
"""Times that differ by less than both, of the time until then, are not stored anew."""
CHUNK = 500
"""Rows that are written in one transaction: writers wait for each other."""

Key = tuple[str, int, str]
"""Job, attempt, and the event that is forecast."""


@dataclass(frozen=True)
class Facts:
    """All that a forecast needs beside the scheduler's view."""

    jobs: Sequence[Row[Any]]
    usual_s: float


def facts(session: Session) -> Facts:
    runs = repository.usual_run_s(session, USUAL_RUNS)
    return Facts(repository.facts(session), statistics.median(runs) if runs else UNKNOWN_S)


def situation(snapshot: policy.Snapshot, known: Facts, ran_s: Mapping[str, float]) -> Situation:
    """The begin of a play. ran_s: for how long running attempts have run."""
    by_id = {job.id: job for job in known.jobs}
    last = len(by_id) + 1

    def place(job: policy.WaitingJob) -> int:
        found = by_id.get(job.job_id)
        return last if found is None or found.position is None else int(found.position)

    limits = {
        job.id: max(0.0, job.max_runtime_s - job.runtime_used_s - ran_s.get(job.id, 0.0))
        for job in known.jobs
        if job.max_runtime_s is not None
    }
    return Situation(
        replace(snapshot, queue=tuple(sorted(snapshot.queue, key=place))),
        runtime_left_s=limits,
        arrays={job.id: job.array_id for job in known.jobs if job.array_id is not None},
        cancelled=frozenset(job.id for job in known.jobs if job.state is JobState.CANCELLING),
        usual_s=known.usual_s,
    )


def ends(there: Situation, now: datetime) -> dict[str, Expected]:
    """When each running job is expected to end, by its own progress and by earlier runs."""
    found = {}
    for job in there.snapshot.running:
        limit_s = there.runtime_left_s.get(job.job_id)
        left_s = job.left_s
        if left_s is None:
            found[job.job_id] = Expected(None, NO_PROGRESS)
        elif not job.is_leaving:
            left_s = left_s if limit_s is None else min(left_s, limit_s)
            found[job.job_id] = Expected(now + timedelta(seconds=left_s))
    return found


NO_PROGRESS = Reason(
    "unknown_length", "neither its progress nor earlier runs tell how long it takes"
)


class Forecasts:
    """The forecasts that are stored; belongs to one loop."""

    def __init__(self) -> None:
        self._stored: dict[Key, Expected] | None = None

    def load(self, session: Session) -> None:
        """Learn what an earlier loop has stored."""
        if self._stored is None:
            self._stored = {
                (row.job_id, row.attempt, row.of): _expected(row)
                for row in repository.still_open(session)
            }

    def changes(
        self,
        known: Facts,
        starts: Mapping[str, Expected],
        ends_: Mapping[str, Expected],
        now: datetime,
    ) -> list[Mapping[Key, Expected]]:
        """The forecasts that are to be stored, in pieces for a transaction each."""
        assert self._stored is not None, "`load` comes first"
        found: dict[Key, Expected] = {}
        stored: dict[Key, Expected] = {}
        for job in known.jobs:
            waits = job.state is JobState.QUEUED
            of = ForecastOf.START if waits else ForecastOf.END
            key: Key = job.id, job.attempt + waits, of
            if key in self._stored:
                stored[key] = self._stored[key]
            expected = (starts if waits else ends_).get(job.id)
            if expected is not None:
                found[key] = expected
        self._stored = stored
        different = [
            (key, each)
            for key, each in found.items()
            if key not in self._stored or _differs(each, self._stored[key], now)
        ]
        return [dict(piece) for piece in in_chunks(different, CHUNK)]

    def store(self, session: Session, changes: Mapping[Key, Expected], made_at: datetime) -> None:
        """made_at: when the cluster and the queue were as the forecast saw them."""
        assert self._stored is not None, "`load` comes first"
        touch(session)  # no answer about a job's state has changed
        rows = [(key, _as_row(key, each, made_at)) for key, each in changes.items()]
        repository.add(session, [row for key, row in rows if key not in self._stored])
        repository.change(session, [row for key, row in rows if key in self._stored])

    def stored(self, changes: Mapping[Key, Expected]) -> None:
        """The transaction that stored them is committed."""
        assert self._stored is not None, "`load` comes first"
        self._stored |= changes


def _differs(new: Expected, old: Expected, now: datetime) -> bool:
    if new.at is None or old.at is None:
        code = None if new.why is None else new.why.code
        was = None if old.why is None else old.why.code
        return (new.at is None) != (old.at is None) or code != was
    off_s = abs((new.at - old.at).total_seconds())
    left_s = abs((new.at - now).total_seconds())
    return off_s > max(SAME_S, SAME_SHARE * left_s)


def _expected(row: ForecastRow | Row[Any]) -> Expected:
    why = None if row.code is None else Reason(row.code, row.message or "")
    return Expected(row.expected_at, why, row.not_before, row.num_assumed)


def _as_row(key: Key, each: Expected, made_at: datetime) -> dict[str, Any]:
    job_id, attempt, of = key
    return {
        "job_id": job_id,
        "attempt": attempt,
        "of": of,
        "expected_at": each.at,
        "not_before": each.not_before,
        "code": each.why and each.why.code,
        "message": each.why and each.why.message,
        "num_assumed": each.num_assumed,
        "made_at": made_at,
        "first_expected_at": each.at,
        "first_made_at": None if each.at is None else made_at,
    }


def errors(session: Session, now: datetime) -> views.ForecastErrors:
    """How far off the first forecast of each start and end was that came of late."""
    off_s: dict[str, list[float]] = {of: [] for of in ForecastOf}
    ahead_s: dict[str, list[float]] = {of: [] for of in ForecastOf}
    for row in repository.settled(session, now - COUNTED_FOR, MAX_COUNTED):
        if row.first_made_at < row.came_at:
            off_s[row.of].append(abs((row.came_at - row.first_expected_at).total_seconds()))
            ahead_s[row.of].append((row.came_at - row.first_made_at).total_seconds())
    return views.ForecastErrors(
        starts=_error(off_s[ForecastOf.START], ahead_s[ForecastOf.START]),
        ends=_error(off_s[ForecastOf.END], ahead_s[ForecastOf.END]),
    )


def _error(off_s: Sequence[float], ahead_s: Sequence[float]) -> views.ForecastError:
    if not off_s:
        return views.ForecastError(count=0)
    in_order = sorted(off_s)
    return views.ForecastError(
        count=len(off_s),
        median_s=statistics.median(in_order),
        p90_s=in_order[min(len(in_order) - 1, int(0.9 * len(in_order)))],
        median_ahead_s=statistics.median(ahead_s),
    )


def of_job(session: Session, job: JobRow) -> tuple[views.Forecast | None, views.Forecast | None]:
    """When the job is expected to start, while it waits, and to end, while it runs."""
    start = end = None
    if job.state is JobState.QUEUED:
        start = repository.of_job(session, job.id, job.attempt + 1, ForecastOf.START)
    elif job.state in HOLDING:
        end = repository.of_job(session, job.id, job.attempt, ForecastOf.END)
    return _view(start), _view(end)


def _view(row: ForecastRow | None) -> views.Forecast | None:
    if row is None:
        return None
    why = None if row.code is None else views.Reason(code=row.code, message=row.message or "")
    return views.Forecast(
        at=row.expected_at,
        not_before=row.not_before,
        reason=why,
        num_assumed=row.num_assumed,
        made_at=row.made_at,
        first_at=row.first_expected_at,
    )
