"""Tables of schedules and of their runs."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from sqlalchemy import ForeignKey, Index, String, text
from sqlalchemy.orm import Mapped, mapped_column

from service.db.models.base import Base
from service.db.types import BigId


class ScheduleRow(Base):
    """A job document that is submitted at the times of a cron expression."""

    __tablename__ = "schedules"
    __table_args__ = (
        Index("uq_schedules_owner_name", "owner", "name", unique=True),
        *(
            Index(
                f"ix_schedules_{column}",
                column,
                sqlite_where=text(f"{column} IS NOT NULL"),
                postgresql_where=text(f"{column} IS NOT NULL"),
            )
            for column in ("next_at", "code")
        ),
    )
    id: Mapped[str] = mapped_column(String(64), primary_key=True)
    name: Mapped[str] = mapped_column(String(63))
    owner: Mapped[str] = mapped_column(String(255))
    cron: Mapped[str] = mapped_column(String(256))
    time_zone: Mapped[str] = mapped_column(String(64))
    overlap: Mapped[str] = mapped_column(String(16))
    missed: Mapped[str] = mapped_column(String(16))
    deadline_s: Mapped[int | None]
    document: Mapped[dict[str, Any]]
    """The job document without defaults, so that each run gets the defaults of its time."""
    code: Mapped[str | None] = mapped_column(String(64))
    """Id of the uploaded code in the document, which is kept as long as the schedule exists."""
    version: Mapped[int]
    """Incremented by each change. A run that was prepared for another version is not submitted."""
    decided_until: Mapped[datetime]
    """The last time that was decided; no run is submitted for this time or an earlier one."""
    next_at: Mapped[datetime | None]
    """When the service next looks at the schedule: at its next time, or earlier or later if a try
    to submit a run must be repeated. Unset while the schedule is paused."""
    paused_reason: Mapped[str | None]
    """Set if the service paused the schedule."""
    created_at: Mapped[datetime]
    changed_at: Mapped[datetime]


class ScheduleRunRow(Base):
    """The decision about a time of a schedule, written in the transaction that submits its job. The
    key, which consists of the schedule and the time, ensures that each time is decided only once.

    `job_id` is not a foreign key, because jobs are deleted earlier than runs.
    """

    __tablename__ = "schedule_runs"
    __table_args__ = (
        Index("uq_schedule_runs_schedule_id_at", "schedule_id", "at", unique=True),
        {"sqlite_autoincrement": True},
    )
    number: Mapped[int] = mapped_column(BigId, primary_key=True)
    schedule_id: Mapped[str] = mapped_column(
        String(64), ForeignKey("schedules.id", ondelete="CASCADE")
    )
    at: Mapped[datetime]
    outcome: Mapped[str] = mapped_column(String(16))
    message: Mapped[str | None]
    problem: Mapped[dict[str, Any] | None]
    job_id: Mapped[str | None] = mapped_column(String(64))
    array_id: Mapped[str | None] = mapped_column(String(64))
    decided_at: Mapped[datetime]
