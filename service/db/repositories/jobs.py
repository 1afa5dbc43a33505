"""SQL for jobs and their labels."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from functools import cache
from typing import Any

from sqlalchemy import Insert, Row, Select, bindparam, delete, func, select
from sqlalchemy import insert as sql_insert
from sqlalchemy.orm import Session

from dray.views import JobState
from service.db.models import ClusterRow, JobLabelRow, JobRow, JobTagRow, num_parts
from service.db.repositories.bulk import CHUNK, in_chunks, table_of
from service.db.repositories.catalog import document_values
from service.db.repositories.catalog.labels import labels_as_json
from service.db.repositories.scheduling import accounting
from service.db.repositories.submission import sweeps


def get(session: Session, job_id: str) -> JobRow | None:
    return session.scalar(_by_id(), {"job_id": job_id})


def existing(session: Session, job_ids: Sequence[str]) -> set[str]:
    """Return the ids in `job_ids` whose jobs exist and are not being deleted."""
    query = select(JobRow.id).where(JobRow.id.in_(job_ids), JobRow.deleted_at.is_(None))
    return set(session.scalars(query))


_LOCKED = "locked_jobs"


def lock(session: Session, job_id: str) -> JobRow | None:
    """Lock the job and return its current row. Until this transaction ends, no other transaction
    can change the row."""
    row: JobRow | None = session.scalar(_locking(), {"job_id": job_id})
    if row is not None:
        _locked(session).add(job_id)
    return row


def lock_all(session: Session, job_ids: Collection[str]) -> dict[str, JobRow]:
    """Lock several jobs, and return their rows, keyed by id.

    All transactions lock jobs in the order of their ids, so that the transactions can't deadlock.
    """
    found: dict[str, JobRow] = {}
    for some in in_chunks(sorted(job_ids), CHUNK):
        rows = session.scalars(_locking_many(), {"job_ids": some})
        found.update((row.id, row) for row in rows)
    _locked(session).update(found)
    return found


def note_locked(session: Session, job_ids: Collection[str]) -> None:
    """Record that this transaction has locked these jobs."""
    _locked(session).update(job_ids)


def is_locked(session: Session, job_id: str) -> bool:
    """Whether this transaction has locked the row, which is therefore current."""
    return job_id in _locked(session)


def _locked(session: Session) -> set[str]:
    locked: set[str] = session.info.setdefault(_LOCKED, set())
    return locked


@cache
def _by_id() -> Select[JobRow]:
    return select(JobRow).where(JobRow.id == bindparam("job_id"))


@cache
def _locking() -> Select[JobRow]:
    return _by_id().with_for_update().execution_options(populate_existing=True)


@cache
def _locking_many() -> Select[JobRow]:
    query = select(JobRow).where(JobRow.id.in_(bindparam("job_ids", expanding=True)))
    query = query.order_by(JobRow.id).with_for_update()
    return query.execution_options(populate_existing=True)


def labels(session: Session, job_ids: Sequence[str]) -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = {job_id: {} for job_id in job_ids}
    rows = session.scalars(select(JobLabelRow).where(JobLabelRow.job_id.in_(job_ids)))
    for row in rows:
        found[row.job_id][row.key] = row.value
    return found


def replace_labels(session: Session, job_id: str, new: Mapping[str, str]) -> None:
    session.execute(delete(JobLabelRow).where(JobLabelRow.job_id == job_id))
    _insert_labels(session, job_id, new)


def _insert_labels(session: Session, job_id: str, new: Mapping[str, str]) -> None:
    if new:
        rows = [{"job_id": job_id, "key": key, "value": value} for key, value in new.items()]
        session.connection().execute(sql_insert(table_of(JobLabelRow)), rows)


def tags(session: Session, job_ids: Sequence[str]) -> dict[str, list[str]]:
    """Return the sorted tags of each of these jobs."""
    found: dict[str, list[str]] = {job_id: [] for job_id in job_ids}
    query = select(JobTagRow.job_id, JobTagRow.tag).where(JobTagRow.job_id.in_(job_ids))
    for job_id, tag in session.execute(query):
        found[job_id].append(tag)
    return {job_id: sorted(some) for job_id, some in found.items()}


_STATUS = (
    *("id", "name", "owner", "project", "queue", "priority", "spec", "attempt", "world_size"),
    *("num_spares", "spares_ready", "memory_copies"),
    *("state", "reason_code", "reason_message", "position", "progress", "summary"),
    *("warnings", "recoveries", "slot_seconds", "cost", "held_by", "begin_at", "deadline"),
    "reservation",
    *("max_runtime_s", "is_runtime_of_queue"),
    *("array_id", "array_index", "schedule_id", "scheduled_at", "colour"),
    *("created_at", "started_at", "first_step_at", "finished_at"),
)
"""The columns from which a job's view is built."""


