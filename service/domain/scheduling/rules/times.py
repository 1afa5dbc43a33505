"""When a waiting job may start, and the messages that explain it."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

BEGINS_AT = "begins_at"


def shown(at: datetime) -> str:
    """Format a time in UTC, such as `2026-12-01 07:00:00 UTC`."""
    return f"{at.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC"


def begins(at: datetime) -> str:
    """Return why a job with this begin time does not start."""
    return f"begins at {shown(at)}"


def latest_start(job: Any) -> datetime | None:
    """Return the time at which a waiting job is cancelled, because it can't end before its deadline
    if it starts later; None if it has no deadline. `job` is the job's row.

    The limit of a job that has not started counts as its running time, unless it is its queue's
    default. A job that has started might need less than the rest of its limit.
    """
    deadline: datetime | None = job.deadline
    is_own = job.max_runtime_s is not None and not job.is_runtime_of_queue
    if deadline is None or job.attempt or not is_own:
        return deadline
    return deadline - timedelta(seconds=job.max_runtime_s)


def missed(start_by: datetime) -> str:
    """Return why a job is not expected to start before this time."""
    return f"is not expected to start by {shown(start_by)}, which its deadline requires"
