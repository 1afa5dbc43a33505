"""Checks of single fields of a frame, and the count of the frames that are refused.

Frames come from processes that run a user's code, so every field is checked. A frame that is
malformed or out of bounds is refused and counted, and the job's events say so once.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any

from sqlalchemy.orm import Session

from ray_workers.shared.contracts import Frame
from service.db.models import JobRow
from service.db.repositories import events as events_repository
from service.domain.text import clean
from service.lifecycle.transitions import remark
from service.telemetry.log_lines import MAX_TIME_S

MAX_STEP = 2**53
"""Steps stay exact in JSON, and far below what a 64-bit column holds."""
MAX_SECONDS = 1e12


class BadFrame(ValueError):
    """The frame can't be stored; the message says why."""


MALFORMED = (BadFrame, LookupError, TypeError, ValueError, OverflowError, AttributeError)
"""The errors of a frame whose fields are missing or of other types."""


class Refusals:
    """The frames of one reply that were refused, counted by the reason."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def guard(self, frame: Frame, take: Callable[[Frame], None]) -> None:
        """Take the frame, or note why it can't be."""
        try:
            take(frame)
        except MALFORMED as error:
            self._counts[f"{frame.kind}: {clean(str(error))[:200]}"] += 1

    def tell(self, session: Session, job: JobRow, now: datetime) -> None:
        """Leave an event of them, once for each job."""
        type_ = "frames_refused"
        if not self._counts or events_repository.has_event(session, job.id, type_):
            return
        what, _ = self._counts.most_common(1)[0]
        remark(
            session,
            job,
            type_=type_,
            code=type_,
            message=f"something that a rank reported was not stored ({what})",
            now=now,
            data={"refused": dict(self._counts.most_common(10))},
        )


def count(body: Mapping[str, Any], name: str, limit: int) -> int:
    value = body[name]
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= limit:
        raise BadFrame(f"{name} is not a count: {value!r}")
    return value


def count_or_none(body: Mapping[str, Any], name: str, limit: int = MAX_STEP) -> int | None:
    """None where the field is missing."""
    return None if body.get(name) is None else count(body, name, limit)


def number(value: Any) -> float:
    if type(value) is float:
        return value
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise BadFrame(f"not a number: {value!r}")
    return float(value)


def finite(value: Any) -> float:
    """A number that JSON has: PostgreSQL stores no other in it."""
    found = number(value)
    if not math.isfinite(found):
        raise BadFrame(f"not a finite number: {found}")
    return found


def number_or_none(body: Mapping[str, Any], name: str) -> float | None:
    """None where the field is missing."""
    return None if body.get(name) is None else number(body[name])


def seconds_or_none(body: Mapping[str, Any], name: str) -> float | None:
    """A length of time; None where the field is missing."""
    if body.get(name) is None:
        return None
    value = number(body[name])
    if not 0 <= value <= MAX_SECONDS:
        raise BadFrame(f"{name} is no length of time: {value!r}")
    return value


def text(body: Mapping[str, Any], name: str, limit: int) -> str:
    """The text, cut to `limit` characters; empty where the field is missing."""
    value = body.get(name)
    return "" if value is None else clean(str(value))[:limit]


def short_text(value: Any, limit: int) -> str:
    """A text of at most `limit` characters, made safe to show."""
    if not isinstance(value, str) or len(value) > limit:
        raise BadFrame(f"not a text of at most {limit} characters: {str(value)[:50]!r}")
    return clean(value)


def ranks_of(body: Mapping[str, Any], name: str, limit: int) -> list[int]:
    """Numbers of ranks, each once, in order; at most `limit` of them."""
    values = body[name]
    if not isinstance(values, list | tuple):
        raise BadFrame(f"{name} is not a list")
    return sorted({count({name: value}, name, MAX_STEP) for value in values})[:limit]


def sha256(value: Any) -> str:
    digest = str(value)
    if len(digest) != 64 or not set(digest) <= set("0123456789abcdef"):
        raise BadFrame(f"not a SHA-256 in hexadecimal: {value!r}")
    return digest


def time_of(frame: Frame, now: datetime) -> datetime:
    """The frame's time by its node's clock, or now if that is no time."""
    return _as_time(frame.time) or now


def seconds_of(frame: Frame, now: datetime) -> float:
    """The same as Unix time."""
    return frame.time if 0 <= frame.time <= MAX_TIME_S else now.timestamp()


def within(seconds: float, first: datetime, last: datetime) -> datetime:
    """A time by a node's clock (Unix seconds) if it lies between the two; otherwise that clock is
    wrong, and the answer is the last."""
    at = _as_time(seconds)
    return at if at is not None and first <= at <= last else last


def _as_time(seconds: float) -> datetime | None:
    try:
        return datetime.fromtimestamp(seconds, UTC)
    except (ValueError, OverflowError, OSError):
        return None
