"""SQL for scheduler rounds that are kept for replay."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from sqlalchemy import Row, delete, func, select
from sqlalchemy.orm import Session

from service.db.models import DecisionRow


def add(session: Session, made_at: datetime, summary: Mapping[str, Any], record: bytes) -> None:
    session.add(
        DecisionRow(made_at=made_at, summary=dict(summary), size_bytes=len(record), record=record)
    )


def get(session: Session, number: int) -> DecisionRow | None:
    return session.get(DecisionRow, number)


def newest(session: Session, before: int | None, limit: int) -> Sequence[Row[Any]]:
    """Return (number, made_at, summary) of decisions with numbers below `before`, newest first."""
    query = select(DecisionRow.number, DecisionRow.made_at, DecisionRow.summary)
    if before is not None:
        query = query.where(DecisionRow.number < before)
    return session.execute(query.order_by(DecisionRow.number.desc()).limit(limit)).all()


def forget(session: Session, before: datetime, most_bytes: int) -> None:
    """Delete decisions that were made before this time, and the oldest decisions if all decisions
    together exceed `most_bytes`."""
    row = DecisionRow
    in_bulk = {"synchronize_session": False}
    session.execute(delete(row).where(row.made_at < before).execution_options(**in_bulk))
    total = func.sum(row.size_bytes).over(order_by=row.number.desc())
    sizes = select(row.number, total.label("total")).subquery()
    last = session.scalar(select(func.max(sizes.c.number)).where(sizes.c.total > most_bytes))
    if last is not None:
        session.execute(delete(row).where(row.number <= last).execution_options(**in_bulk))
