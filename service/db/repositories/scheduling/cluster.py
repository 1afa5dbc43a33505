"""SQL for the deployment's row and for the last known state of the cluster."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from functools import cache
from typing import Any

from sqlalchemy import Executable, Select, Text, bindparam, cast, delete, func, select
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.orm import Session

from service.config.node_types import SILO_LABEL
from service.db.models import AutoscalingRow, ClusterRow, DeploymentRow, NodeRow
from service.db.session import wait_for_others
from service.domain.ids import new_deployment_id

THE_CLUSTER = 1
LOCK_OF_DEPLOYMENT = 0x6465706C
"""Key of the advisory lock of transactions that add the deployment's row."""


def get(session: Session) -> ClusterRow | None:
    return session.get(ClusterRow, THE_CLUSTER)


def usable_totals(session: Session) -> list[tuple[dict[str, float], bool, int]]:
    """Return (resources, whether reserved for silos, number of nodes) for each kind of node that
    can run ranks."""
    found = session.connection().execute(_usable_totals())
    return [(json.loads(total), is_silo, number) for total, is_silo, number in found]


@cache
def _usable_totals() -> Select[str, bool, int]:
    c = NodeRow.__table__.c
    total = cast(c.total, Text)  # PostgreSQL can't compare JSON
    is_silo = cast(c.labels, Text).contains(f'"{SILO_LABEL}":')
    query = select(total, is_silo, func.count()).where(c.alive, c.accepted)
    return query.group_by(total, is_silo).order_by(total, is_silo)


def nodes(session: Session) -> list[NodeRow]:
    return list(session.scalars(select(NodeRow).order_by(NodeRow.node_id)))


def labels(session: Session, node_ids: Sequence[str]) -> dict[str, dict[str, str]]:
    """Return the labels of these nodes, keyed by node id. Unknown nodes are omitted."""
    found = session.connection().execute(_labels(), {"node_ids": node_ids})
    return {row.node_id: row.labels for row in found}


@cache
def _labels() -> Select[Any]:
    c = NodeRow.__table__.c
    query = select(c.node_id, c.labels)
    return query.where(c.node_id.in_(bindparam("node_ids", expanding=True)))


def hostnames(session: Session, node_ids: Sequence[str]) -> dict[str, str]:
    """Return the host names of these nodes, keyed by node id. Unknown nodes are omitted."""
    query = select(NodeRow.node_id, NodeRow.hostname).where(NodeRow.node_id.in_(node_ids))
    return {row.node_id: row.hostname for row in session.execute(query)}


def put(session: Session, row: ClusterRow) -> None:
    _overwrite(session, [row])


def autoscaling(session: Session) -> AutoscalingRow | None:
    """Return the latest request to Ray's autoscaler; None before the first request."""
    return session.get(AutoscalingRow, THE_CLUSTER)


def put_autoscaling(session: Session, row: AutoscalingRow) -> None:
    row.id = THE_CLUSTER
    session.merge(row)


def replace_nodes(session: Session, rows: Sequence[NodeRow]) -> None:
    names = [row.node_id for row in rows]
    session.execute(delete(NodeRow).where(NodeRow.node_id.not_in(names)))
    _overwrite(session, rows)


def _overwrite(session: Session, rows: Sequence[ClusterRow] | Sequence[NodeRow]) -> None:
    """Insert rows, or overwrite existing rows, so that two services that write at the same time
    don't conflict."""
    if not rows:
        return
    table = type(rows[0])
    names = [column.name for column in table.__table__.columns]
    values = [{name: getattr(row, name) for name in names} for row in rows]
    session.connection().execute(_upsert(table, session.get_bind().dialect.name), values)
    session.expire_all()


@cache
def _upsert(table: type[ClusterRow] | type[NodeRow], dialect: str) -> Executable:
    insert_ = postgresql.insert if dialect == "postgresql" else sqlite.insert
    statement = insert_(table)
    keys = [column.name for column in table.__table__.columns if column.primary_key]
    others = [column.name for column in table.__table__.columns if not column.primary_key]
    return statement.on_conflict_do_update(
        index_elements=keys, set_={name: statement.excluded[name] for name in others}
    )


def ensure_deployment(session: Session, now: datetime) -> str:
    """Return the id of this deployment, which is generated on the first use of the database."""
    oldest = select(DeploymentRow.id).order_by(DeploymentRow.created_at, DeploymentRow.id).limit(1)
    existing = session.scalar(oldest)
    if existing is not None:
        return existing
    wait_for_others(session, LOCK_OF_DEPLOYMENT)
    if session.scalar(oldest) is None:
        session.add(DeploymentRow(id=new_deployment_id(), created_at=now))
        session.flush()
    return session.scalars(oldest).one()
