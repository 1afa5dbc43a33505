"""Tables of slot usage and costs."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from sqlalchemy import Index, String
from sqlalchemy.orm import Mapped, mapped_column

from dray.views import JobState
from service.db.models.base import Base, job_key


class SlotSecondsRow(Base):
    """Total slot-seconds of all jobs, including deleted jobs, by category. The totals only grow."""

    __tablename__ = "slot_seconds"
    slot_class: Mapped[str] = mapped_column(String(32), primary_key=True)
    seconds: Mapped[float]


class AttemptCostRow(Base):
    """The cost of an attempt so far. The row remains when the job is deleted."""

    __tablename__ = "attempt_costs"
    __table_args__ = (
        Index("ix_attempt_costs_until", "until"),
        Index("ix_attempt_costs_queue_until", "queue", "until"),
    )
    job_id: Mapped[str] = mapped_column(String(64), primary_key=True)
    attempt: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    queue: Mapped[str] = mapped_column(String(64))
    owner: Mapped[str] = mapped_column(String(255))
    since: Mapped[datetime]
    """The time at which the attempt got its slots."""
    until: Mapped[datetime]
    """End of the time that the cost covers: the time of the attempt's latest report, or the end of
    the attempt."""
    sizes: Mapped[list[Any] | None]
    """Copy of `AttemptRow.sizes`."""
    currency: Mapped[str] = mapped_column(String(16))
    slot_seconds: Mapped[float]
    total: Mapped[float]
    useful: Mapped[float]
    unreported: Mapped[float]
    """Cost of the time whose use is unknown. The part of the total that is neither useful nor
    unreported is the cost of wasted time."""


class JobCostRow(Base):
    """The total of `JobRow.cost`, for sorting. It is not an indexed column of the job, because then
    each report of a running job would change all indexes of the job's row."""

    __tablename__ = "job_costs"
    __table_args__ = (Index("ix_job_costs_total_job_id", "total", "job_id"),)
    job_id: Mapped[str] = job_key()
    total: Mapped[float]


class DeletedAttemptRow(Base):
    """An attempt that ended and whose job was deleted. Its slots still count towards the user's
    usage, and accounting still lists it.

    The columns are copies of the columns of the job and of the attempt with the same names.
    Columns that can be NULL are NULL if the job was deleted before the columns were added.
    """

    __tablename__ = "deleted_attempts"
    __table_args__ = (
        Index("ix_deleted_attempts_finished_at", "finished_at"),
        Index("ix_deleted_attempts_times", "job_id", "attempt", "created_at", "finished_at"),
    )
    job_id: Mapped[str] = mapped_column(String(64), primary_key=True)
    attempt: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    queue: Mapped[str] = mapped_column(String(64))
    owner: Mapped[str] = mapped_column(String(255))
    slices: Mapped[list[Any]]
    bundle: Mapped[dict[str, Any]]
    roles: Mapped[list[Any] | None]
    name: Mapped[str | None]
    project: Mapped[str | None] = mapped_column(String(255))
    labels: Mapped[dict[str, Any] | None]
    array_id: Mapped[str | None] = mapped_column(String(64))
    array_index: Mapped[int | None]
    state: Mapped[JobState | None]
    max_runtime_s: Mapped[int | None]
    schedule_id: Mapped[str | None] = mapped_column(String(64))
    reservation: Mapped[str | None] = mapped_column(String(64))
    submitted_at: Mapped[datetime | None]
    """`JobRow.created_at`."""
    eligible_at: Mapped[datetime | None]
    created_at: Mapped[datetime]
    started_at: Mapped[datetime | None]
    finished_at: Mapped[datetime]
    held: Mapped[dict[str, Any] | None]
    held_until: Mapped[datetime | None]
    sizes: Mapped[list[Any] | None]
    world_size: Mapped[int | None]
    reason_code: Mapped[str | None] = mapped_column(String(64))
    exit_code: Mapped[int | None]
