"""SQL for saved views."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import CursorResult, delete, func, select, tuple_
from sqlalchemy.orm import Session

from service.db.models import SavedViewRow
from service.db.repositories.bulk import insert_of, table_of
from service.db.session import wait_for_others

LOCK_OF_CHANGES = 0x76696577
"""Key of the advisory lock of transactions that add views, so that no user exceeds the limit."""


def get(session: Session, owner: str, name: str) -> SavedViewRow | None:
    return session.get(SavedViewRow, (owner, name))


def put(session: Session, columns: dict[str, Any]) -> None:
    """Add a view, or replace the owner's view with this name."""
    statement = insert_of(session)(table_of(SavedViewRow)).values(**columns)
    session.execute(statement.on_conflict_do_update(index_elements=["owner", "name"], set_=columns))


def number(session: Session, owner: str) -> int:
    """Return the number of views of this owner. No other transaction adds views until this
    transaction ends."""
    wait_for_others(session, LOCK_OF_CHANGES)
    query = select(func.count()).select_from(SavedViewRow).where(SavedViewRow.owner == owner)
    return session.scalar(query) or 0


def remove(session: Session, owner: str, name: str) -> bool:
    """Delete a view. Returns False if it does not exist."""
    row = SavedViewRow
    done = session.execute(delete(row).where(row.owner == owner, row.name == name))
    assert isinstance(done, CursorResult)
    return done.rowcount > 0


def page(
    session: Session,
    owner: str | None,
    project: str | None,
    after: tuple[str, str] | None,
    limit: int,
) -> Sequence[SavedViewRow]:
    """Return the views of an owner and of a project, sorted by name and owner."""
    row = SavedViewRow
    query = select(row).order_by(row.name, row.owner).limit(limit)
    if owner is not None:
        query = query.where(row.owner == owner)
    if project is not None:
        query = query.where(row.project == project)
    if after is not None:
        query = query.where(tuple_(row.name, row.owner) > after)
    return session.scalars(query).all()
