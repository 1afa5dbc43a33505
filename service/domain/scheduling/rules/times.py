"""When a waiting job may start, and the messages that explain it."""

from __future__ import annotations

from datetime import datetime

BEGINS_AT = "begins_at"


def shown(at: datetime) -> str:
    """Format a time in UTC, such as `2026-12-01 07:00:00 UTC`."""
    return f"{at:%Y-%m-%d %H:%M:%S} UTC"


def begins(at: datetime) -> str:
    """Return why a job with this begin time does not start."""
    return f"begins at {shown(at)}"