@cache
def _status_query(dialect: str) -> Select[Any]:
    """Return a query for all columns of a job's view, with labels as a JSON object and tags
    separated by spaces."""
    tags = (
        select(func.aggregate_strings(JobTagRow.tag, " "))
        .where(JobTagRow.job_id == JobRow.id)
        .correlate(JobRow)
        .scalar_subquery()
    )
    cluster = [
        select(column).where(ClusterRow.id == 1).scalar_subquery().label(column.key)
        for column in (ClusterRow.ray_dashboard, ClusterRow.connected)
    ]
    columns = [getattr(JobRow, name) for name in _STATUS]
    return select(
        *columns, labels_as_json(dialect).label("labels"), tags.label("tags"), *cluster
    ).where(JobRow.id == bindparam("job_id"), JobRow.deleted_at.is_(None))


def status(session: Session, job_id: str) -> Row[Any] | None:
    """Return the columns of a job's view without creating ORM objects; None if the job does not
    exist."""
    query = _status_query(session.get_bind().dialect.name)
    return session.connection().execute(query, {"job_id": job_id}).one_or_none()


def state_of(session: Session, job_id: str) -> JobState | None:
    """Return the state of a job; None if the job does not exist."""
    found = session.connection().execute(_state_query(), {"job_id": job_id})
    state: JobState | None = found.scalar()
    return state


@cache
def _state_query() -> Select[Any]:
    table = JobRow.__table__
    return select(table.c.state).where(
        table.c.id == bindparam("job_id"), table.c.deleted_at.is_(None)
    )


def unstored(**columns: Any) -> JobRow:
    """Return a read-only JobRow with these columns. The row does not belong to a session, and does
    not trigger listeners."""
    row = JobRow()
    vars(row).update(columns)
    return row


def insert(session: Session, row: JobRow, job_labels: Mapping[str, str]) -> None:
    """Insert the columns of `row` that are set, without adding `row` to the session."""
    values = {name: value for name, value in vars(row).items() if name in _columns()}
    session.connection().execute(_insert(), [values])
    _insert_labels(session, row.id, job_labels)


@cache
def _insert() -> Insert:
    return sql_insert(table_of(JobRow))


@cache
def _columns() -> frozenset[str]:
    return frozenset(column.key for column in table_of(JobRow).columns)


def step_times(session: Session, most: int) -> Sequence[Row[Any]]:
    """Return (id, owner, state, num_workers, min_workers, yields, progress, step_times, num_parts)
    of the latest jobs that have reported step times, including ended jobs, newest first."""
    return session.connection().execute(_step_times(), {"most": most}).all()


@cache
def _step_times() -> Select[Any]:
    c = JobRow.__table__.c
    names = ("id", "owner", "state", "num_workers", "min_workers", "yields", "progress")
    return (
        select(*(c[name] for name in (*names, "step_times")), num_parts(c))
        .where(c.step_times.is_not(None), c.deleted_at.is_(None))
        .order_by(c.number.desc())
        .limit(bindparam("most"))
    )


