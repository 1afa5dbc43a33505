"""Tables of the usage of the cluster over time, for each quarter of an hour. The usage of an
attempt is added when the attempt ends. The rows remain when jobs are deleted."""

from __future__ import annotations

from sqlalchemy import String, text
from sqlalchemy.orm import Mapped, mapped_column

from service.db.models.base import Base

_ZERO = text("0")


class UsageRow(Base):
    """The usage by the ended attempts of a user in a queue in a quarter of an hour, or in an hour,
    and the jobs that started and ended in it. The columns are described by
    `service.domain.costs.usage.UsageKey` and `AMOUNTS`."""

    __tablename__ = "usage"
    __table_args__ = {"sqlite_with_rowid": False}  # noqa: RUF012
    length: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    """Number of quarters in the row: 1, or 4 for the sum of an hour. Reports in most time zones are
    read from the sums of hours."""
    quarter: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    owner: Mapped[str] = mapped_column(String(255), primary_key=True)
    queue: Mapped[str] = mapped_column(String(64), primary_key=True)
    currency: Mapped[str] = mapped_column(String(16), primary_key=True)
    slot_seconds: Mapped[float] = mapped_column(server_default=_ZERO)
    cpu_seconds: Mapped[float] = mapped_column(server_default=_ZERO)
    gpu_seconds: Mapped[float] = mapped_column(server_default=_ZERO)
    gpu_measured_s: Mapped[float] = mapped_column(server_default=_ZERO)
    gpu_idle_s: Mapped[float] = mapped_column(server_default=_ZERO)
    cost: Mapped[float] = mapped_column(server_default=_ZERO)
    num_started: Mapped[int] = mapped_column(server_default=_ZERO)
    num_succeeded: Mapped[int] = mapped_column(server_default=_ZERO)
    num_failed: Mapped[int] = mapped_column(server_default=_ZERO)
    num_cancelled: Mapped[int] = mapped_column(server_default=_ZERO)


class CapacityRow(Base):
    """The resources of the accepted nodes in a quarter of an hour."""

    __tablename__ = "capacity"
    quarter: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    measured_s: Mapped[float]
    """Seconds for which the scheduler has recorded the resources and the waiting jobs."""
    cpu_seconds: Mapped[float]
    gpu_seconds: Mapped[float]


class WaitRow(Base):
    """For how long jobs of a queue waited for a reason in a quarter of an hour."""

    __tablename__ = "waits"
    quarter: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    queue: Mapped[str] = mapped_column(String(64), primary_key=True)
    code: Mapped[str] = mapped_column(String(64), primary_key=True)
    job_seconds: Mapped[float]
    """The sum over the waiting jobs."""
