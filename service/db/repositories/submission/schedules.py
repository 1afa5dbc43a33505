"""SQL for schedules and their runs."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from datetime import datetime
from typing import Any

from sqlalchemy import Row, delete, func, select, update
from sqlalchemy.orm import Session

from dray.views import JobState
from service.db.models import JobRow, ScheduleRow, ScheduleRunRow
from service.db.repositories.bulk import insert_of

KEPT_RUNS = 100
"""Number of runs that are kept for each schedule: the latest ones."""


def insert(session: Session, **columns: Any) -> bool:
    """Store a schedule. Returns False if the owner has another schedule with the same name."""
    statement = insert_of(session)(ScheduleRow).values(columns).on_conflict_do_nothing()
    return session.scalar(statement.returning(ScheduleRow.id)) is not None


def get(session: Session, schedule_id: str, *, lock: bool = False) -> ScheduleRow | None:
    query = select(ScheduleRow).where(ScheduleRow.id == schedule_id)
    if lock:
        query = query.with_for_update().execution_options(populate_existing=True)
    return session.scalar(query)


def id_of(session: Session, owner: str, name: str) -> str | None:
    query = select(ScheduleRow.id).where(ScheduleRow.owner == owner, ScheduleRow.name == name)
    return session.scalar(query)


def page(session: Session, owner: str | None, after: str | None, limit: int) -> list[ScheduleRow]:
    """Return schedules with ids above `after`: the owner's schedules, or all schedules if `owner`
    is None."""
    query = select(ScheduleRow).order_by(ScheduleRow.id).limit(limit)
    if owner is not None:
        query = query.where(ScheduleRow.owner == owner)
    if after is not None:
        query = query.where(ScheduleRow.id > after)
    return list(session.scalars(query))


def count_of(session: Session, owner: str) -> int:
    query = select(func.count()).select_from(ScheduleRow).where(ScheduleRow.owner == owner)
    return session.scalar(query) or 0


def remove(session: Session, schedule_id: str) -> None:
    """Delete a schedule and its runs."""
    session.execute(delete(ScheduleRow).where(ScheduleRow.id == schedule_id))


def due(session: Session, now: datetime, limit: int) -> list[str]:
    """Return the ids of schedules that must be looked at. The first schedule of each
    owner precedes the second schedule of any owner; an owner's schedules are in the order of their
    times."""
    of_owner = func.row_number().over(
        partition_by=ScheduleRow.owner, order_by=(ScheduleRow.next_at, ScheduleRow.id)
    )
    ranked = (
        select(ScheduleRow.id, of_owner.label("of_owner"), ScheduleRow.next_at)
        .where(ScheduleRow.next_at <= now)
        .subquery()
    )
    query = select(ranked.c.id).order_by(ranked.c.of_owner, ranked.c.next_at, ranked.c.id)
    return list(session.scalars(query.limit(limit)))


def first_due(session: Session) -> datetime | None:
    """Return the earliest time at which a schedule must be looked at."""
    query = select(ScheduleRow.next_at).where(ScheduleRow.next_at.is_not(None))
    return session.scalar(query.order_by(ScheduleRow.next_at).limit(1))


def active(session: Session, after: str, limit: int) -> Sequence[Row[Any]]:
    """Return (id, cron, time_zone, decided_until, next_at) of schedules that are not paused, with
    ids above `after`."""
    c = ScheduleRow.__table__.c
    names = ("id", "cron", "time_zone", "decided_until", "next_at")
    query = select(*(c[name] for name in names)).where(c.next_at.is_not(None), c.id > after)
    return session.execute(query.order_by(c.id).limit(limit)).all()


def wake_at(session: Session, schedule_id: str, seen: datetime, at: datetime) -> None:
    """Replace the time at which the service next looks at a schedule, if this time still equals
    `seen`."""
    session.execute(
        update(ScheduleRow)
        .where(ScheduleRow.id == schedule_id, ScheduleRow.next_at == seen)
        .values(next_at=at)
    )


def unfinished(session: Session, schedule_id: str) -> list[str]:
    """Return the ids of the schedule's jobs and arrays that have not ended, oldest first."""
    named = func.coalesce(JobRow.array_id, JobRow.id)
    query = (
        select(named)
        .where(
            JobRow.schedule_id == schedule_id,
            JobRow.finished_at.is_(None),
            JobRow.deleted_at.is_(None),
        )
        .group_by(named)
        .order_by(func.min(JobRow.number))
    )
    return list(session.scalars(query))


def lock_unreserved(
    session: Session, schedule_id: str, reservations: Collection[str]
) -> dict[str, list[str]]:
    """Lock the schedule's jobs that have had no attempt and that name a reservation other than
    these. Return the ids of these jobs, keyed by the reservation that the jobs name."""
    query = (
        select(JobRow.reservation, JobRow.id)
        .where(
            JobRow.schedule_id == schedule_id,
            JobRow.state == JobState.QUEUED,
            JobRow.attempt == 0,
            JobRow.deleted_at.is_(None),
            JobRow.reservation.is_not(None),
            JobRow.reservation.not_in(reservations),
        )
        .order_by(JobRow.id)
        .with_for_update()
    )
    found: dict[str, list[str]] = {}
    for name, job_id in session.execute(query):
        found.setdefault(name or "", []).append(job_id)
    return found


def add_run(session: Session, **columns: Any) -> None:
    """Store a run, and delete the schedule's oldest runs if there are more than KEPT_RUNS."""
    row = ScheduleRunRow(**columns)
    session.add(row)
    session.flush()
    of_schedule = ScheduleRunRow.schedule_id == row.schedule_id
    oldest = (
        select(ScheduleRunRow.at)
        .where(of_schedule)
        .order_by(ScheduleRunRow.at.desc())
        .offset(KEPT_RUNS - 1)
        .limit(1)
        .scalar_subquery()
    )
    session.execute(
        delete(ScheduleRunRow)
        .where(of_schedule, ScheduleRunRow.at < oldest)
        .execution_options(synchronize_session=False)
    )


def has_run(session: Session, schedule_id: str, at: datetime) -> bool:
    query = select(ScheduleRunRow.number).where(
        ScheduleRunRow.schedule_id == schedule_id, ScheduleRunRow.at == at
    )
    return session.scalar(query) is not None


def runs(session: Session, schedule_id: str) -> list[tuple[ScheduleRunRow, JobState | None]]:
    """Return the runs of a schedule with the states of their jobs, latest first."""
    query = _with_states().where(ScheduleRunRow.schedule_id == schedule_id)
    query = query.order_by(ScheduleRunRow.at.desc())
    return [(run, state) for run, state in session.execute(query)]


def last_runs(
    session: Session, schedule_ids: Collection[str]
) -> dict[str, tuple[ScheduleRunRow, JobState | None]]:
    """Return the latest run of each of these schedules, with the state of the run's job."""
    newest = (
        select(func.max(ScheduleRunRow.number))
        .where(ScheduleRunRow.schedule_id.in_(schedule_ids))
        .group_by(ScheduleRunRow.schedule_id)
    )
    query = _with_states().where(ScheduleRunRow.number.in_(newest))
    return {run.schedule_id: (run, state) for run, state in session.execute(query)}


def _with_states() -> Any:
    of_job = (JobRow.id == ScheduleRunRow.job_id) & ScheduleRunRow.array_id.is_(None)
    return select(ScheduleRunRow, JobRow.state).outerjoin(JobRow, of_job)
