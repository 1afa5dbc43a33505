"""SQL on links that download one file of a job, once."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import delete
from sqlalchemy.orm import Session

from service.db.models import DownloadLinkRow


def add(session: Session, row: DownloadLinkRow) -> None:
    """Harmless to repeat."""
    session.merge(row)


def take(session: Session, secret_sha256: str) -> DownloadLinkRow | None:
    """The link, whose row is gone from then on: of several callers with one secret, one gets it."""
    statement = (
        delete(DownloadLinkRow)
        .where(DownloadLinkRow.secret_sha256 == secret_sha256)
        .returning(DownloadLinkRow)
        .execution_options(synchronize_session=False)
    )
    return session.scalars(statement).first()


def delete_expired(session: Session, now: datetime) -> None:
    table = DownloadLinkRow
    session.execute(
        delete(table).where(table.expires_at <= now).execution_options(synchronize_session=False)
    )
