"""SQL for queues: their rules, and the jobs that wait and run in them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, fields
from functools import cache
from typing import Any

from sqlalchemy import (
    ColumnElement,
    Row,
    Select,
    bindparam,
    delete,
    func,
    or_,
    select,
    true,
    update,
)
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.orm import Session, aliased

from dray.views import JobState
from service.db.models import AttemptRow, JobRow, QueueRow
from service.db.session import wait_for_others
from service.domain.ids import is_array_id
from service.domain.scheduling.rules.queues import BOUNDS_OF_WAITING, Queue
from service.domain.states import UNFINISHED

_RULES = tuple(field.name for field in fields(Queue))


def every(session: Session) -> tuple[Queue, ...]:
    """Return all queues, sorted by name."""
    return tuple(Queue(*row) for row in session.connection().execute(_every()))


@cache
def _every() -> Select[Any]:
    c = QueueRow.__table__.c
    return select(*(c[name] for name in _RULES)).order_by(c.name)


def get(session: Session, name: str) -> Queue | None:
    return _found(session, _named(), name)


_LOCKED = "locked_queues"


def lock(session: Session, name: str) -> tuple[Queue, bool] | None:
    """Lock the queue, and return the queue and whether it has children; None if it does not exist.

    Until this transaction ends, no other transaction can delete the queue or change its rules. If
    the queue limits the number of waiting jobs, no other transaction can add waiting jobs either. A
    queue without such a limit is locked in shared mode, so that submissions to it do not wait for
    each other. A queue that this transaction has already locked is not read again.
    """
    locked: dict[str, tuple[Queue, bool]] = session.info.setdefault(_LOCKED, {})
    for shared in (True, False) if name not in locked else ():
        query = _locking(shared=shared).add_columns(QueueRow.is_parent)
        row = session.connection().execute(query, {"queue": name}).one_or_none()
        if row is not None:
            locked[name] = Queue(*row[:-1]), row[-1]
            break
    return locked.get(name)


def lock_alone(session: Session, name: str) -> Queue | None:
    """Lock the queue in exclusive mode, and return it; None if it does not exist."""
    return _found(session, _locking(shared=False), name)


def _found(session: Session, query: Select[Any], name: str) -> Queue | None:
    row = session.connection().execute(query, {"queue": name}).one_or_none()
    return None if row is None else Queue(*row)


@cache
def _named() -> Select[Any]:
    return _every().where(QueueRow.__table__.c.name == bindparam("queue"))


@cache
def _locking(*, shared: bool) -> Select[Any]:
    """Return a locking query. With `shared`, the query locks in shared mode, and matches only
    queues without limits on waiting jobs."""
    c = QueueRow.__table__.c
    bounds = [c[name].is_(None) for name in BOUNDS_OF_WAITING if shared]
    return _named().where(*bounds).with_for_update(read=shared)


LOCK_OF_TREE = 0x71756575
"""Key of the advisory lock of transactions that change queues. Without the lock, two such
transactions could close a circle, or use a quota of their parent twice."""


def lock_tree(session: Session) -> None:
    """Wait for all other transactions that change queues. Call this before locking any queue."""
    wait_for_others(session, LOCK_OF_TREE)


def children(session: Session, name: str) -> Sequence[str]:
    """Return the names of the queue's children, sorted."""
    query = select(QueueRow.name).where(QueueRow.parent == name).order_by(QueueRow.name)
    return session.scalars(query).all()


def mark_parents(session: Session) -> None:
    """Update `is_parent` of all queues after a change of any parent."""
    child = aliased(QueueRow)
    has = select(child.name).where(child.parent == QueueRow.name).correlate(QueueRow).exists()
    changed = update(QueueRow).where(QueueRow.is_parent != has).values(is_parent=has)
    session.execute(changed.execution_options(synchronize_session=False))


def put(session: Session, queue: Queue) -> None:
    """Add a queue, or replace its rules."""
    _upsert(session, queue, asdict(queue))
    mark_parents(session)


def add(session: Session, queue: Queue) -> None:
    """Add a queue. If the queue already exists, only lock it until this transaction ends."""
    _upsert(session, queue, {"name": queue.name})


def _upsert(session: Session, queue: Queue, changes: dict[str, Any]) -> None:
    """Insert a queue, or set the columns in `changes` if it already exists."""
    is_postgres = session.get_bind().dialect.name == "postgresql"
    insert = postgresql.insert if is_postgres else sqlite.insert
    statement = insert(QueueRow).values(**asdict(queue))
    session.execute(statement.on_conflict_do_update(index_elements=["name"], set_=changes))


def remove(session: Session, name: str) -> None:
    session.execute(delete(QueueRow).where(QueueRow.name == name))
    mark_parents(session)


def _waiting() -> tuple[ColumnElement[bool], ...]:
    # The second condition lets the database use the index on queue, state and owner.
    return JobRow.state == JobState.QUEUED, JobRow.finished_at.is_(None)


def count_waiting(session: Session, queues: Sequence[str], owner: str | None = None) -> int:
    """Return the number of jobs waiting in the queues (of this owner, if given)."""
    query = select(func.count()).where(*_waiting(), _is_in(queues))
    return session.scalar(query if owner is None else query.where(JobRow.owner == owner)) or 0


def count_unfinished(session: Session, queue: str) -> int:
    query = select(func.count()).where(JobRow.queue == queue, *_unfinished())
    return session.scalar(query) or 0


def first_rank(session: Session, queue: str, priority: int, *, but: str) -> int | None:
    """Return the lowest rank among the queue's waiting jobs with this priority, excluding the job
    `but` or, if `but` is an array, the array's jobs; None if there are no such jobs."""
    others = JobRow.id != but
    if is_array_id(but):
        others = or_(JobRow.array_id.is_(None), JobRow.array_id != but)
    here = (*_waiting(), JobRow.queue == queue, JobRow.priority == priority, others)
    return session.scalar(select(func.min(JobRow.rank)).where(*here))


def waiting(
    session: Session, queues: Sequence[str] | None = None
) -> Sequence[Row[str, str, int, int]]:
    """Return (queue, owner, number of waiting jobs, number of waiting jobs that are on hold)."""
    counts = (func.count(), func.count(JobRow.held_by))
    query = select(JobRow.queue, JobRow.owner, *counts).where(*_waiting(), _is_in(queues))
    return session.execute(query.group_by(JobRow.queue, JobRow.owner)).all()


def running(
    session: Session, queues: Sequence[str] | None = None
) -> Sequence[Row[str, str, Any, Any, Any]]:
    """Return (queue, owner, slices, bundle, roles) of each attempt that might hold slots."""
    held = (AttemptRow.slices, AttemptRow.bundle, AttemptRow.roles)
    columns = (JobRow.queue, JobRow.owner, *held)
    live = (AttemptRow.finished_at.is_(None), *_unfinished())
    query = select(*columns).join(AttemptRow, AttemptRow.job_id == JobRow.id)
    return session.execute(query.where(*live, _is_in(queues))).all()


def _unfinished() -> tuple[ColumnElement[bool], ...]:
    # If `finished_at` were the only condition, SQLite might scan all jobs that were ever in the
    # queue.
    return JobRow.finished_at.is_(None), JobRow.state.in_(UNFINISHED)


def _is_in(queues: Sequence[str] | None) -> ColumnElement[bool]:
    return true() if queues is None else JobRow.queue.in_(queues)
