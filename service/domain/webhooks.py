"""Webhook messages: content, signature and retries.

The signature and its headers follow Standard Webhooks (standardwebhooks.com), which has libraries
in many languages.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import secrets
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from dray.views import JobState, WebhookFormat

TEST = "webhook.test"
"""Type of the message with which a user tests a webhook."""

FIRST_PAUSE_S = 5.0
MAX_PAUSE_S = 3600.0
GIVEN_UP_AFTER = timedelta(hours=24)
"""Time after which an undelivered message is dropped, and after which a webhook whose receiver has
accepted no messages is disabled."""
WITHOUT_TOKEN_FOR = timedelta(minutes=10)
"""Time for which messages wait before a webhook is disabled because its owner's token is missing.
The token might have been removed from the file by mistake."""
MAX_WAITING = 50_000
"""Maximum number of waiting messages of a webhook. A webhook with more waiting messages is
disabled, because its receiver is too slow."""
MAX_PER_OWNER = 20
MAX_METRICS = 100
"""Maximum number of final metrics in a message."""
MAX_REASON = 1000
"""Maximum number of characters of a job's reason in a message."""

_SECRET_PREFIX = "whsec_"


@dataclass(frozen=True)
class Answer:
    """The receiver's response to one delivery attempt."""

    status: int | None
    """HTTP status; None if there was no response."""
    body: str
    error: str | None
    """The reason why the message does not count as delivered; None if it was delivered."""
    took_s: float

    @property
    def is_gone(self) -> bool:
        """Whether the receiver has refused all further messages (410)."""
        return self.status == 410


def new_secret() -> str:
    return _SECRET_PREFIX + base64.b64encode(secrets.token_bytes(32)).decode()


def message_id(webhook_id: str, number: int) -> str:
    """Return the id of a message. The id is the same for all delivery attempts."""
    return f"{webhook_id}-{number}"


def headers(secret: str, message_id: str, now: datetime, body: bytes) -> dict[str, str]:
    """Return the headers that authenticate the sender and the time of the message."""
    timestamp = str(int(now.timestamp()))
    key = base64.b64decode(secret.removeprefix(_SECRET_PREFIX))
    signed = f"{message_id}.{timestamp}.".encode() + body
    signature = base64.b64encode(hmac.digest(key, signed, hashlib.sha256)).decode()
    return {
        "webhook-id": message_id,
        "webhook-timestamp": timestamp,
        "webhook-signature": f"v1,{signature}",
    }


def is_notified(
    states: Iterable[str],
    queue: str | None,
    labels: Mapping[str, str],
    *,
    of: JobState,
    in_queues: Collection[str],
    with_labels: Mapping[str, str],
) -> bool:
    """Whether a webhook with these filters is notified about a job with this state and labels in
    this queue. `in_queues` contains the queue and the queues above it."""
    if of not in states or (queue is not None and queue not in in_queues):
        return False
    return all(with_labels.get(key) == value for key, value in labels.items())


def type_of(state: JobState) -> str:
    return f"job.{state.lower()}"


def final_metrics(summary: Mapping[str, Any]) -> dict[str, Any]:
    """Return at most `MAX_METRICS` final values. Validation metrics come first."""
    keys = sorted(summary, key=lambda key: (not key.startswith("val/"), key))
    return {key: summary[key] for key in keys[:MAX_METRICS]}


def body_of(
    kind: str, at: datetime, data: Mapping[str, Any], format_: WebhookFormat, public_url: str
) -> bytes:
    """Return the body of the message. `data` is the stored data, in which `link` is a path."""
    link = data.get("link")
    full = {**data, "link": public_url + link} if link else dict(data)
    if format_ is WebhookFormat.SLACK:
        message: Mapping[str, Any] = {"text": _slack_text(kind, full)}
    else:
        message = {"type": kind, "timestamp": _as_text(at), "data": full}
    return json.dumps(message, ensure_ascii=False, separators=(",", ":")).encode()


def _as_text(at: datetime) -> str:
    return at.astimezone(UTC).isoformat().replace("+00:00", "Z")


def _slack_text(kind: str, data: Mapping[str, Any]) -> str:
    if kind == TEST:
        return "dray: this is a test"
    name, state, owner, queue = (
        _escaped(str(data[field])) for field in ("name", "state", "owner", "queue")
    )
    lines = [f"*{name}* {state}: {_escaped(data['reason']['message'])}", f"{owner}, queue {queue}"]
    metrics = [f"{_escaped(key)} {value}" for key, value in list(data["metrics"].items())[:5]]
    if metrics:
        lines.append(", ".join(metrics))
    lines.append(f"<{data['link']}|{data['id']}>")
    return "\n".join(lines)


def _escaped(text: str) -> str:
    """Escape text for Slack, so that a name can't mention all users or become a link."""
    for character, entity in (("&", "&amp;"), ("<", "&lt;"), (">", "&gt;")):
        text = text.replace(character, entity)
    return text


def pause_s(failures: int, chance: float) -> float:
    """Return the seconds until the next attempt after `failures` consecutive failures: exponential
    backoff, shortened by up to one half in proportion to `chance` (0 to 1)."""
    ceiling = min(FIRST_PAUSE_S * 2.0 ** min(failures - 1, 30), MAX_PAUSE_S)
    return ceiling * (1.0 - chance / 2.0)


def why_disabled(failing_since: datetime, now: datetime, answer: Answer) -> tuple[str, str] | None:
    """Return (code, message) if a webhook should be disabled after a failed delivery, else None."""
    if answer.is_gone:
        return "gone", "the receiver responded with status 410, so it accepts no more messages"
    if now - failing_since >= GIVEN_UP_AFTER:
        return "failing", (
            f"the receiver has accepted no messages for a day; last error: {answer.error}"
        )
    return None


def why_unauthorized(
    owner: str, enabled_by: str | None, all_users: bool, admins: Mapping[str, bool]
) -> tuple[str, str] | None:
    """Return (code, message) if messages must not be sent to a webhook; None if the webhook's
    owner, or the admin who enabled it, has the necessary rights. `admins` maps each user who has a
    token to whether the user is an admin."""
    if enabled_by is not None and admins.get(enabled_by):
        return None
    if owner not in admins:
        return "no_token", f"{owner} no longer has a token"
    if all_users and not admins[owner]:
        return "no_admin", (
            f"{owner}, who created the webhook for the jobs of all users, is no longer an admin"
        )
    return None
