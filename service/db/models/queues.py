"""Tables of queues, forecasts and scheduling decisions."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from sqlalchemy import Index, String, text
from sqlalchemy.orm import Mapped, mapped_column

from service.db.models.base import Base, job_key
from service.db.types import BigId


class QueueRow(Base):
    """The rules of a queue: `service.domain.scheduling.rules.queues.Queue`."""

    __tablename__ = "queues"
    name: Mapped[str] = mapped_column(String(64), primary_key=True)
    parent: Mapped[str | None] = mapped_column(String(64))
    is_parent: Mapped[bool] = mapped_column(server_default=text("false"))
    """Whether the queue has children. Stored in the row so that a transaction that locks the row
    also reads the current value."""
    weight: Mapped[float] = mapped_column(server_default=text("1"))
    user_weights: Mapped[dict[str, Any]] = mapped_column(server_default=text("'{}'"))
    quota: Mapped[dict[str, Any]] = mapped_column(server_default=text("'{}'"))
    borrowing_limit: Mapped[dict[str, Any]] = mapped_column(server_default=text("'{}'"))
    lending_limit: Mapped[dict[str, Any]] = mapped_column(server_default=text("'{}'"))
    limit: Mapped[dict[str, Any]] = mapped_column(server_default=text("'{}'"))
    user_limit: Mapped[dict[str, Any]] = mapped_column(server_default=text("'{}'"))
    max_running: Mapped[int | None]
    max_running_per_user: Mapped[int | None]
    max_queued: Mapped[int | None]
    max_queued_per_user: Mapped[int | None]
    max_priority: Mapped[int] = mapped_column(server_default=text("100"))
    default_max_runtime_s: Mapped[int | None]
    max_runtime_s: Mapped[int | None]
    budget: Mapped[float | None]
    monthly_budget: Mapped[float | None]


class ForecastRow(Base):
    """When an attempt was expected to start or end, and when it actually started or ended.

    `came_at` is unset until the attempt has started or ended.
    """

    __tablename__ = "forecasts"
    __table_args__ = (
        Index(
            "ix_forecasts_open",
            "of",
            sqlite_where=text("came_at IS NULL"),
            postgresql_where=text("came_at IS NULL"),
        ),
        Index(
            "ix_forecasts_came_at",
            "came_at",
            sqlite_where=text("came_at IS NOT NULL"),
            postgresql_where=text("came_at IS NOT NULL"),
        ),
    )
    job_id: Mapped[str] = job_key()
    attempt: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    """Number of the attempt that starts or ends; for a waiting job, the number of its next
    attempt."""
    of: Mapped[str] = mapped_column(String(8), primary_key=True)
    """`start` or `end`."""
    expected_at: Mapped[datetime | None]
    earliest_at: Mapped[datetime | None]
    latest_at: Mapped[datetime | None]
    not_before: Mapped[datetime | None]
    """End of the period that the forecast covered, if the time of the event could not be
    forecast."""
    code: Mapped[str | None] = mapped_column(String(64))
    """Code for the reason why the time of the event could not be forecast. `message` contains the
    explanation."""
    message: Mapped[str | None]
    num_assumed: Mapped[int]
    """Number of jobs whose duration the forecast had to assume."""
    made_at: Mapped[datetime]
    first_expected_at: Mapped[datetime | None]
    """The time that the first forecast predicted, used to measure the forecast error."""
    first_made_at: Mapped[datetime | None]
    came_at: Mapped[datetime | None]


class OutlookRow(Base):
    """The situation on which the latest forecast is based, and the errors of earlier forecasts. The
    table has a single row."""

    __tablename__ = "outlook"
    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    made_at: Mapped[datetime]
    situation: Mapped[bytes]
    """The situation, encoded by `service.outlook.codec`. If many jobs are waiting, it contains only
    the first waiting jobs."""
    errors: Mapped[dict[str, Any]]
    """`views.ForecastErrors`."""


class DecisionRow(Base):
    """A scheduler round that made changes. The row is kept for several hours."""

    __tablename__ = "decisions"
    __table_args__ = (Index("ix_decisions_made_at", "made_at"), {"sqlite_autoincrement": True})
    number: Mapped[int] = mapped_column(BigId, primary_key=True)
    made_at: Mapped[datetime]
    summary: Mapped[dict[str, Any]]
    """The jobs that started, grew or left, and the number of waiting jobs."""
    size_bytes: Mapped[int]
    record: Mapped[bytes]
    """The situation and the decisions, encoded by `service.outlook.codec`."""
