"""SQL on the deployment's own row and on what was last seen of the cluster."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from sqlalchemy import delete, select
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.orm import Session

from service.db.models import ClusterRow, DeploymentRow, NodeRow
from service.domain.ids import new_deployment_id

THE_CLUSTER = 1


def get(session: Session) -> ClusterRow | None:
    return session.get(ClusterRow, THE_CLUSTER)


def nodes(session: Session) -> list[NodeRow]:
    return list(session.scalars(select(NodeRow).order_by(NodeRow.node_id)))


def put(session: Session, row: ClusterRow) -> None:
    _upsert(session, ClusterRow, [row], "id")


def replace_nodes(session: Session, rows: Sequence[NodeRow]) -> None:
    names = [row.node_id for row in rows]
    session.execute(delete(NodeRow).where(NodeRow.node_id.not_in(names)))
    _upsert(session, NodeRow, rows, "node_id")


def _upsert(
    session: Session,
    table: type[ClusterRow] | type[NodeRow],
    rows: Sequence[ClusterRow] | Sequence[NodeRow],
    key: str,
) -> None:
    """Insert or overwrite, so that two services that look at once do not collide."""
    names = [column.name for column in table.__table__.columns]
    insert_ = (
        postgresql.insert if session.get_bind().dialect.name == "postgresql" else sqlite.insert
    )
    for row in rows:
        statement = insert_(table).values({name: getattr(row, name) for name in names})
        session.execute(
            statement.on_conflict_do_update(
                index_elements=[key],
                set_={name: statement.excluded[name] for name in names if name != key},
            )
        )
    session.expire_all()


def ensure_deployment(session: Session, now: datetime) -> str:
    """The id of this deployment, made up when the database is first used."""
    oldest = select(DeploymentRow.id).order_by(DeploymentRow.created_at, DeploymentRow.id).limit(1)
    existing = session.scalar(oldest)
    if existing is not None:
        return existing
    session.add(DeploymentRow(id=new_deployment_id(), created_at=now))
    session.flush()
    return session.scalars(oldest).one()
