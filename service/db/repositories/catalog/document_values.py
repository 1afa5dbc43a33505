"""SQL for the values of documents, for use in searches."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import cache
from typing import Any

from sqlalchemy import Insert, delete, exists, select
from sqlalchemy import insert as sql_insert
from sqlalchemy.orm import Session, aliased

from service.db.models import DocumentValueRow
from service.db.repositories.bulk import CHUNK, in_chunks, insert_of, table_of
from service.domain.ids import is_array_id
from service.domain.tracking.document_values import SharedValues, StoredValue, Values

SHARES = ""
"""The `pointer` of a row whose `text` is the holder with which a job shares values."""


def insert_shared(session: Session, shared: SharedValues) -> None:
    """Store values that jobs share. Storing the same values again has no effect."""
    known = select(DocumentValueRow.holder).where(DocumentValueRow.holder == shared.holder)
    if session.connection().execute(known.limit(1)).first() is not None:
        return
    # Ignore conflicts, because another transaction might be about to commit the same values.
    statement = insert_of(session)(table_of(DocumentValueRow)).on_conflict_do_nothing()
    session.connection().execute(statement, _rows(shared.holder, shared.values))


def insert(session: Session, holder: str, own: Mapping[str, Values]) -> None:
    """Store the jobs' own values. `own` contains these values, keyed by job id. The jobs share all
    other values with `holder`."""
    rows = [
        row
        for job_id, values in own.items()
        for row in _rows(job_id, {SHARES: StoredValue(None, holder), **values})
    ]
    session.connection().execute(_insert(), rows)


@cache
def _insert() -> Insert:
    return sql_insert(table_of(DocumentValueRow))


def _rows(holder: str, values: Values) -> list[dict[str, Any]]:
    return [
        {"holder": holder, "pointer": pointer, "number": value.number, "text": value.text}
        for pointer, value in values.items()
    ]


def replace(session: Session, job_id: str, holder: str, own: Values) -> None:
    """Replace the values of a job whose document has changed."""
    session.connection().execute(delete(DocumentValueRow).where(DocumentValueRow.holder == job_id))
    insert(session, holder, {job_id: own})


def change(session: Session, job_id: str, changed: Values) -> None:
    """Store the values of a job's document that have changed."""
    if not changed:
        return
    c = DocumentValueRow
    for some in in_chunks(sorted(changed), CHUNK):
        session.connection().execute(delete(c).where(c.holder == job_id, c.pointer.in_(some)))
    session.connection().execute(_insert(), _rows(job_id, changed))


def drop(session: Session, job_ids: Collection[str]) -> None:
    """Delete the values of jobs, and of arrays that have no jobs left."""
    c = DocumentValueRow
    arrays: set[str] = set()
    for some in in_chunks(sorted(job_ids), CHUNK):
        shares = select(c.text).where(c.holder.in_(some), c.pointer == SHARES).distinct()
        arrays.update(holder for holder in session.scalars(shares) if holder is not None)
        session.connection().execute(delete(c).where(c.holder.in_(some)))
    for holder in filter(is_array_id, arrays):
        sharer = aliased(c)
        is_shared = exists().where(sharer.pointer == SHARES, sharer.text == holder)
        session.connection().execute(delete(c).where(c.holder == holder, ~is_shared))
