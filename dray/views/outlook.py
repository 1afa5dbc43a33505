"""Why a job waits and until when, and what the scheduler decided."""

from __future__ import annotations

from datetime import datetime

from dray.views.base import Reason, View
from dray.views.federation import OpenRound
from dray.views.jobs import JobState, OtherJob
from dray.views.planner import SyncPlan


class Forecast(View):
    """When something is expected."""

    at: datetime | None = None
    """Null where the time is not known; `reason` then has the reason. Of an end the middle of the
    range."""
    earliest_at: datetime | None = None
    latest_at: datetime | None = None
    """The range: by the fastest and the slowest paces that the jobs are likely to go on with. Null
    where `at` is, and `latest_at` also where a start has no latest time."""
    not_before: datetime | None = None
    """Where `at` is null: until when it will not have come."""
    reason: Reason | None = None
    num_assumed: int = 0
    """Jobs of which nobody knows how long they take, and that were assumed to take as long as
    others of late, to make this forecast."""
    made_at: datetime
    first_at: datetime | None = None
    """The first time that was told; its error is measured."""


class ForecastError(View):
    """How far off the first forecasts were."""

    count: int
    """Forecasts whose event has come, of the last 7 days."""
    median_s: float | None = None
    """Median of the absolute error."""
    p90_s: float | None = None
    """In nine of ten cases the error was no larger."""
    median_ahead_s: float | None = None
    """How long before its event the median forecast was made."""


class ForecastErrors(View):
    starts: ForecastError
    ends: ForecastError


class Counterfactual(View):
    """A change of a waiting job, and when the job would start with it."""

    message: str
    """`starts now with 4 workers`, `starts earlier at priority 70`, `not on the cluster as it is:
    each worker needs 16 GPU ...`."""
    at: datetime | None = None
    """When it would start; null if never, or nobody knows when."""
    num_workers: int | None = None
    queue: str | None = None
    priority: int | None = None
    """The change, which may be a queue with a lower priority. All three are null of a job that
    could never start as it is, and of changes that the message alone names: less of a resource for
    each worker, `elastic.min_workers`, and no `required_topology`."""


class Explanation(View):
    """Why a job is in its state."""

    state: JobState
    reason: Reason
    position: int | None = None
    """Place in the order in which the scheduler looks at jobs, from 1; only while the job waits."""
    queue_length: int | None = None
    """Number of waiting jobs, including this one; only while it waits."""
    blocked_by: list[str] = []
    """Ids of the jobs that hold the slots that this job waits for, or of the jobs and arrays after
    whose end it starts."""
    ahead: list[OtherJob] = []
    """The first 20 jobs ahead in the queue, the next to start first."""
    running: list[OtherJob] = []
    """The first 20 jobs that hold slots, those in `blocked_by` first."""
    favoured: list[Reason] = []
    """Rules by which jobs of others come before this one while it waits: quotas of other queues,
    and use beyond the share of its queue or user."""
    expected_start_at: datetime | None = None
    """`start.at`."""
    start: Forecast | None = None
    """Only while the job waits, and from the first forecast on."""
    end: Forecast | None = None
    """Only while the job has slots."""
    counterfactuals: list[Counterfactual] = []
    """Changes that would have a waiting job start, or start earlier."""
    forecast_error: ForecastError | None = None
    """Of earlier forecasts of starts, or of ends while the job has slots."""
    sync: SyncPlan | None = None
    """The choice of `sync: auto`, as it was made at the submit; null if the document gave another
    `sync`, or none."""
    round: OpenRound | None = None
    """Of a federated job: the round that is open. Rounds of silos are shown once they have been so
    for some seconds."""


class Decision(View):
    """A round of the scheduler that changed something."""

    number: int
    made_at: datetime
    started: list[str] = []
    """Ids of jobs, here and below the first 20."""
    grew: list[str] = []
    shrank: list[str] = []
    """Groups that were asked to give slots back."""
    left: list[str] = []
    """Running jobs that were asked to leave their slots."""
    failed: list[str] = []
    """Jobs that the cluster could not run, were it empty."""
    num_changes: int
    num_waiting: int
    num_running: int


class DecisionPage(View):
    items: list[Decision]
    """The newest first."""
    next_before: int | None = None
    """Ask with it as `before` for older ones; null if there are none."""


class DecisionOnJob(View):
    """The decision about one job, and the facts that it went by."""

    job_id: str
    decision: str
    """`start`, `wait`, `preempt`, `grow`, `shrink`, `stay` or `impossible`."""
    reason: Reason | None = None
    num_workers: int | None = None
    node_ids: list[str] = []
    because_of: str | None = None
    """The job for which it was to leave, or to give slots back."""
    queue: str | None = None
    owner: str | None = None
    priority: int | None = None
    left_s: float | None = None
    """Seconds that it had left, by its progress and earlier runs; null where nothing told."""
    waited_s: float | None = None


class ReplayedDecision(Decision):
    """A round, and what the policy decides now of what it saw then."""

    nodes: dict[str, dict[str, float]]
    """The resources that jobs could take of each node."""
    is_same: bool
    """Whether the policy decides now as it did then."""
    decided: list[DecisionOnJob]
    """In the order in which the jobs were considered. Of the jobs that waited, those are kept that
    the decisions depended on."""
    replayed: list[DecisionOnJob]
