"""Make, store and show forecasts of starts and ends, and measure their errors.

`end_of` and `start_of` are the only source of expected times. An end is stored with the progress
from which it is computed (`service.ingest.rank_frames`), so that all responses about a job show the
same range until its progress changes.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
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
from service.domain.progress import TimeLeft
from service.domain.scheduling import policy
from service.domain.scheduling.outlook import ranges
from service.domain.scheduling.outlook.simulation import Expected
from service.domain.scheduling.outlook.situation import UNKNOWN_S, Situation
from service.domain.scheduling.rules.obstacles import Reason
from service.lifecycle.resizing import HOLDING
from service.outlook.step_times import Kind, RunTimes
from service.outlook.waiting_jobs import limit_left_s

COUNTED_FOR = timedelta(days=7)
"""Time after an event during which its forecast error is included in the statistics."""
MAX_COUNTED = 1000
USUAL_RUNS = 50
"""Number of most recent jobs whose run times are used if the run time of a job is unknown."""
SAME_S = 5.0
SAME_SHARE = 0.05
"""A time is not stored again if it differs from the stored time by less than `SAME_S`, or by less
than this fraction of the remaining time."""
CHUNK = 500
"""Maximum number of rows that one transaction writes, because writers block each other."""

Key = tuple[str, int, str]
"""(job id, attempt, forecast event)."""


@dataclass(frozen=True)
class Facts:
    """Inputs of a forecast in addition to the scheduler's snapshot."""

    jobs: Sequence[Row[Any]]
    runs_s: Sequence[float]
    """Run times of the latest succeeded jobs of any kind."""
    earlier: RunTimes = field(default_factory=RunTimes)

    @property
    def usual_s(self) -> float:
        return statistics.median(self.runs_s) if self.runs_s else UNKNOWN_S

    def time_left(self, job: Row[Any], ran_s: float, now: datetime) -> TimeLeft | None:
        """Return the remaining time of a job, based on its own progress, earlier runs, or its
        limit."""
        end = end_of(job.progress, now) if job.state is JobState.RUNNING else NO_END
        if end.earliest is not None and end.latest is not None:
            return TimeLeft(*((at - now).total_seconds() for at in (end.earliest, end.latest)))
        earlier_s = self.earlier.get(Kind(job.owner, job.name, job.num_workers), ())
        found = ranges.by_earlier_runs(earlier_s, job.runtime_used_s + ran_s)
        limit_s = limit_left_s(job, job.runtime_used_s + ran_s, now)
        return TimeLeft(0.0, limit_s) if found is None and limit_s is not None else found


def facts(session: Session, earlier: RunTimes | None = None) -> Facts:
    runs_s = repository.usual_run_s(session, USUAL_RUNS)
    return Facts(repository.facts(session), runs_s, earlier or RunTimes())


def situation(
    snapshot: policy.Snapshot, known: Facts, ran_s: Mapping[str, float], now: datetime
) -> Situation:
    """Return the initial situation of a simulation. `ran_s` contains the run time of the live
    attempt of each job."""
    by_id = {job.id: job for job in known.jobs}
    last = len(by_id) + 1

    def position(job: policy.WaitingJob) -> int:
        found = by_id.get(job.job_id)
        return last if found is None or found.position is None else int(found.position)

    time_left = {
        job.id: left
        for job in known.jobs
        if (left := known.time_left(job, ran_s.get(job.id, 0.0), now)) is not None
    }
    return Situation(
        replace(snapshot, queue=tuple(sorted(snapshot.queue, key=position))),
        made_at=now,
        arrays={job.id: job.array_id for job in known.jobs if job.array_id is not None},
        cancelled=frozenset(job.id for job in known.jobs if job.state is JobState.CANCELLING),
        usual_s=known.usual_s,
        usual_range_s=ranges.of_usual(known.runs_s),
        time_left=time_left,
        unmeasured=frozenset(job.job_id for job in snapshot.running if job.job_id not in time_left),
    )


NO_TOTAL = Reason("unknown_length", "the job does not report its total number of steps")
NO_SPEED = Reason("unknown_length", "too few steps have been measured since the job started")
OVERDUE = Reason("overdue", "the expected time has passed")
NO_END = Expected(None, NO_SPEED)


def ends(known: Facts, now: datetime) -> dict[str, Expected]:
    """Return the expected end of each running job."""
    running = (job for job in known.jobs if job.state is JobState.RUNNING)
    return {job.id: _by(job.deadline, end_of(job.progress, now)) for job in running}


def _by(deadline: datetime | None, expected: Expected) -> Expected:
    """Return the expected end of a job that is stopped at its deadline."""
    if deadline is None or expected.at is None:
        return expected
    earliest, latest = (at and min(at, deadline) for at in (expected.earliest, expected.latest))
    return replace(expected, at=min(expected.at, deadline), earliest=earliest, latest=latest)


