"""Views of webhooks and of the messages sent to them."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum

from dray.views.base import Reason, View
from dray.views.jobs import JobState


class WebhookFormat(StrEnum):
    """The format of a webhook's messages."""

    JSON = "json"
    SLACK = "slack"
    """`{"text": ...}`, which Slack, Mattermost and other services display in a channel."""


class DeliveryStatus(StrEnum):
    """The status of a message."""

    WAITING = "waiting"
    """The message will be sent at `next_try_at`."""
    DELIVERED = "delivered"
    FAILED = "failed"
    """The receiver did not accept the message within a day. Test messages are sent only once."""
    DROPPED = "dropped"
    """The webhook was disabled while the message was waiting."""


class Webhook(View):
    """An address that is notified when jobs enter certain states."""

    id: str
    owner: str
    url: str
    format: WebhookFormat
    states: list[JobState]
    """A notification is sent when a job enters one of these states."""
    queue: str | None = None
    """If set, only jobs in this queue cause notifications."""
    labels: dict[str, str]
    """Only jobs with all of these labels cause notifications."""
    all_users: bool
    """Whether the jobs of all users cause notifications, instead of only the owner's jobs."""
    enabled: bool
    disabled_reason: Reason | None = None
    enabled_by: str | None = None
    """The admin who last enabled the webhook; null if the owner last enabled it. A webhook that an
    admin enabled works as long as the admin's token is valid, even if the owner's token is not."""
    failing_since: datetime | None = None
    """When the receiver stopped accepting messages; unset while the receiver accepts messages."""
    paused_until: datetime | None = None
    """Time until which no messages are sent, because the receiver is failing."""
    num_waiting: int
    """Number of messages that have not been sent yet."""
    created_at: datetime
    secret: str | None = None
    """Key for the signatures; only returned when the webhook is created."""


class WebhookPage(View):
    items: list[Webhook]


class DeliveryAnswer(View):
    """The receiver's response to the latest attempt, or the reason why there was no response."""

    status: int | None = None
    """HTTP status of the response."""
    body: str = ""
    """Beginning of the response body."""
    error: str | None = None
    """Why the message was not accepted."""
    took_s: float


class WebhookDelivery(View):
    """A message to a webhook's address."""

    id: str
    """Value of the `webhook-id` header, which is the same in every delivery attempt."""
    type: str
    """`job.` followed by the state, such as `job.failed`; or `webhook.test`."""
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
