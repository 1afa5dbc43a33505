"""Queues: what the jobs of a queue and of its users may hold, and what is theirs by right."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

DEFAULT = "default"
"""The queue of a job that names none; it is always there."""


@dataclass(frozen=True)
class Queue:
    """One queue's rules. Resources are in Ray's names: `{"GPU": 8}`; one that is not named is not
    limited, and nothing of it is guaranteed."""

    name: str
    weight: float = 1.0
    """Its share of what is left beyond the quotas, beside the weights of the others."""
    quota: Mapping[str, float] = field(default_factory=dict)
    """Guaranteed: what others borrow of it is given back when its own jobs need it."""
    limit: Mapping[str, float] = field(default_factory=dict)
    """The most that its running jobs hold together, also where more is idle."""
    user_limit: Mapping[str, float] = field(default_factory=dict)
    """The same of each of its users."""
    max_running: int | None = None
    max_running_per_user: int | None = None
    max_queued: int | None = None
    """Jobs that wait; one more is refused when it is submitted."""
    max_queued_per_user: int | None = None
    max_priority: int = 100
    """The highest that a user may give."""
