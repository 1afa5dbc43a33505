"""SQL for uploaded files with examples."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from sqlalchemy import ColumnElement, and_, delete, or_, select, update
from sqlalchemy.orm import Session

from service.db.models import DataFileRow, JobRow

PENDING, STORED, DELETED = "pending", "stored", "deleted"


def insert(session: Session, row: DataFileRow) -> None:
    """Add a file, unless an earlier try of the transaction has added it."""
    if session.get(DataFileRow, row.id) is None:
        session.add(row)
        session.flush()


def get(
    session: Session, owner: str, file_id: str, now: datetime, *, lock: bool = False
) -> DataFileRow | None:
    """Return a stored file of the owner. A locked file can't be deleted meanwhile."""
    query = select(DataFileRow).where(DataFileRow.id == file_id, _visible(owner, now))
    if lock:
        query = query.with_for_update().execution_options(populate_existing=True)
    return session.scalar(query)


def _visible(owner: str, now: datetime) -> ColumnElement[bool]:
    """Whether a file is stored, belongs to the owner, and has not expired."""
    lasts = or_(DataFileRow.expires_at.is_(None), DataFileRow.expires_at > now)
    return and_(DataFileRow.owner == owner, DataFileRow.state == STORED, lasts)


def page(
    session: Session,
    owner: str,
    after: str | None,
    limit: int,
    now: datetime,
    *,
    is_ascending: bool,
) -> list[DataFileRow]:
    """Return the owner's stored files that follow the file `after`, in the order of their ids."""
    key = DataFileRow.id
    query = select(DataFileRow).where(_visible(owner, now))
    if after is not None:
        query = query.where(key > after if is_ascending else key < after)
    query = query.order_by(key if is_ascending else key.desc()).limit(limit)
    return list(session.scalars(query))


def set_state(session: Session, file_id: str, before: str, after: str, now: datetime) -> bool:
    """Change a file's state. Returns False if the state is not `before`."""
    found = session.scalar(
        update(DataFileRow)
        .where(DataFileRow.id == file_id, DataFileRow.state == before)
        .values(state=after, changed_at=now)
        .returning(DataFileRow.id)
    )
    return found is not None


def jobs_with(session: Session, file_id: str, limit: int) -> list[str]:
    """Return jobs that have not ended and read the file."""
    query = select(JobRow.id).where(
        JobRow.finished_at.is_(None),
        JobRow.spec["data"].as_string().contains(file_id, autoescape=True),
    )
    return list(session.scalars(query.order_by(JobRow.id).limit(limit)))


def expired(session: Session, now: datetime, after: str, limit: int) -> Sequence[DataFileRow]:
    """Return stored files that have expired and follow the file `after`, and lock them."""
    query = select(DataFileRow).where(
        DataFileRow.expires_at <= now, DataFileRow.state == STORED, DataFileRow.id > after
    )
    query = query.order_by(DataFileRow.id).limit(limit).with_for_update()
    return session.scalars(query.execution_options(populate_existing=True)).all()


def left(session: Session, before: datetime, limit: int) -> Sequence[str]:
    """Return files that were last changed before that time, and are either not stored or not
    completely deleted."""
    query = select(DataFileRow.id).where(
        DataFileRow.state != STORED, DataFileRow.changed_at < before
    )
    return session.scalars(query.order_by(DataFileRow.id).limit(limit)).all()


def remove(session: Session, file_id: str) -> None:
    """Delete the row of a file whose content was deleted."""
    session.execute(
        delete(DataFileRow).where(DataFileRow.id == file_id, DataFileRow.state != STORED)
    )
