"""SQL for self-tests of nodes."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import select
from sqlalchemy.orm import Session

from service.db.models import NodeCheckRow


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
