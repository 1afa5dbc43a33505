"""SQL for arrays: many jobs with one document."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from datetime import datetime
from types import SimpleNamespace
from typing import Any

from sqlalchemy import (
    ColumnElement,
    Row,
    bindparam,
    func,
    insert,
    null,
    select,
    true,
    update,
)
from sqlalchemy.orm import Session

from dray.views import JobState
from service.db.models import EventRow, JobLabelRow, JobRow, SweepRow, num_parts
from service.db.repositories import jobs
from service.db.repositories.bulk import CHUNK, in_chunks, table_of
from service.domain.ids import is_array_id


def insert_copies(session: Session, first: JobRow, copies: Sequence[Mapping[str, Any]]) -> None:
    """Insert copies of the stored job `first`, including its labels and its event.

    `copies` contains the columns that differ. All other columns are copied within the database.
    """
    if not copies:
        return
    jobs = table_of(JobRow)
    columns = {column.key: column for column in jobs.columns if column.key != "number"}
    changed: dict[str, ColumnElement[Any]]
    changed = {name: bindparam(f"new_{name}", type_=columns[name].type) for name in copies[0]}
    changed["array_head"] = null()
    found = select(*({**columns, **changed}.values())).where(jobs.c.id == first.id)
    values = [{f"new_{name}": value for name, value in copy.items()} for copy in copies]
    session.execute(insert(jobs).from_select(list(columns), found), values)
    others = (jobs.c.array_id == first.array_id, jobs.c.id != first.id)
    for table in (table_of(JobLabelRow), table_of(EventRow)):
        columns = {column.key: column for column in table.columns}
        found = select(*({**columns, "job_id": jobs.c.id}.values()))
        found = found.select_from(table.join(jobs, true()))
        found = found.where(table.c.job_id == first.id, *others)
        session.execute(insert(table).from_select(list(columns), found))


def first(session: Session, array_id: str) -> JobRow | None:
    """Return the array's job with the lowest index. Everything that the array's jobs have in common
    is read from this job."""
    query = select(JobRow).where(JobRow.array_id == array_id, JobRow.deleted_at.is_(None))
    return session.scalar(query.order_by(JobRow.array_index).limit(1))


def size(session: Session, array_id: str) -> int | None:
    """Return the number of jobs with which an array was submitted."""
    c = JobRow.__table__.c
    head = select(c.spec).where(c.array_id == array_id, c.array_head.is_not(None)).limit(1)
    array = (session.scalar(head) or {}).get("array")
    trials = select(SweepRow.num_trials).where(SweepRow.array_id == array_id)
    return session.scalar(trials) if array is None else int(array["size"])


def counts(session: Session, array_id: str) -> dict[JobState, int]:
    """Return the number of the array's jobs in each state. States without jobs are omitted."""
    query = (
        select(JobRow.state, func.count())
        .where(JobRow.array_id == array_id, JobRow.deleted_at.is_(None))
        .group_by(JobRow.state)
    )
    return {JobState(state): number for state, number in session.execute(query)}


CHANGEABLE = (
    *("queue", "priority", "rank", "held_by", "position", "blocked_by"),
    *("reason_code", "reason_message", "event_seq", "max_runtime_s", "is_runtime_of_queue"),
)
"""The columns that a change of a job's position can set."""
_READ = (
    *("id", "array_index", "state", "attempt", "owner", "num_workers", "num_spares"),
    *("min_workers", "bundle"),
    *("roles", "required_topology", "homes", "runtime_used_s", "project", "reservation"),
)
"""The other columns that such a change reads."""


def lock_unfinished(session: Session, array_id: str) -> list[SimpleNamespace]:
    """Lock the array's jobs that have not ended, and return the columns that are needed to change
    their positions. Creating ORM objects for an array with thousands of jobs would be slow."""
    c = table_of(JobRow).c
    query = (
        select(*(c[name] for name in (*_READ, *CHANGEABLE)), num_parts(c))
        .where(c.array_id == array_id, c.finished_at.is_(None), c.deleted_at.is_(None))
        .order_by(c.id)
        .with_for_update()
    )
    rows = [SimpleNamespace(**row._mapping) for row in session.connection().execute(query)]
    jobs.note_locked(session, [row.id for row in rows])
    return rows


def store_changes(session: Session, rows: Sequence[SimpleNamespace]) -> None:
    """Store the columns `CHANGEABLE` of locked rows."""
    if not rows:
        return
    table = table_of(JobRow)
    values = {name: bindparam(f"new_{name}", type_=table.c[name].type) for name in CHANGEABLE}
    session.connection().execute(
        update(table).where(table.c.id == bindparam("job_id")).values(values),
        [
            {"job_id": row.id, **{f"new_{name}": getattr(row, name) for name in CHANGEABLE}}
            for row in rows
        ],
    )


