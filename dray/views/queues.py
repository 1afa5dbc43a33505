"""Queues with their rules and users, and what slots cost."""

from __future__ import annotations

from datetime import datetime

from dray.views.base import Reason, View
from dray.views.jobs import Cost


class QueueUser(View):
    """Jobs of one user in a queue."""

    owner: str
    weight: float
    """The user's share of what the queue uses, beside those of the others."""
    num_waiting: int
    num_held: int
    """Of those that wait, the jobs that are held."""
    num_running: int
    """Jobs that hold slots."""
    holds: dict[str, float]
    """Resources that they hold now, in Ray's names."""


class Queue(View):
    """A queue: its rules, and the jobs in it."""

    name: str
    weight: float
    user_weights: dict[str, float]
    """Weights of users; that of all others is 1."""
    quota: dict[str, float]
    limit: dict[str, float]
    user_limit: dict[str, float]
    max_running: int | None = None
    max_running_per_user: int | None = None
    max_queued: int | None = None
    max_queued_per_user: int | None = None
    max_priority: int
    budget: float | None = None
    """The most that its jobs may cost in all; once that is spent, no more of them start."""
    monthly_budget: float | None = None
    spent: float | None = None
    """The cost of its jobs in all, up to their newest reports; unset where slots have no
    prices, like the next two."""
    spent_this_month: float | None = None
    currency: str | None = None
    num_waiting: int
    num_held: int
    num_running: int
    holds: dict[str, float]
    users: list[QueueUser]
    """By name, those who have jobs here that have not ended."""
    warnings: list[Reason] = []
    """Rules that the cluster can't honour, such as a quota above what it has."""


class QueuePage(View):
    items: list[Queue]


class Price(View):
    """The price of an hour of a resource, on the nodes that have all of these labels."""

    resource: str
    """`CPU`, `GPU`, `memory` by the GiB, or `slot` for each worker."""
    per_hour: float
    currency: str
    labels: dict[str, str] = {}


class CostItem(View):
    """The cost of one user, or of the jobs of one queue, in one currency."""

    name: str
    cost: Cost
    slot_hours: float
    num_jobs: int
    """Jobs that held slots in this time, also such as were deleted since."""


class CostReport(View):
    """The costs of users or queues in a span of time, the dearest first."""

    by: str
    """`user` or `queue`."""
    since: datetime
    until: datetime
    items: list[CostItem]
    prices: list[Price] = []
    """As they are now. Of each resource the first that is for a node's labels holds there."""
    warnings: list[Reason] = []
