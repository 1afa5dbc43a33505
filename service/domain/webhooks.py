"""Webhooks: the message about a job, its signature, and its retries.

The signature and its headers follow Standard Webhooks (standardwebhooks.com), for which libraries
exist in many languages.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from dray.views import JobState, WebhookFormat

TEST = "webhook.test"
"""Type of a message that a user sends to test a webhook."""

FIRST_PAUSE_S = 5.0
MAX_PAUSE_S = 3600.0
GIVEN_UP_AFTER = timedelta(hours=24)
"""Time after which an undelivered message is given up, and a webhook that accepts no message is
disabled."""
WITHOUT_TOKEN_FOR = timedelta(minutes=10)
"""Time for which messages wait after a webhook's owner lost their token, before the webhook is
disabled: the token may be missing from the file by mistake."""
MAX_WAITING = 50_000
"""Most waiting messages of a webhook. With more it is disabled: its receiver is too slow."""
MAX_PER_OWNER = 20
MAX_METRICS = 100
"""Most final metrics in a message."""
MAX_REASON = 1000
"""Most characters of a job's reason in a message."""

_SECRET_PREFIX = "whsec_"


@dataclass(frozen=True)
class Answer:
    """The receiver's answer to one try."""

    status: int | None
    """HTTP status; None without an answer."""
    body: str
    error: str | None
    """Why the message does not count as delivered; None if it does."""
    took_s: float

    @property
    def is_gone(self) -> bool:
        """Whether the receiver wants no more messages (410)."""
        return self.status == 410


def new_secret() -> str:
    return _SECRET_PREFIX + base64.b64encode(secrets.token_bytes(32)).decode()


def message_id(webhook_id: str, number: int) -> str:
    """Return the id of a message, which is the same for each try."""
    return f"{webhook_id}-{number}"


def headers(secret: str, message_id: str, now: datetime, body: bytes) -> dict[str, str]:
    """Return the headers that prove the sender and the time of the message."""
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
    in_queue: str,
    with_labels: Mapping[str, str],
) -> bool:
    """Whether a webhook with these filters is notified of a job in this state, queue and labels."""
    if of not in states or queue not in (None, in_queue):
        return False
    return all(with_labels.get(key) == value for key, value in labels.items())


def type_of(state: JobState) -> str:
    return f"job.{state.lower()}"


def final_metrics(summary: Mapping[str, Any]) -> dict[str, Any]:
    """Return the last values, at most `MAX_METRICS`, beginning with the validation's."""
    keys = sorted(summary, key=lambda key: (not key.startswith("val/"), key))
    return {key: summary[key] for key in keys[:MAX_METRICS]}


def body_of(
    kind: str, at: datetime, data: Mapping[str, Any], format_: WebhookFormat, public_url: str
) -> bytes:
    """Return the message to send. data: the stored data, whose `link` is a path."""
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
    """Return the seconds until the next try after this many failures in a row: an exponential
    backoff, shortened by up to a half in proportion to `chance` (0 to 1)."""
    ceiling = min(FIRST_PAUSE_S * 2.0 ** min(failures - 1, 30), MAX_PAUSE_S)
    return ceiling * (1.0 - chance / 2.0)


def why_disabled(failing_since: datetime, now: datetime, answer: Answer) -> tuple[str, str] | None:
    """Return (code, message) if a webhook is to be disabled after a failed delivery, else None."""
    if answer.is_gone:
        return "gone", "its receiver answered 410: it wants no more messages"
    if now - failing_since >= GIVEN_UP_AFTER:
        return "failing", f"its receiver accepted no message for a day; last error: {answer.error}"
    return None


def why_unauthorized(
    owner: str, enabled_by: str | None, all_users: bool, admins: Mapping[str, bool]
) -> tuple[str, str] | None:
    """Return (code, message) if no messages may be sent to a webhook. None if its owner, or the
    admin who enabled it, has the right. admins: whether each user with a token is an admin."""
    if enabled_by is not None and admins.get(enabled_by):
        return None
    if owner not in admins:
        return "no_token", f"{owner} has no token any more"
    if all_users and not admins[owner]:
        return "no_admin", f"{owner}, who made it for jobs of all users, is no longer an admin"
    return None
