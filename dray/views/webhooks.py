"""Webhooks: addresses that are notified when jobs enter a state, and the messages sent to them."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum

from dray.views.base import Reason, View
from dray.views.jobs import JobState


class WebhookFormat(StrEnum):
    """The format of the messages."""

    JSON = "json"
    SLACK = "slack"
    """`{"text": ...}`, which Slack, Mattermost and others show in a channel."""


class DeliveryStatus(StrEnum):
    """The status of a message."""

    WAITING = "waiting"
    """The message is sent at its `next_try_at`."""
    DELIVERED = "delivered"
    FAILED = "failed"
    """The receiver did not accept the message within a day; a test message is tried only once."""
    DROPPED = "dropped"
    """The webhook was disabled while the message waited."""


class Webhook(View):
    """An address that is notified when jobs enter certain states."""

    id: str
    owner: str
    url: str
    format: WebhookFormat
    states: list[JobState]
    """The webhook is notified of jobs that enter one of these states."""
    queue: str | None = None
    """If set, only jobs in this queue count."""
    labels: dict[str, str]
    """Only jobs with all of these labels count."""
    all_users: bool
    """Whether the webhook is notified of all users' jobs, instead of only its owner's."""
    enabled: bool
    disabled_reason: Reason | None = None
    enabled_by: str | None = None
    """The admin who last enabled the webhook, if that was not its owner. The webhook then works
    while the admin's token is valid, even without the owner's token."""
    failing_since: datetime | None = None
    """Since when the receiver has accepted no message; unset while it accepts messages."""
    paused_until: datetime | None = None
    """No message is sent to a failing receiver before this time."""
    num_waiting: int
    """Number of messages that are still to be sent."""
    created_at: datetime
    secret: str | None = None
    """The key of the signatures, which is only in the answer to the webhook's creation."""


class WebhookPage(View):
    items: list[Webhook]


class DeliveryAnswer(View):
    """The receiver's answer to the newest attempt, or the reason why there was none."""

    status: int | None = None
    """HTTP status of the answer."""
    body: str = ""
    """Beginning of the answer's body."""
    error: str | None = None
    """Why the message does not count as accepted."""
    took_s: float


class WebhookDelivery(View):
    """A message to a webhook's address."""

    id: str
    """Value of the header `webhook-id`, which is the same in each attempt."""
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
    """Messages, newest first."""

    items: list[WebhookDelivery]
    next_cursor: str | None = None
