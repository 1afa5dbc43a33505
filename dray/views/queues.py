"""Views of queues, prices and costs."""

from __future__ import annotations

from datetime import datetime

from dray.views.base import Reason, View
from dray.views.jobs import Cost


class QueueUser(View):
    """One user's jobs in a queue."""

    owner: str
    weight: float
    """The user's share of the queue, relative to the weights of the other users."""
    num_waiting: int
    num_held: int
    """Number of waiting jobs that are on hold."""
    num_running: int
    """Number of jobs that hold slots."""
    holds: dict[str, float]
    """Resources held by the running jobs, with Ray's resource names."""


class Queue(View):
    """A queue: its rules, and the jobs in it."""

    name: str
    weight: float
    user_weights: dict[str, float]
    """Weights of users, keyed by user name; all other users have weight 1."""
    quota: dict[str, float]
    limit: dict[str, float]
    user_limit: dict[str, float]
    max_running: int | None = None
    max_running_per_user: int | None = None
    max_queued: int | None = None
    max_queued_per_user: int | None = None
    max_priority: int
    default_max_runtime_s: int | None = None
    """`max_runtime_s` of jobs whose documents don't set it."""
    max_runtime_s: int | None = None
    """Highest `max_runtime_s` of a job."""
    budget: float | None = None
    """Maximum cost of all jobs in the queue; once it is spent, no more jobs start."""
    monthly_budget: float | None = None
    spent: float | None = None
    """Cost of all jobs in the queue up to their latest reports. This field and the next two are
    unset if slots have no prices."""
    spent_this_month: float | None = None
    currency: str | None = None
    num_waiting: int
    num_held: int
    num_running: int
    holds: dict[str, float]
    users: list[QueueUser]
    """Users who have unfinished jobs in the queue, sorted by name."""
    warnings: list[Reason] = []
    """Rules that the cluster can't satisfy, such as a quota above its resources."""


class QueuePage(View):
    items: list[Queue]


class Price(View):
    """The hourly price of a resource on nodes that have all of these labels."""

    resource: str
    """The priced resource: `CPU`, `GPU`, `memory` (per GiB), or `slot` (per worker)."""
    per_hour: float
    currency: str
    labels: dict[str, str] = {}


class CostItem(View):
    """The cost of the jobs of one user or queue, in one currency."""

    name: str
    cost: Cost
    slot_hours: float
    num_jobs: int
    """Number of jobs that held slots in the period, including jobs that were deleted later."""


class CostReport(View):
    """The costs of users or queues in a period, from highest to lowest."""

    by: str
    """`user` or `queue`."""
    since: datetime
    until: datetime
    items: list[CostItem]
    prices: list[Price] = []
    """The current prices. For each resource, the first price whose labels match the node
    applies."""
    warnings: list[Reason] = []
