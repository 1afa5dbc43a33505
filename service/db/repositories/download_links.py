"""SQL on links that download one file of a job, once."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from sqlalchemy import Row, delete
from sqlalchemy.orm import Session

from service.db.models import DownloadLinkRow


def add(session: Session, row: DownloadLinkRow) -> None:
    """Harmless to repeat."""
    session.merge(row)


def take(session: Session, secret_sha256: str) -> Row[Any] | None:
    """(job_id, owner, token_id, target, expires_at) of a link, which is gone from then on: of
    several callers with the same secret, one gets it."""
    c = DownloadLinkRow.__table__.c
    statement = delete(DownloadLinkRow.__table__).where(c.secret_sha256 == secret_sha256)
    columns = (c.job_id, c.owner, c.token_id, c.target, c.expires_at)
    return session.connection().execute(statement.returning(*columns)).first()


def delete_expired(session: Session, now: datetime) -> None:
    table = DownloadLinkRow
    session.execute(
        delete(table).where(table.expires_at <= now).execution_options(synchronize_session=False)
    )
