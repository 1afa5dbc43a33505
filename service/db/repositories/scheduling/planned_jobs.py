"""SQL with which the scheduler reads and changes waiting jobs and jobs that hold slots."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import cache
from typing import Any

from sqlalchemy import Row, Select, Update, bindparam, func, select, text, update
from sqlalchemy.orm import Session

from dray.views import JobState
from service.db.models import FIRST_POSITIONS, AttemptRow, EventRow, JobRow, num_parts
from service.db.repositories.bulk import CHUNK, in_chunks, table_of
from service.domain.states import UNFINISHED

_CLAIMED = (
    *("id", "state", "attempt", "event_seq", "queue", "held_by", "owner", "spec", "code"),
    *("num_workers", "num_spares", "min_workers", "max_runtime_s", "runtime_used_s", "init_from"),
    *("array_id", "array_index", "started_at", "progress", "kept_back_s", "kept_back_since"),
    *(
        "created_at",
        "scheduled_at",
        "silo_sources",
        "bundle",
        "roles",
        "required_topology",
        "homes",
    ),
    *("begin_at", "deadline", "is_runtime_of_queue", "name", "singleton", "array_max_running"),
    *("not_before", "eligible_at", "reservation"),
)
"""The columns of a job that are read when it claims slots, in addition to `num_parts`."""


def lock_waiting(session: Session, job_ids: Collection[str]) -> dict[str, Row[Any]]:
    """Lock the jobs that are still waiting, and return a dict from job id to a row with the columns
    `_CLAIMED`.

    Until this transaction ends, no other transaction can change these jobs.
    """
    found: dict[str, Row[Any]] = {}
    for some in in_chunks(sorted(job_ids), CHUNK):
        rows = session.connection().execute(_locking_waiting(), {"job_ids": some})
        found.update((row.id, row) for row in rows)
    return found


@cache
def _locking_waiting() -> Select[Any]:
    c = JobRow.__table__.c
    query = select(*(c[name] for name in _CLAIMED), num_parts(c))
    query = query.where(c.id.in_(bindparam("job_ids", expanding=True)), c.state == JobState.QUEUED)
    return query.order_by(c.id).with_for_update()


def change_waiting(session: Session, changes: Sequence[Mapping[str, Any]]) -> None:
    """Change jobs that `lock_waiting` returned.

    Each item of `changes` contains `job_id` and the new values of columns. The columns must be the
    same for all jobs.
    """
    if not changes:
        return
    names = tuple(name for name in changes[0] if name != "job_id")
    rows = [
        {"job_id": one["job_id"], **{f"new_{name}": one[name] for name in names}} for one in changes
    ]
    changed = session.connection().execute(_change_waiting(names), rows).rowcount
    assert changed == len(rows), "a locked row was changed by another transaction"


@cache
def _change_waiting(names: tuple[str, ...]) -> Update:
    """Return a statement that sets these columns of a waiting job. The parameter for a column is
    named `new_` followed by the column's name."""
    table = table_of(JobRow)
    return (
        update(table)
        .where(table.c.id == bindparam("job_id"), table.c.state == JobState.QUEUED)
        .values({name: bindparam(f"new_{name}", type_=table.c[name].type) for name in names})
    )


_PLANNED = (
    *("id", "number", "queue", "owner", "priority", "rank", "held_by", "state", "attempt"),
    *("num_workers", "num_spares", "min_workers", "bundle", "roles", "required_topology", "homes"),
    *("not_before", "begin_at", "deadline", "singleton", "is_runtime_of_queue"),
    *("max_runtime_s", "runtime_used_s", "project", "reservation"),
    *("yields", "progress", "name", "created_at", "array_id", "array_max_running"),
    "array_index",
    *("kept_back_s", "kept_back_since", "preemptions"),
)
"""The columns of a job that planning reads, in addition to `num_parts`."""


def unfinished(session: Session) -> Sequence[Row[Any]]:
    return in_state(session, UNFINISHED)


def in_state(session: Session, states: tuple[JobState, ...]) -> Sequence[Row[Any]]:
    """Return the columns `_PLANNED` of jobs in these states, ordered by priority, rank and
    submission."""
    return session.connection().execute(_in_state(states)).all()


@cache
def _in_state(states: tuple[JobState, ...]) -> Select[Any]:
    c = JobRow.__table__.c
    return (
        select(*(c[name] for name in _PLANNED), num_parts(c))
        .where(c.state.in_(states), c.deleted_at.is_(None))
        .order_by(c.priority.desc(), c.rank, c.number)
    )


def unfinished_named(session: Session, owner: str, name: str) -> Sequence[Row[str, JobState]]:
    """Return the id and state of the owner's unfinished jobs with this name, in the order of their
    submission."""
    query = select(JobRow.id, JobRow.state).where(
        JobRow.owner == owner, JobRow.name == name, JobRow.finished_at.is_(None)
    )
    return session.execute(query.order_by(JobRow.number)).all()


