"""Tables of webhooks and their messages."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from sqlalchemy import Index, String, text
from sqlalchemy.orm import Mapped, mapped_column

from service.db.models.base import Base
from service.db.types import BigId


class WebhookRow(Base):
    """A URL that is notified when jobs enter certain states."""

    __tablename__ = "webhooks"
    __table_args__ = (
        Index("ix_webhooks_owner", "owner"),
        Index(
            "ix_webhooks_enabled",
            "owner",
            sqlite_where=text("disabled_at IS NULL"),
            postgresql_where=text("disabled_at IS NULL"),
        ),
    )
    id: Mapped[str] = mapped_column(String(64), primary_key=True)
    owner: Mapped[str] = mapped_column(String(255))
    url: Mapped[str]
    format: Mapped[str] = mapped_column(String(16))
    states: Mapped[list[Any]]
    queue: Mapped[str | None] = mapped_column(String(64))
    labels: Mapped[dict[str, Any]]
    all_users: Mapped[bool]
    """Whether the webhook is notified about the jobs of all users instead of only its owner's
    jobs."""
    secret: Mapped[str]
    """Key for signing messages."""
    failures: Mapped[int]
    """Number of consecutive delivery attempts that failed."""
    failing_since: Mapped[datetime | None]
    paused_until: Mapped[datetime | None]
    disabled_at: Mapped[datetime | None]
    disabled_code: Mapped[str | None] = mapped_column(String(64))
    disabled_message: Mapped[str | None]
    enabled_by: Mapped[str | None] = mapped_column(String(255))
    """Name of the admin who enabled the webhook; unset if its owner enabled it."""
    created_at: Mapped[datetime]


class WebhookDeliveryRow(Base):
    """A message for a webhook, written in the same transaction as the change that the message
    reports.

    `webhook_id` is not a foreign key, so that a transaction that changes a job neither waits for a
    webhook to be deleted nor fails because the webhook was deleted. Messages without a webhook are
    deleted periodically.
    """

    __tablename__ = "webhook_deliveries"
    __table_args__ = (
        Index("ix_webhook_deliveries_webhook_id_number", "webhook_id", "number"),
        Index(
            "ix_webhook_deliveries_waiting",
            *("webhook_id", "next_try_at"),
            sqlite_where=text("next_try_at IS NOT NULL"),
            postgresql_where=text("next_try_at IS NOT NULL"),
        ),
        {"sqlite_autoincrement": True},
    )
    number: Mapped[int] = mapped_column(BigId, primary_key=True)
    webhook_id: Mapped[str] = mapped_column(String(64))
    job_id: Mapped[str | None] = mapped_column(String(64))
    """Unset for test messages."""
    type: Mapped[str] = mapped_column(String(32))
    data: Mapped[dict[str, Any]]
    """Content of the message, stored because the job can change or be deleted before the message is
    sent."""
    status: Mapped[str] = mapped_column(String(16))
    tries: Mapped[int]
    created_at: Mapped[datetime]
    next_try_at: Mapped[datetime | None]
    """Set while the message is waiting to be sent."""
    tried_at: Mapped[datetime | None]
    answer_status: Mapped[int | None]
    answer_body: Mapped[str | None]
    answer_error: Mapped[str | None]
    took_s: Mapped[float | None]
