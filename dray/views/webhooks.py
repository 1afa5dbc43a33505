"""Webhooks: addresses that are told when jobs come to a state, and the messages sent to them."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum

from dray.views.base import Reason, View
from dray.views.jobs import JobState


class WebhookFormat(StrEnum):
    """The form of the messages."""

    JSON = "json"
    SLACK = "slack"
    """`{"text": ...}`, which Slack, Mattermost and others show in a channel."""


class DeliveryStatus(StrEnum):
    """The fate of a message."""

    WAITING = "waiting"
    """It is sent when its time has come."""
    DELIVERED = "delivered"
    FAILED = "failed"
    """The receiver did not take it in a day; of a test, at its only try."""
    DROPPED = "dropped"
    """The webhook was disabled while it waited."""


class Webhook(View):
    """An address that is told when jobs come to certain states."""

    id: str
    owner: str
    url: str
    format: WebhookFormat
    states: list[JobState]
    """It is notified of jobs that come to one of these."""
    queue: str | None = None
    """Only of jobs in this queue."""
    labels: dict[str, str]
    """Only of jobs with all of these labels."""
    all_users: bool
    """Whether it is notified of everybody's jobs, and not only of its owner's."""
    enabled: bool
    disabled_reason: Reason | None = None
    enabled_by: str | None = None
    """The admin who enabled it last, if that was not its owner: with the admin's token it goes on
    without the owner's."""
    failing_since: datetime | None = None
    """Since when its receiver has taken no message; unset while it does."""
    paused_until: datetime | None = None
    """No message is sent to a failing receiver before."""
    num_waiting: int
    """Messages that are still to be sent."""
    created_at: datetime
    secret: str | None = None
    """The key of the signatures. It is told once, to whoever makes the webhook."""


class WebhookPage(View):
    items: list[Webhook]


class DeliveryAnswer(View):
    """The receiver's answer to the newest try, or why there was none."""

    status: int | None = None
    """HTTP status."""
    body: str = ""
    """Its beginning."""
    error: str | None = None
    """Why it does not count as taken."""
    took_s: float


class WebhookDelivery(View):
    """A message to a webhook's address."""

    id: str
    """The header `webhook-id`, which is the same at each try."""
    type: str
    """`job.` and the state, such as `job.failed`, or `webhook.test`."""
    job_id: str | None = None
    status: DeliveryStatus
    tries: int
    created_at: datetime
    tried_at: datetime | None = None
    next_try_at: datetime | None = None
    answer: DeliveryAnswer | None = None


class WebhookDeliveryPage(View):
    """The newest first."""

    items: list[WebhookDelivery]
    next_cursor: str | None = None
