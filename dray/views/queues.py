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


class QueueBound(View):
    """The amount of a resource that the rules of a queue and the queues above it still allow."""

    resource: str
    """A resource with Ray's name, or `jobs` for the number of running jobs."""
    left: float
    """How much more the queue's running jobs can hold."""
    most: float
    queue: str
    """The queue whose rule allows the least: the queue itself or a queue above it."""
    rule: str
    """`limit`, `borrowing_limit` (with the quota) or `max_running`."""


class Queue(View):
    """A queue: its rules, and the jobs in it. The jobs of a parent are the jobs of all queues
    under it."""

    name: str
    parent: str | None = None
    weight: float
    user_weights: dict[str, float]
    """Weights of users, keyed by user name; all other users have weight 1."""
    quota: dict[str, float]
    borrowing_limit: dict[str, float] = {}
    lending_limit: dict[str, float] = {}
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
    children: list[str] = []
    """Queues whose parent is this queue, sorted by name."""
    allowed: list[QueueBound] = []
    """The amount that the rules of the queue and the queues above it still allow, for each limited
    resource."""
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


class UserShare(View):
    """The usage of a queue by a user, compared to the user's share.

    Usage is measured in cluster-seconds (the time for which slots were used, multiplied by the
    fraction of the cluster that these slots represent), and decays by half every `half_life_s`.
    """

    owner: str
    weight: float
    used_s: float
    share: float | None = None
    """The fraction of the usage of all active users of the queue that the weight entitles the user
    to. A user is active while their jobs are running or could run. This field and the fields below
    are null if the user is not active."""
    due_s: float | None = None
    """`share`, in cluster-seconds."""
    difference_s: float | None = None
    """`used_s` minus `due_s`: positive if the user has used more than their share."""
    margin_s: float | None = None
    """The user is ahead or behind if the difference is larger than this margin."""
    standing: str | None = None
    """`behind`, `even` or `ahead`. Among jobs with equal quotas and priorities, jobs of users who
    are behind come first, and jobs of users who are ahead come last."""
    until: datetime | None = None
    """When the user would be `even` if no jobs used slots from now on. If other users of the queue
    use slots, a user who is `ahead` becomes `even` earlier, and a user who is `behind` later. Null
    if the user is `even`."""


class QueueShare(View):
    """The usage of a queue, compared to its share of the usage of all queues with the same parent.
    The usage of a parent is the usage of all queues under it. `UserShare` describes the fields."""

    name: str
    parent: str | None = None
    weight: float
    quota: dict[str, float] = {}
    """Guaranteed resources. Jobs within the quota come first, regardless of `tier`."""
    used_s: float
    share: float | None = None
    due_s: float | None = None
    difference_s: float | None = None
    margin_s: float | None = None
    tier: str | None = None
    """`ahead` if the queue has used more than its share, and `share` otherwise. Jobs of queues that
    are ahead come last."""
    until: datetime | None = None
    """When the queue would no longer be ahead; null if it is not ahead."""
    users: list[UserShare]
    """Users who are active in the queue or have used it recently, sorted by name."""


class ShareReport(View):
    """The usage of queues and users on which the scheduler based its latest forecast."""

    made_at: datetime | None = None
    """The time of the usage; null if there is no current forecast."""
    half_life_s: float
    cluster: dict[str, float]
    """The resources of the cluster. A cluster-second is the use of all of them for one second."""
    queues: list[QueueShare]
    warnings: list[Reason] = []