_NOTED = (
    *("id", "held_by", "reason_code", "reason_message", "position", "blocked_by"),
    *("kept_back_s", "kept_back_since", "eligible_at"),
)
"""The columns that explain why a job is waiting."""


def waiting_notes(session: Session) -> dict[str, Row[Any]]:
    """Return the columns `_NOTED` of all waiting jobs, keyed by job id."""
    return {row.id: row for row in session.connection().execute(_waiting_notes())}


def waiting_notes_of(session: Session, job_ids: Sequence[str]) -> dict[str, Row[Any]]:
    """Return the columns `_NOTED` of the waiting jobs among `job_ids`, keyed by job id."""
    found: dict[str, Row[Any]] = {}
    for some in in_chunks(job_ids, CHUNK):
        rows = session.connection().execute(_waiting_notes_of(), {"job_ids": some})
        found.update((row.id, row) for row in rows)
    return found


@cache
def _waiting_notes_of() -> Select[Any]:
    return _waiting_notes().where(JobRow.id.in_(bindparam("job_ids", expanding=True)))


@cache
def _waiting_notes() -> Select[Any]:
    c = JobRow.__table__.c
    query = select(*(c[name] for name in _NOTED))
    return query.where(c.state == JobState.QUEUED, c.deleted_at.is_(None))


def note_waiting(session: Session, notes: Sequence[Mapping[str, Any]]) -> None:
    """Store the reasons why jobs are waiting. A single statement updates all jobs, because when a
    job starts, all jobs behind it move up.

    Each item of `notes` contains `job_id` and the columns in `_NOTE`. The key for a column is
    `new_` followed by the column's name.
    """
    if notes:
        session.connection().execute(_change_waiting(_NOTE), list(notes))


_NOTE = (
    *("reason_code", "reason_message", "position", "blocked_by"),
    *("kept_back_s", "kept_back_since", "eligible_at"),
)
"""The columns of a note."""


def count_events_of_waiting(
    session: Session, job_ids: Sequence[str], code: str
) -> Sequence[Row[str, int, int]]:
    """Reserve an event number for each of these jobs that is waiting and whose latest event has a
    different code. Return (job id, reserved event number, attempt)."""
    newest = select(EventRow.seq).where(
        EventRow.job_id == JobRow.id, EventRow.seq == JobRow.event_seq, EventRow.code == code
    )
    found: list[Row[str, int, int]] = []
    for some in in_chunks(job_ids, CHUNK):
        here = JobRow.id.in_(some), JobRow.state == JobState.QUEUED, ~newest.exists()
        found += session.execute(
            update(JobRow)
            .where(*here)
            .values(event_seq=JobRow.event_seq + 1)
            .returning(JobRow.id, JobRow.event_seq, JobRow.attempt)
            .execution_options(synchronize_session=False)
        ).all()
    return found


_NAMED: tuple[Any, ...] = (JobRow.id, JobRow.name, JobRow.state, JobRow.priority, JobRow.world_size)
"""The columns of a job that are shown in explanations of other jobs."""


def first_in_queue(session: Session, before: int) -> Sequence[Row[Any]]:
    """Return the columns `_NAMED` of up to 20 waiting jobs before this position in the latest
    plan."""
    # No condition on the state is needed, because only waiting jobs have a position. A condition on
    # the state would also make SQLite choose a slower index.
    query: Select[Any] = select(*_NAMED).where(text(FIRST_POSITIONS), JobRow.position < before)
    return session.execute(query.order_by(JobRow.position, JobRow.number)).all()


def waiting_for(session: Session, code: str) -> dict[str, str]:
    """Return the reason's message for each waiting job that has this reason, keyed by job id."""
    query = select(JobRow.id, JobRow.reason_message)
    query = query.where(JobRow.state == JobState.QUEUED, JobRow.reason_code == code)
    return {row.id: row.reason_message for row in session.execute(query)}


def named(session: Session, job_ids: Sequence[str]) -> dict[str, Row[Any]]:
    """Return the columns `_NAMED` of these jobs, keyed by job id."""
    rows = session.execute(select(*_NAMED).where(JobRow.id.in_(job_ids)))
    return {row.id: row for row in rows}


def count_queued(session: Session) -> int:
    # A job that is being deleted is never queued.
    query = select(func.count()).select_from(JobRow).where(JobRow.state == JobState.QUEUED)
    return session.scalar(query) or 0


def holding_slots(session: Session, first: Sequence[str], limit: int) -> Sequence[Row[Any]]:
    """Return the columns `_NAMED` of up to `limit` jobs with a live attempt: first the jobs in
    `first`, then the oldest other jobs."""
    live = select(AttemptRow.job_id).where(AttemptRow.finished_at.is_(None))
    query: Select[Any] = select(*_NAMED).where(JobRow.id.in_(live))
    order = (JobRow.id.in_(first).desc(), JobRow.number)
    return session.execute(query.order_by(*order).limit(limit)).all()
