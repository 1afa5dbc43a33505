"""The runs of a schedule: decides about a due time, and stores the outcome together with the
position of the schedule, so that each time is decided once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, Final, NamedTuple

from sqlalchemy.orm import Session

from dray.input.times import zone_named
from dray.spec.ordering import MAX_AFTER
from dray.views import MissedRuns, Overlap, RunOutcome
from service.db.models import JobRow, ScheduleRow
from service.db.repositories import jobs as jobs_repository
from service.db.repositories.scheduling import reservations as reservations_repository
from service.db.repositories.submission import schedules as repository
from service.domain.errors import DomainError, RunUnfinished
from service.domain.ids import is_array_id
from service.domain.schedules.cron import YEARS, Cron
from service.domain.schedules.decisions import MAX_CAUGHT_UP, DueTimes, decide
from service.domain.states import RESERVATION_MISSED
from service.jobs import arrays
from service.jobs.new_jobs import ScheduledRun
from service.jobs.service import Jobs, NewJob, cancel_row
from service.lifecycle import dependencies


class Due(NamedTuple):
    """A run whose job is to be submitted, and the state of the schedule on which this decision is
    based."""

    schedule_id: str
    owner: str
    document: dict[str, Any]
    at: datetime
    version: int
    decided_until: datetime


_NO_TIME: Final = f"the cron expression matches no time in the next {YEARS} years"


def cron_of(cron: str, time_zone: str) -> Cron:
    """Raises ValueError if the installed data no longer has the zone."""
    return Cron(cron, zone_named(time_zone))


def local(row: ScheduleRow, at: datetime) -> datetime:
    """Return the time with the schedule's offset from UTC, or in UTC if its zone is unknown."""
    try:
        return at.astimezone(zone_named(row.time_zone))
    except ValueError:
        return at.astimezone(UTC)


def advance(row: ScheduleRow, until: datetime) -> None:
    """Record that all times up to `until` are decided. The schedule is paused if it has no later
    time."""
    row.decided_until = max(row.decided_until, until)
    try:
        row.next_at = cron_of(row.cron, row.time_zone).next_after(row.decided_until)
        row.paused_reason = None if row.next_at else _NO_TIME
    except ValueError as error:
        row.next_at, row.paused_reason = None, str(error)


def look(session: Session, schedule_id: str, now: datetime) -> Due | None:
    """Decide about the due times of a schedule, as far as this is possible without submitting a
    job. Returns the run whose job is to be submitted; None if there is none."""
    row = repository.get(session, schedule_id, lock=True)
    if row is None or row.next_at is None or row.next_at > now:
        return None
    try:
        decision = _decision(row, now)
    except ValueError:
        advance(row, row.decided_until)  # which pauses the schedule
        return None
    if decision.missed:
        record_missed(session, row, decision.missed, now)
    at = decision.run_at
    if at is None:
        advance(row, row.decided_until)  # also if the rules of the zone have changed
        return None
    unfinished = _unfinished(session, row, now)
    if unfinished and row.overlap == Overlap.SKIP:
        message = f"{unfinished[-1]}, the previous run, had not ended"
        record(session, row, at, now, RunOutcome.SKIPPED, message=message)
        advance(row, at)
        return None
    return Due(row.id, row.owner, row.document, at, row.version, row.decided_until)


def _unfinished(session: Session, row: ScheduleRow, now: datetime) -> list[str]:
    """Return the ids of the schedule's jobs and arrays that have not ended, the oldest first. Jobs
    that can never start, because their reservation has ended or was deleted, are cancelled."""
    names = [rules.name for rules in reservations_repository.unfinished(session, now)]
    for name, job_ids in repository.lock_unreserved(session, row.id, names).items():
        message = (
            f"never started: its reservation {name!r} has ended or was deleted, and the next run "
            f"of the schedule {row.name!r} is due"
        )
        dependencies.end_unstarted(session, job_ids, RESERVATION_MISSED, message, now, {})
    return repository.unfinished(session, row.id)


