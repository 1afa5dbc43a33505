"""SQL on queues: their rules, and the jobs that wait and run in them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, fields
from typing import Any

from sqlalchemy import ColumnElement, Row, Select, delete, func, select
from sqlalchemy.orm import Session

from dray.views import JobState
from service.db.models import AttemptRow, JobRow, QueueRow
from service.domain.scheduling.queues import Queue

_RULES = tuple(field.name for field in fields(Queue))


def every(session: Session) -> tuple[Queue, ...]:
    """All queues, by name."""
    columns = (QueueRow.__table__.c[name] for name in _RULES)
    rows = session.connection().execute(select(*columns).order_by(QueueRow.name))
    return tuple(Queue(*row) for row in rows)


def get(session: Session, name: str) -> Queue | None:
    return _as_queue(session.get(QueueRow, name))


def lock(session: Session, name: str, *, shared: bool = False) -> Queue | None:
    """The queue as it is now; its rules stay, and it exists, until this transaction ends.

    shared: others may hold the lock, too, as long as nobody changes the queue.
    """
    query = select(QueueRow).where(QueueRow.name == name).with_for_update(read=shared)
    return _as_queue(session.scalar(query.execution_options(populate_existing=True)))


def _as_queue(row: QueueRow | None) -> Queue | None:
    return None if row is None else Queue(**{name: getattr(row, name) for name in _RULES})


def put(session: Session, queue: Queue) -> None:
    """Add it, or replace the rules that it had."""
    session.merge(QueueRow(**asdict(queue)))


def remove(session: Session, name: str) -> None:
    session.execute(delete(QueueRow).where(QueueRow.name == name))


def _waiting() -> tuple[ColumnElement[bool], ...]:
    # The second condition is that of the index by queue, owner and state.
    return JobRow.state == JobState.QUEUED, JobRow.finished_at.is_(None)


def count_waiting(session: Session, queue: str, owner: str | None = None) -> int:
    """Jobs that wait in the queue, or those of one owner."""
    query = select(func.count()).where(*_waiting(), JobRow.queue == queue)
    return session.scalar(query if owner is None else query.where(JobRow.owner == owner)) or 0


def count_unfinished(session: Session, queue: str) -> int:
    query = select(func.count()).where(JobRow.queue == queue, JobRow.finished_at.is_(None))
    return session.scalar(query) or 0


def lowest_rank(session: Session, queue: str, priority: int) -> int:
    """The rank of the first among the queue's waiting jobs of this priority; 0 if none waits."""
    at_it = (JobRow.queue == queue, JobRow.priority == priority)
    return session.scalar(select(func.min(JobRow.rank)).where(*_waiting(), *at_it)) or 0


def waiting(session: Session, queue: str | None = None) -> Sequence[Row[str, str, int, int]]:
    """(queue, owner, jobs that wait, those of them that are held)."""
    counts = (func.count(), func.count(JobRow.held_by))
    query = select(JobRow.queue, JobRow.owner, *counts).where(*_waiting())
    grouped = _only(query, queue).group_by(JobRow.queue, JobRow.owner)
    return session.execute(grouped).all()


def running(session: Session, queue: str | None = None) -> Sequence[Row[Any, ...]]:
    """(queue, owner, slices, bundle) of each attempt that may hold slots."""
    columns = (JobRow.queue, JobRow.owner, AttemptRow.slices, AttemptRow.bundle)
    live = select(*columns).join(AttemptRow, AttemptRow.job_id == JobRow.id)
    return session.execute(_only(live.where(AttemptRow.finished_at.is_(None)), queue)).all()


def _only(query: Select[Any], queue: str | None) -> Select[Any]:
    return query if queue is None else query.where(JobRow.queue == queue)
