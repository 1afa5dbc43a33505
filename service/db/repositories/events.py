"""SQL for events of jobs."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import cache
from typing import Any

from sqlalchemy import Insert, Select, bindparam, select
from sqlalchemy import insert as sql_insert
from sqlalchemy.orm import Session

from service.db.models import EventRow, JobRow
from service.db.repositories import jobs
from service.db.repositories.bulk import CHUNK, in_chunks, table_of


def count_event(session: Session, row: JobRow) -> int:
    """Return the number of the job's next event. The job's row remains locked, so that there are no
    gaps."""
    if not jobs.is_locked(session, row.id):
        jobs.lock(session, row.id)
    row.event_seq += 1
    return row.event_seq


def has_event(session: Session, job_id: str, type_: str, attempt: int | None = None) -> bool:
    """Whether the job (or this attempt of it, if given) has an event of this type."""
    query = select(EventRow.seq).where(EventRow.job_id == job_id, EventRow.type == type_).limit(1)
    if attempt is not None:
        query = query.where(EventRow.attempt == attempt)
    return session.scalar(query) is not None


def with_event(session: Session, job_ids: Collection[str], type_: str) -> set[tuple[str, int]]:
    """Return (job, attempt) of each event of this type that belongs to one of these jobs."""
    return {
        (job_id, attempt)
        for some in in_chunks(sorted(job_ids), CHUNK)
        for job_id, attempt in session.connection().execute(
            _with_event(), {"job_ids": some, "type": type_}
        )
    }


@cache
def _with_event() -> Select[str, int]:
    c = EventRow.__table__.c
    query = select(c.job_id, c.attempt).where(c.type == bindparam("type"))
    return query.where(c.job_id.in_(bindparam("job_ids", expanding=True)))


def add_events(session: Session, rows: Sequence[Mapping[str, Any]]) -> None:
    if rows:
        session.connection().execute(_add_events(), list(rows))


@cache
def _add_events() -> Insert:
    return sql_insert(table_of(EventRow))


def events_after(session: Session, job_id: str, after_seq: int, limit: int) -> list[EventRow]:
    asked = {"job_id": job_id, "after_seq": after_seq, "limit": limit}
    return list(session.scalars(_events_after(), asked))


@cache
def _events_after() -> Select[EventRow]:
    return (
        select(EventRow)
        .where(EventRow.job_id == bindparam("job_id"), EventRow.seq > bindparam("after_seq"))
        .order_by(EventRow.seq)
        .limit(bindparam("limit"))
    )
