"""The deployment, its cluster and storage as last seen, and who runs the loops."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from sqlalchemy import String, text
from sqlalchemy.orm import Mapped, mapped_column

from service.db.models.base import Base


class DeploymentRow(Base):
    """The one row that says which dray this is."""

    __tablename__ = "deployment"
    id: Mapped[str] = mapped_column(String(64), primary_key=True)
    created_at: Mapped[datetime]


class ClusterRow(Base):
    """The cluster as it was last seen; one row."""

    __tablename__ = "cluster"
    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    connected: Mapped[bool]
    reason: Mapped[str | None]
    ray_address: Mapped[str | None]
    ray_dashboard: Mapped[str | None]
    session: Mapped[str | None]
    updated_at: Mapped[datetime]


class AutoscalingRow(Base):
    """The newest request to Ray's autoscaler; one row."""

    __tablename__ = "autoscaling"
    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    num_nodes: Mapped[int]
    """Number of nodes that are to come."""
    bundles: Mapped[list[Any]]
    """The floor under the cluster's size: `[bundle, number]` pairs. Empty once it is withdrawn."""
    asked_at: Mapped[datetime | None]
    """Since when nodes are to come; unset while none is."""


class StorageStateRow(Base):
    """How full the storage was when it was last looked at; one row."""

    __tablename__ = "storage_state"
    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    used_bytes: Mapped[int | None]
    """Of checkpoints, artifacts and logs by their rows; unset where no setting asks for it."""
    free_bytes: Mapped[int | None]
    """Of the disk under it, the lesser of storage and database; unset of an object store."""
    problem: Mapped[str | None]
    """Why no job is taken or started; unset while there is room."""
    updated_at: Mapped[datetime]


class NodeRow(Base):
    __tablename__ = "nodes"
    node_id: Mapped[str] = mapped_column(String(128), primary_key=True)
    hostname: Mapped[str]
    alive: Mapped[bool]
    accepted: Mapped[bool]
    reason: Mapped[str | None]
    total: Mapped[dict[str, Any]]
    available: Mapped[dict[str, Any]]
    labels: Mapped[dict[str, Any]] = mapped_column(server_default=text("'{}'"))
    """Ray's labels of the node, such as `ray.io/market-type`."""
    quarantined: Mapped[list[Any]]
    """`ray_workers.shared.quarantine.Quarantined`, as JSON."""
    updated_at: Mapped[datetime]


class LeaseRow(Base):
    """Which process may run the loops, and until when by the database's clock; one row."""

    __tablename__ = "leases"
    name: Mapped[str] = mapped_column(String(64), primary_key=True)
    holder: Mapped[str]
    term: Mapped[int]
    """Rises each time the lease is taken: the fencing token of what the loops write."""
    expires_at: Mapped[datetime]
