"""The time by the database server's clock."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import func, select
from sqlalchemy.orm import Session

_SERVER_NOW = select(func.clock_timestamp())


def server_now(session: Session) -> datetime:
    """The time at the PostgreSQL server as this statement runs, not as the transaction began."""
    now: datetime = session.connection().execute(_SERVER_NOW).scalar_one()
    return now