def run_times(session: Session, most: int) -> Sequence[Row[Any, Any, Any, Any]]:
    """Return (owner, name, num_workers, runtime_used_s) of the latest `most` jobs that succeeded,
    newest first."""
    c = JobRow.__table__.c
    query = (
        select(c.owner, c.name, c.num_workers, c.runtime_used_s)
        .where(c.finished_at.is_not(None), c.state == JobState.SUCCEEDED)
        .order_by(c.finished_at.desc())
        .limit(most)
    )
    return session.connection().execute(query).all()


def documents(session: Session, job_ids: Collection[str]) -> dict[str, tuple[dict[str, Any], str]]:
    """Return (document, owner) of each of these jobs, keyed by id. Jobs that do not exist are
    omitted."""
    return {
        row.id: (row.spec, row.owner)
        for some in in_chunks(sorted(job_ids), CHUNK)
        for row in session.connection().execute(_documents(), {"job_ids": some})
    }


@cache
def _documents() -> Select[Any]:
    c = JobRow.__table__.c
    query = select(c.id, c.spec, c.owner)
    return query.where(c.id.in_(bindparam("job_ids", expanding=True)))


def starting_from(session: Session, job_id: str) -> list[str]:
    """Return the ids of unfinished jobs that start from a checkpoint of this job."""
    query = select(JobRow.id).where(
        JobRow.init_from_job == job_id, JobRow.finished_at.is_(None), JobRow.deleted_at.is_(None)
    )
    return list(session.scalars(query.order_by(JobRow.number)))


def needed(session: Session, job_ids: Sequence[str]) -> set[str]:
    """Return which of the given jobs have checkpoints from which unfinished jobs start."""
    query = select(JobRow.init_from_job).where(
        JobRow.init_from_job.in_(job_ids), JobRow.finished_at.is_(None), JobRow.deleted_at.is_(None)
    )
    return {job_id for job_id in session.scalars(query.distinct()) if job_id is not None}


def several(session: Session, job_ids: Sequence[str]) -> dict[str, JobRow]:
    """Return the rows of these jobs, keyed by id."""
    query = select(JobRow).where(JobRow.id.in_(job_ids))
    return {row.id: row for row in session.scalars(query)}


def marked_deleted(session: Session, before: datetime | None = None) -> list[str]:
    """Return the ids of jobs whose deletion has begun (before `before`, if it is given)."""
    query = select(JobRow.id).where(JobRow.deleted_at.is_not(None))
    if before is not None:
        query = query.where(JobRow.deleted_at < before)
    return list(session.scalars(query.order_by(JobRow.number)))


def erase(session: Session, job_ids: Sequence[str]) -> None:
    """Delete the jobs and, through foreign keys, all rows that belong to them, except for the
    attempts that accounting keeps."""
    accounting.keep(session, job_ids)
    document_values.drop(session, job_ids)
    found = session.scalars(
        delete(JobRow)
        .where(JobRow.id.in_(job_ids))
        .returning(JobRow.array_id)
        .execution_options(synchronize_session=False)
    )
    sweeps.drop_empty(session, {array_id for array_id in found if array_id is not None})


def newest_succeeded(session: Session, limit: int) -> Sequence[Row[str, dict[str, Any]]]:
    """Return (id, document) of succeeded jobs, newest first."""
    query = select(JobRow.id, JobRow.spec).where(JobRow.state == JobState.SUCCEEDED)
    return session.execute(query.order_by(JobRow.id.desc()).limit(limit)).all()


def count_by_state(session: Session) -> dict[JobState, int]:
    """Return the number of jobs in each state. States without jobs are omitted."""
    query = (
        select(JobRow.state, func.count()).where(JobRow.deleted_at.is_(None)).group_by(JobRow.state)
    )
    return {JobState(state): number for state, number in session.execute(query)}