def _decision(row: ScheduleRow, now: datetime) -> DueTimes:
    cron = cron_of(row.cron, row.time_zone)
    return decide(cron, MissedRuns(row.missed), row.deadline_s, row.decided_until, now)


def missed_times(row: ScheduleRow, now: datetime) -> list[datetime]:
    """Return the latest times of a schedule that have passed, at most one more than
    `MAX_CAUGHT_UP`."""
    try:
        return cron_of(row.cron, row.time_zone).latest(row.decided_until, now, MAX_CAUGHT_UP + 1)
    except ValueError:
        return []


def record_missed(
    session: Session, row: ScheduleRow, times: Sequence[datetime], now: datetime
) -> None:
    """Record that these times were missed. The caller computes the next time."""
    first, last = local(row, times[0]).isoformat(), local(row, times[-1]).isoformat()
    message = "the scheduled time passed before the service could submit the run"
    if len(times) > MAX_CAUGHT_UP:
        message = f"more than {MAX_CAUGHT_UP} scheduled times up to {last} passed without a run"
    elif len(times) > 1:
        message = f"{len(times)} scheduled times from {first} to {last} passed without a run"
    record(session, row, times[-1], now, RunOutcome.MISSED, message=message)
    row.decided_until = times[-1]


def still(session: Session, due: Due) -> ScheduleRow | None:
    """Lock and return the schedule of a run; None if, in the meantime, the schedule was changed or
    deleted, or the run was decided."""
    row = repository.get(session, due.schedule_id, lock=True)
    if row is None or row.next_at is None:
        return None
    same = (row.version, row.decided_until) == (due.version, due.decided_until)
    return row if same else None


def submit(session: Session, jobs: Jobs, row: ScheduleRow, new: NewJob, at: datetime) -> JobRow:
    """Store the job of a run, and the run. The previous runs are cancelled, or the job waits for
    them, as `overlap` requires. Raises RunUnfinished for `skip`, and the errors of a submission."""
    unfinished = _unfinished(session, row, new.now)
    overlap = Overlap(row.overlap)
    if unfinished and overlap is Overlap.SKIP:
        raise RunUnfinished(
            f"{unfinished[-1]}, the previous run of the schedule {row.name!r}, has not ended",
            hint="wait until it has ended, cancel it, or change the schedule's overlap",
        )
    if overlap is Overlap.REPLACE:
        for job_id in unfinished:
            _cancel(session, job_id, f"the schedule {row.name}", new.now)
    # Each waiting run waits for the run before it, so the latest suffice.
    prepared = new.prepared.after(unfinished[-MAX_AFTER:]) if unfinished else new.prepared
    shown = local(row, at).isoformat(timespec="seconds")
    job = jobs.store(
        session, replace(new, prepared=prepared, run=ScheduledRun(row.id, row.name, shown))
    )
    record(session, row, at, new.now, RunOutcome.SUBMITTED, job=job)
    return job


def _cancel(session: Session, job_id: str, actor: str, now: datetime) -> None:
    if is_array_id(job_id):
        arrays.cancel_jobs(session, job_id, actor=actor, now=now)
        return
    job = jobs_repository.lock(session, job_id)
    if job is not None and not job.state.is_terminal:
        cancel_row(session, job, actor=actor, now=now)


def record(
    session: Session,
    row: ScheduleRow,
    at: datetime,
    now: datetime,
    outcome: RunOutcome,
    *,
    message: str | None = None,
    problem: DomainError | None = None,
    job: JobRow | None = None,
) -> None:
    """Store the outcome of a run. `problem` is the error with which its job was refused."""
    if problem is not None:
        message = problem.message
    repository.add_run(
        session,
        schedule_id=row.id,
        at=at,
        outcome=outcome.value,
        message=message,
        problem=problem and _shown(problem),
        job_id=job and job.id,
        array_id=job and job.array_id,
        decided_at=now,
    )


def _shown(error: DomainError) -> dict[str, Any]:
    return {
        "code": error.code,
        "detail": error.message,
        "pointer": error.pointer,
        "hint": error.hint,
    }