def end_of(progress: Mapping[str, Any] | None, now: datetime) -> Expected:
    """Return the expected end of a job with this progress."""
    progress = progress or {}
    if progress.get("total_steps") is None:
        return Expected(None, NO_TOTAL)
    earliest, latest = progress.get("earliest_end_at"), progress.get("latest_end_at")
    if earliest is None or latest is None:
        return NO_END
    first, last = datetime.fromisoformat(earliest), datetime.fromisoformat(latest)
    return _from_now(Expected(first + (last - first) / 2, earliest=first, latest=last), now)


def _from_now(expected: Expected, now: datetime) -> Expected:
    """Return the expected time, omitting the part of its range that is in the past."""
    at, earliest = expected.at, expected.earliest
    if at is None or at > now:
        return expected if earliest is None else replace(expected, earliest=max(earliest, now))
    if expected.latest is None or expected.latest <= now:
        return Expected(None, OVERDUE)
    return replace(expected, at=now, earliest=now)


class Forecasts:
    """The stored forecasts, used by a single loop."""

    def __init__(self) -> None:
        self._stored: dict[Key, Expected] | None = None

    def load(self, session: Session) -> None:
        """Load the forecasts that an earlier loop stored."""
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
        """Return the forecasts to store, in chunks. Each chunk is stored in one transaction."""
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
        """Write the changes. `made_at` is the time of the snapshot on which the forecast is
        based."""
        assert self._stored is not None, "`load` comes first"
        touch(session)  # no job has changed
        rows = [(key, _as_row(key, each, made_at)) for key, each in changes.items()]
        repository.add(session, [row for key, row in rows if key not in self._stored])
        repository.change(session, [row for key, row in rows if key in self._stored])

    def stored(self, changes: Mapping[Key, Expected]) -> None:
        """Record the changes of a committed transaction."""
        assert self._stored is not None, "`load` comes first"
        self._stored |= changes


def _differs(new: Expected, old: Expected, now: datetime) -> bool:
    if new.at is None or old.at is None:
        code = None if new.why is None else new.why.code
        was = None if old.why is None else old.why.code
        return (new.at is None) != (old.at is None) or code != was
    if (new.latest is None) != (old.latest is None):
        return True
    pairs = (new.at, old.at), (new.earliest, old.earliest), (new.latest, old.latest)
    return any(_is_apart(time, was, now) for time, was in pairs if time and was)


def _is_apart(new: datetime, old: datetime, now: datetime) -> bool:
    left_s = abs((new - now).total_seconds())
    return abs((new - old).total_seconds()) > max(SAME_S, SAME_SHARE * left_s)


def _expected(row: ForecastRow | Row[Any]) -> Expected:
    why = None if row.code is None else Reason(row.code, row.message or "")
    return Expected(
        *(row.expected_at, why, row.not_before, row.num_assumed), row.earliest_at, row.latest_at
    )


def _as_row(key: Key, each: Expected, made_at: datetime) -> dict[str, Any]:
    job_id, attempt, of = key
    return {
        "job_id": job_id,
        "attempt": attempt,
        "of": of,
        "expected_at": each.at,
        "earliest_at": each.earliest,
        "latest_at": each.latest,
        "not_before": each.not_before,
        "code": each.why and each.why.code,
        "message": each.why and each.why.message,
        "num_assumed": each.num_assumed,
        "made_at": made_at,
        "first_expected_at": each.at,
        "first_made_at": None if each.at is None else made_at,
    }


def errors(session: Session, now: datetime) -> views.ForecastErrors:
    """Return the errors of the first forecast for each recent start and end."""
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


def of_job(
    session: Session, job: JobRow, progress: Mapping[str, Any] | None, now: datetime
) -> tuple[views.Forecast | None, views.Forecast | None]:
    """Return the expected start of a waiting job, and the expected end of a job that has slots.
    `progress` is the job's progress as shown to users.
    """
    if job.state is JobState.QUEUED:
        row = repository.of_job(session, job.id, job.attempt + 1, ForecastOf.START)
        return start_of(row, now), None
    if job.state not in HOLDING:
        return None, None
    row = repository.of_job(session, job.id, job.attempt, ForecastOf.END)
    return None, view(end_of(progress, now), now, row)


def start_of(row: ForecastRow | None, now: datetime) -> views.Forecast | None:
    """Return the stored forecast of a start; None if no forecast has been made yet."""
    return None if row is None else view(_from_now(_expected(row), now), row.made_at, row)


def view(
    expected: Expected, made_at: datetime, stored: ForecastRow | None = None
) -> views.Forecast:
    why = expected.why
    return views.Forecast(
        at=expected.at,
        earliest_at=expected.earliest,
        latest_at=expected.latest,
        not_before=expected.not_before,
        reason=None if why is None else views.Reason(code=why.code, message=why.message),
        num_assumed=expected.num_assumed,
        made_at=made_at,
        first_at=expected.at if stored is None else stored.first_expected_at,
    )