def set_max_running(session: Session, array_id: str, max_running: int | None) -> None:
    """Set the limit in all jobs of the array, including ended jobs."""
    session.execute(
        update(JobRow)
        .where(JobRow.array_id == array_id, JobRow.deleted_at.is_(None))
        .values(array_max_running=max_running)
        .execution_options(synchronize_session=False)
    )


def in_states(session: Session, array_id: str, states: Collection[JobState]) -> list[str]:
    """Return the ids of the array's jobs in these states."""
    query = select(JobRow.id).where(
        JobRow.array_id == array_id, JobRow.state.in_(states), JobRow.deleted_at.is_(None)
    )
    return list(session.scalars(query.order_by(JobRow.array_index)))


def started(session: Session, array_id: str) -> list[str]:
    """Return the ids of the array's unfinished jobs that have had an attempt."""
    query = select(JobRow.id).where(
        JobRow.array_id == array_id,
        JobRow.finished_at.is_(None),
        JobRow.deleted_at.is_(None),
        JobRow.attempt > 0,
    )
    return list(session.scalars(query.order_by(JobRow.array_index)))


def cancel_unstarted(
    session: Session, units: Collection[str], *, code: str, message: str, now: datetime
) -> list[Row[str, str, str, str | None, int | None, int]]:
    """Cancel the jobs in `units` (ids of jobs and arrays) that are waiting for their first attempt.

    Returns (id, owner, queue, array_id, array_index, number of the event to add) of each cancelled
    job.
    """
    changed: list[Row[str, str, str, str | None, int | None, int]] = []
    for which in by_unit(units):
        changed += session.execute(
            update(JobRow)
            .where(
                which,
                JobRow.state == JobState.QUEUED,
                JobRow.attempt == 0,
                JobRow.deleted_at.is_(None),
            )
            .values(
                state=JobState.CANCELLED,
                event_seq=JobRow.event_seq + 1,
                reason_code=code,
                reason_message=message,
                position=None,
                blocked_by=[],
                held_by=None,
                finished_at=now,
            )
            .returning(
                *(JobRow.id, JobRow.owner, JobRow.queue),
                *(JobRow.array_id, JobRow.array_index, JobRow.event_seq),
            )
            .execution_options(synchronize_session=False)
        )
    return changed


def by_unit(units: Collection[str]) -> Iterator[ColumnElement[bool]]:
    """Yield separate conditions for the jobs and the arrays in `units`.

    SQLite would scan all rows for a combined condition.
    """
    alone = sorted(unit for unit in units if not is_array_id(unit))
    for some in in_chunks(alone, CHUNK):
        yield JobRow.id.in_(some)
    for some in in_chunks(sorted(set(units) - set(alone)), CHUNK):
        yield JobRow.array_id.in_(some)


def first_needed(session: Session, array_id: str) -> str | None:
    """Return a job of the array that has a checkpoint from which an unfinished job starts; None if
    there is no such job."""
    ids = select(JobRow.id).where(JobRow.array_id == array_id)
    query = select(JobRow.init_from_job).where(
        JobRow.init_from_job.in_(ids), JobRow.finished_at.is_(None), JobRow.deleted_at.is_(None)
    )
    return session.scalar(query.limit(1))


def hand_head_on(session: Session, row: JobRow) -> None:
    """Make the array's first remaining job represent the array in lists, because `row` is being
    deleted."""
    query = select(JobRow.id).where(
        JobRow.array_id == row.array_id, JobRow.deleted_at.is_(None), JobRow.id != row.id
    )
    while next_id := session.scalar(query.order_by(JobRow.array_index).limit(1)):
        took = session.execute(
            update(JobRow)
            .where(JobRow.id == next_id, JobRow.deleted_at.is_(None))
            .values(array_head=row.array_id)
            .returning(JobRow.id)
            # The next job can be deleted in the same transaction.
            .execution_options(synchronize_session="fetch")
        ).one_or_none()
        if took is not None:
            return  # otherwise, the job has been deleted in the meantime


def hide(session: Session, array_id: str, now: datetime) -> list[str]:
    """Mark all jobs of the array as being deleted, and return their ids."""
    marked = session.scalars(
        update(JobRow)
        .where(JobRow.array_id == array_id, JobRow.deleted_at.is_(None))
        .values(deleted_at=now)
        .returning(JobRow.id)
        .execution_options(synchronize_session=False)
    )
    return list(marked)
