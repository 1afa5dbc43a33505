"""Webhooks, and the messages for them."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from sqlalchemy import Index, String, text
from sqlalchemy.orm import Mapped, mapped_column

from service.db.models.base import Base
from service.db.types import BigId


class WebhookRow(Base):
    """An address that is notified when jobs enter certain states."""

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
    """Whether it is notified of the jobs of all users, not only of its owner's."""
    secret: Mapped[str]
    """The key with which its messages are signed."""
    failures: Mapped[int]
    """The number of tries in a row that the receiver did not accept."""
    failing_since: Mapped[datetime | None]
    paused_until: Mapped[datetime | None]
    disabled_at: Mapped[datetime | None]
    disabled_code: Mapped[str | None] = mapped_column(String(64))
    disabled_message: Mapped[str | None]
    enabled_by: Mapped[str | None] = mapped_column(String(255))
    """The admin who enabled it, if that was not its owner."""
    created_at: Mapped[datetime]


class WebhookDeliveryRow(Base):
    """A message for a webhook, written in the transaction of the change that it reports.

    The webhook is no foreign key, so that a change of a job never waits for a deletion of the
    webhook, nor fails because of it. Messages without a webhook are deleted periodically.
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
    """Unset for a test message."""
    type: Mapped[str] = mapped_column(String(32))
    data: Mapped[dict[str, Any]]
    """The content of the message; the job itself may change or be deleted meanwhile."""
    status: Mapped[str] = mapped_column(String(16))
    tries: Mapped[int]
    created_at: Mapped[datetime]
    next_try_at: Mapped[datetime | None]
    """Set while the message waits to be sent."""
    tried_at: Mapped[datetime | None]
    answer_status: Mapped[int | None]
    answer_body: Mapped[str | None]
    answer_error: Mapped[str | None]
    took_s: Mapped[float | None]
