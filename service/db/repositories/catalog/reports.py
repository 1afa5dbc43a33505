"""SQL for reports."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import func, select
from sqlalchemy.orm import Session, defer

from service.db.models import ReportRow
from service.db.session import wait_for_others

LOCK_OF_REPORTS = 0x72657074
"""Key of the advisory lock of transactions that add reports, so that no user exceeds the limit."""


def get(session: Session, report_id: str, *, lock: bool = False) -> ReportRow | None:
    """Return a report. lock: no other transaction changes it until this transaction ends."""
    return session.get(ReportRow, report_id, with_for_update=lock or None, populate_existing=lock)


def number(session: Session, owner: str) -> int:
    """Return the number of reports of this owner. No other transaction adds reports until this
    transaction ends."""
    wait_for_others(session, LOCK_OF_REPORTS)
    query = select(func.count()).select_from(ReportRow).where(ReportRow.owner == owner)
    return session.scalar(query) or 0


def page(
    session: Session, owner: str | None, project: str | None, before: str | None, limit: int
) -> Sequence[ReportRow]:
    """Return the reports of an owner and of a project whose ids precede `before`, newest first and
    without their texts."""
    row = ReportRow
    without_text = defer(row.text, raiseload=True)
    query = select(row).options(without_text).order_by(row.id.desc()).limit(limit)
    if owner is not None:
        query = query.where(row.owner == owner)
    if project is not None:
        query = query.where(row.project == project)
    if before is not None:
        query = query.where(row.id < before)
    return session.scalars(query).all()
