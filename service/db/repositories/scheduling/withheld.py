"""SQL for the faults that keep nodes from getting new work."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta

from sqlalchemy import Row, delete, func, select, update
from sqlalchemy.orm import Session

from service.db.models import NodeRow, ProgramFaultRow, WithheldRow
from service.db.session import wait_for_others

LOCK_OF_CHANGES = 0x73696B67
"""Key of the advisory lock of transactions that change these rows."""


def lock_changes(session: Session) -> None:
    """Wait for all other transactions that change withheld nodes."""
    wait_for_others(session, LOCK_OF_CHANGES)


def get(session: Session, hostname: str, gpu: str, code: str) -> WithheldRow | None:
    return session.get(WithheldRow, (hostname, gpu, code))


def program_fault(session: Session, job_id: str, code: str) -> ProgramFaultRow | None:
    return session.get(ProgramFaultRow, (job_id, code))


def counted_before(session: Session, until: datetime) -> Sequence[Row[str, str]]:
    """Return (job id, code) of each program error whose last event is older than `until`."""
    query = select(ProgramFaultRow.job_id, ProgramFaultRow.code)
    query = query.where(ProgramFaultRow.reported_at <= until)
    return session.execute(query.order_by(ProgramFaultRow.job_id, ProgramFaultRow.code)).all()


def add(session: Session, row: WithheldRow | ProgramFaultRow) -> None:
    session.add(row)
    session.flush()


def every(session: Session) -> Sequence[WithheldRow]:
    """Return all rows, including released rows."""
    return session.scalars(select(WithheldRow)).all()


def active(session: Session, hostname: str | None = None) -> Sequence[WithheldRow]:
    """Return the faults that withhold slots, or only the faults of one host, in the order of
    their times."""
    query = select(WithheldRow).where(WithheldRow.is_active)
    if hostname is not None:
        query = query.where(WithheldRow.hostname == hostname)
    order = (WithheldRow.since, WithheldRow.hostname, WithheldRow.gpu, WithheldRow.code)
    return session.scalars(query.order_by(*order)).all()


def forget(session: Session, now: datetime, kept: timedelta) -> None:
    """Record which hosts are missing from the cluster, and delete the rows of hosts that have been
    missing for longer than `kept`."""
    missing = WithheldRow.hostname.not_in(select(func.substr(NodeRow.hostname, 1, 255)))
    session.execute(update(WithheldRow).where(~missing).values(absent_since=None))
    left = missing & WithheldRow.absent_since.is_(None)
    session.execute(update(WithheldRow).where(left).values(absent_since=now))
    session.execute(delete(WithheldRow).where(WithheldRow.absent_since < now - kept))


def remove(session: Session, row: WithheldRow) -> None:
    key = (WithheldRow.hostname == row.hostname, WithheldRow.gpu == row.gpu)
    session.execute(delete(WithheldRow).where(*key, WithheldRow.code == row.code))
