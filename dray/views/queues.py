"""Queues with their rules and users, and the prices of slots."""

from __future__ import annotations

from datetime import datetime

from dray.views.base import Reason, View
from dray.views.jobs import Cost


class QueueUser(View):
    """Jobs of one user in a queue."""

    owner: str
    weight: float
    """The user's share of the queue's use, relative to the weights of the other users."""
    num_waiting: int
    num_held: int
    """Number of waiting jobs that are held."""
    num_running: int
    """Number of jobs that hold slots."""
    holds: dict[str, float]
    """Resources that the running jobs hold, by Ray's names."""


class Queue(View):
    """A queue: its rules, and the jobs in it."""

    name: str
    weight: float
    user_weights: dict[str, float]
    """Weights of users; other users have the weight 1."""
    quota: dict[str, float]
    limit: dict[str, float]
    user_limit: dict[str, float]
    max_running: int | None = None
    max_running_per_user: int | None = None
    max_queued: int | None = None
    max_queued_per_user: int | None = None
    max_priority: int
    budget: float | None = None
    """Most that all jobs of the queue may cost; once it is spent, no more jobs start."""
    monthly_budget: float | None = None
    spent: float | None = None
    """Cost of all jobs of the queue, up to their newest reports; unset, like the next two fields,
    if slots have no prices."""
    spent_this_month: float | None = None
    currency: str | None = None
    num_waiting: int
    num_held: int
    num_running: int
    holds: dict[str, float]
    users: list[QueueUser]
    """Users with jobs in the queue that have not ended, by name."""
    warnings: list[Reason] = []
    """Rules that the cluster can't satisfy, such as a quota above its resources."""


class QueuePage(View):
    items: list[Queue]


class Price(View):
    """The price of a resource for one hour, on nodes that have all of these labels."""

    resource: str
    """`CPU`, `GPU`, `memory` per GiB, or `slot` per worker."""
    per_hour: float
    currency: str
    labels: dict[str, str] = {}


class CostItem(View):
    """The cost of the jobs of one user or one queue, in one currency."""

    name: str
    cost: Cost
    slot_hours: float
    num_jobs: int
    """Number of jobs that held slots in this time, including jobs that were deleted since."""


class CostReport(View):
    """The costs of users or queues in a period, highest first."""

    by: str
    """`user` or `queue`."""
    since: datetime
    until: datetime
    items: list[CostItem]
    prices: list[Price] = []
    """The current prices. For each resource on a node, the first price whose labels match the node
    applies."""
    warnings: list[Reason] = []
