"""SQL for self-tests of nodes."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from sqlalchemy import delete, select
from sqlalchemy.orm import Session

from service.db.models import NodeCheckRow, NodeRow


def get(session: Session, hostname: str) -> NodeCheckRow | None:
    return session.get(NodeCheckRow, hostname, populate_existing=True)


def add(session: Session, row: NodeCheckRow) -> None:
    session.add(row)
    session.flush()


def every(session: Session) -> Sequence[NodeCheckRow]:
    return session.scalars(select(NodeCheckRow).order_by(NodeCheckRow.hostname)).all()


def in_states(session: Session, states: Sequence[str]) -> Sequence[NodeCheckRow]:
    query = select(NodeCheckRow).where(NodeCheckRow.state.in_(states))
    return session.scalars(query.order_by(NodeCheckRow.asked_at, NodeCheckRow.hostname)).all()


def forget(session: Session, before: datetime) -> None:
    """Delete results from before the given time, if their hosts are no longer in the cluster."""
    query = delete(NodeCheckRow).where(NodeCheckRow.state == "done", NodeCheckRow.ended_at < before)
    gone = NodeCheckRow.hostname.not_in(select(NodeRow.hostname))
    session.execute(query.where(gone))
