"""SQL for browsers that stay signed in."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from datetime import datetime

from sqlalchemy import ColumnElement, delete, select
from sqlalchemy.orm import Session

from service.db.models import BrowserSessionRow


def add(session: Session, row: BrowserSessionRow) -> None:
    """Add a session. Adding the same session again has no effect."""
    session.merge(row)


def find(session: Session, cookies_sha256: Collection[str]) -> Sequence[BrowserSessionRow]:
    """Return the sessions with these cookies."""
    query = select(BrowserSessionRow).where(BrowserSessionRow.cookie_sha256.in_(cookies_sha256))
    return session.scalars(query).all()


def remove(session: Session, cookies_sha256: Collection[str]) -> None:
    _delete(session, BrowserSessionRow.cookie_sha256.in_(cookies_sha256))


def remove_of(session: Session, owner: str, *, but_newest: int = 0) -> None:
    """Delete the sessions of a user, except for the newest ones."""
    newest = (
        select(BrowserSessionRow.cookie_sha256)
        .where(BrowserSessionRow.owner == owner)
        .order_by(BrowserSessionRow.created_at.desc(), BrowserSessionRow.cookie_sha256)
        .limit(but_newest)
    )
    is_older = BrowserSessionRow.cookie_sha256.not_in(newest)
    _delete(session, BrowserSessionRow.owner == owner, is_older)


def delete_expired(session: Session, now: datetime) -> None:
    _delete(session, BrowserSessionRow.expires_at <= now)


def _delete(session: Session, *conditions: ColumnElement[bool]) -> None:
    statement = delete(BrowserSessionRow).where(*conditions)
    session.execute(statement.execution_options(synchronize_session=False))
