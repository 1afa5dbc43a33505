"""The deployment, its cluster and storage as last observed, the lease of the loops, and sums of
metrics."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from sqlalchemy import String, text
from sqlalchemy.orm import Mapped, mapped_column

from service.db.models.base import Base


class DeploymentRow(Base):
    """The id of this deployment; one row."""

    __tablename__ = "deployment"
    id: Mapped[str] = mapped_column(String(64), primary_key=True)
    created_at: Mapped[datetime]


class ClusterRow(Base):
    """The cluster as it was last observed; one row."""

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
    """The number of requested nodes that have not joined yet."""
    bundles: Mapped[list[Any]]
    """The requested minimum size of the cluster, as `[bundle, number]` pairs; empty for none."""
    asked_at: Mapped[datetime | None]
    """When the nodes that have not joined yet were requested; unset if there are none."""


class StorageStateRow(Base):
    """The use of the storage when it was last measured; one row."""

    __tablename__ = "storage_state"
    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    used_bytes: Mapped[int | None]
    """Bytes of checkpoints, artifacts and logs by their rows; unset if no setting limits them."""
    free_bytes: Mapped[int | None]
    """Free bytes on the disk of the storage or of the database, whichever has less; unset for an
    object store."""
    problem: Mapped[str | None]
    """Why no job is accepted or started; unset while there is free space."""
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
    """The fencing token of the loops' writes; increases each time the lease is taken."""
    expires_at: Mapped[datetime]


class ServiceMetricRow(Base):
    """A sum to which all processes of this deployment add (`service.domain.meter`)."""

    __tablename__ = "service_metrics"
    metric: Mapped[str] = mapped_column(String(64), primary_key=True)
    label: Mapped[str] = mapped_column(String(64), primary_key=True)
    part: Mapped[str] = mapped_column(String(16), primary_key=True)
    value: Mapped[float]
