"""Tables of the deployment, the observed state of its cluster and storage, the lease of the loops,
and the service's metrics."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from sqlalchemy import String, false, text
from sqlalchemy.orm import Mapped, mapped_column

from service.db.models.base import Base, job_key


class DeploymentRow(Base):
    """The id of this deployment. The table has a single row."""

    __tablename__ = "deployment"
    id: Mapped[str] = mapped_column(String(64), primary_key=True)
    created_at: Mapped[datetime]


class ClusterRow(Base):
    """The last observed state of the cluster. The table has a single row."""

    __tablename__ = "cluster"
    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    connected: Mapped[bool]
    reason: Mapped[str | None]
    ray_address: Mapped[str | None]
    ray_dashboard: Mapped[str | None]
    session: Mapped[str | None]
    updated_at: Mapped[datetime]


class AutoscalingRow(Base):
    """The latest request to Ray's autoscaler. The table has a single row."""

    __tablename__ = "autoscaling"
    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    num_nodes: Mapped[int]
    """Number of requested nodes that have not yet joined."""
    bundles: Mapped[list[Any]]
    """The requested minimum size of the cluster, as `[bundle, number]` pairs; empty if no minimum
    was requested."""
    asked_at: Mapped[datetime | None]
    """The time at which the nodes that have not yet joined were requested; unset if there are no
    such nodes."""


class StorageStateRow(Base):
    """The last measured usage of the storage. The table has a single row."""

    __tablename__ = "storage_state"
    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    used_bytes: Mapped[int | None]
    """Total size of checkpoints, artifacts and logs in bytes, according to their rows; unset if no
    setting limits this size."""
    free_bytes: Mapped[int | None]
    """Free bytes on the storage's disk or the database's disk, whichever has less free space; unset
    for an object store."""
    problem: Mapped[str | None]
    """The reason why jobs are neither accepted nor started; unset while the storage has enough free
    space."""
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
    """The node's Ray labels, such as `ray.io/market-type`."""
    quarantined: Mapped[list[Any]]
    """A list of `ray_workers.shared.quarantine.Quarantined` as JSON."""
    memory_bytes: Mapped[int | None]
    """`ClusterNode.memory_bytes`."""
    updated_at: Mapped[datetime]


class WithheldRow(Base):
    """A fault that keeps a node's GPUs (or its CPUs, if it has no GPU) from getting new work.

    The host is identified by its name, because Ray gives a node a new id when it restarts.
    """

    __tablename__ = "withheld"
    hostname: Mapped[str] = mapped_column(String(255), primary_key=True)
    gpu: Mapped[str] = mapped_column(String(128), primary_key=True)
    """The GPU's UUID; empty if the fault is not known to be that of one GPU."""
    code: Mapped[str] = mapped_column(String(64), primary_key=True)
    mark: Mapped[str] = mapped_column(String(255))
    """See `GpuFault.mark`."""
    reason: Mapped[str]
    since: Mapped[datetime]
    is_active: Mapped[bool]
    """Whether the fault withholds slots: false after an admin has released them, and for errors of
    programs. The row is kept so that the agent's next report does not count as a new fault."""
    count: Mapped[int] = mapped_column(server_default=text("1"))
    """See `GpuFault.count`."""
    absent_since: Mapped[datetime | None]
    """When the host was first seen to be missing from the cluster; None while it is present."""


class ProgramFaultRow(Base):
    """An error that a job's program caused on GPUs, such as an Xid 31. Such errors can occur
    thousands of times, so a job gets at most one event for each kind in a period."""

    __tablename__ = "program_faults"
    job_id: Mapped[str] = job_key()
    code: Mapped[str] = mapped_column(String(64), primary_key=True)
    reported_at: Mapped[datetime]
    """When the last event was added."""
    number: Mapped[int]
    """Number of errors since then."""
    message: Mapped[str]
    """The newest of these errors."""


class NodeCheckRow(Base):
    """The newest self-test of a host."""

    __tablename__ = "node_checks"
    hostname: Mapped[str] = mapped_column(String(255), primary_key=True)
    id: Mapped[str] = mapped_column(String(32))
    """Identifies the test to the node's agent."""
    state: Mapped[str] = mapped_column(String(16))
    """`CheckState`."""
    cause: Mapped[str] = mapped_column(String(16))
    """`CheckCause`."""
    why: Mapped[str]
    """Why the node is suspect, or the admin who asked for the test."""
    job_id: Mapped[str | None] = mapped_column(String(64))
    """The job that lost a rank on the host. Its slots on the host are tested once its attempt has
    released them."""
    attempt: Mapped[int | None]
    asked_at: Mapped[datetime]
    began_at: Mapped[datetime | None]
    ended_at: Mapped[datetime | None]
    """When the last test ended, of which `outcome`, `message` and `devices` are the result."""
    outcome: Mapped[str | None] = mapped_column(String(16))
    """`CheckOutcome`."""
    message: Mapped[str]
    devices: Mapped[list[Any]]
    """A list of `ray_workers.shared.self_tests.TestedDevice` as JSON."""
    is_repeated: Mapped[bool] = mapped_column(server_default=false())
    """Whether the test that is waiting or running repeats a test that only waited for a job."""


class LeaseRow(Base):
    """The process that runs the loops, and the time (of the database's clock) at which its lease
    expires. The table has a single row."""

    __tablename__ = "leases"
    name: Mapped[str] = mapped_column(String(64), primary_key=True)
    holder: Mapped[str]
    term: Mapped[int]
    """Fencing token for writes by the loops; increases each time the lease is acquired."""
    expires_at: Mapped[datetime]


class ServiceMetricRow(Base):
    """The value of a metric, summed over all processes of this deployment (see
    `service.domain.meter`)."""

    __tablename__ = "service_metrics"
    metric: Mapped[str] = mapped_column(String(64), primary_key=True)
    label: Mapped[str] = mapped_column(String(64), primary_key=True)
    part: Mapped[str] = mapped_column(String(16), primary_key=True)
    value: Mapped[float]
