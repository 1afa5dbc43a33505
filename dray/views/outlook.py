"""Views of forecasts, explanations and scheduling decisions."""

from __future__ import annotations

from datetime import datetime

from dray.views.base import Reason, View
from dray.views.federation import OpenRound
from dray.views.jobs import JobState, OtherJob
from dray.views.planner import SyncPlan


class Forecast(View):
    """The expected time of a job's start or end."""

    at: datetime | None = None
    """The expected time; for an end, the middle of the range. Null if the time is unknown; `reason`
    then explains why."""
    earliest_at: datetime | None = None
    latest_at: datetime | None = None
    """The range of the expected time, from `earliest_at` (if the jobs involved run at their fastest
    likely speeds) to `latest_at` (at their slowest likely speeds). Both are null if `at` is null;
    `latest_at` is also null if there is no latest start."""
    not_before: datetime | None = None
    """If `at` is null, the earliest time at which the start or end is possible."""
    reason: Reason | None = None
    num_assumed: int = 0
    """Number of jobs whose duration is unknown. For each such job, the forecast assumes the
    duration of other recent jobs."""
    made_at: datetime
    first_at: datetime | None = None
    """The first forecast of this time, used to measure the error of forecasts."""


class ForecastError(View):
    """The error of the first forecast of each start or end, over the last 7 days."""

    count: int
    """Number of evaluated forecasts: first forecasts of a start or end that has now occurred."""
    median_s: float | None = None
    """Median of the absolute error, in seconds."""
    p90_s: float | None = None
    """90th percentile of the absolute error, in seconds."""
    median_ahead_s: float | None = None
    """Median number of seconds between a first forecast and the start or end that it predicted."""


class ForecastErrors(View):
    starts: ForecastError
    ends: ForecastError


class Counterfactual(View):
    """A change to a waiting job, and when the job would start if the change were made."""

    message: str
    """`starts now with 4 workers`, `starts earlier at priority 70`, `never on the current cluster:
    each worker needs 16 GPU ...`."""
    at: datetime | None = None
    """When the job would start; null if it would never start, or if the time is unknown."""
    num_workers: int | None = None
    queue: str | None = None
    priority: int | None = None
    """The changed values; several can be set, such as another queue and a lower priority. All three
    fields are null for a job that could never start unchanged, and for changes that only the
    message describes: less of a resource per worker, `elastic.min_workers`, or no
    `required_topology`."""


class Explanation(View):
    """Why a job is in its state."""

    state: JobState
    reason: Reason
    position: int | None = None
    """Position in the order in which the scheduler considers jobs, starting at 1; set only while
    the job waits."""
    queue_length: int | None = None
    """Number of waiting jobs, including this one; set only while the job waits."""
    blocked_by: list[str] = []
    """Ids of the jobs whose slots this job is waiting for, or of the jobs and arrays that must end
    before it can start."""
    ahead: list[OtherJob] = []
    """The first 20 jobs ahead of this job in the queue, in the order in which they start."""
    running: list[OtherJob] = []
    """The first 20 jobs that hold slots, starting with the jobs in `blocked_by`."""
    favoured: list[Reason] = []
    """Why jobs of other users or queues start before this job: their queues are below their quotas,
    or this job's queue or user has exceeded its share."""
    expected_start_at: datetime | None = None
    """Same as `start.at`."""
    start: Forecast | None = None
    """Forecast of the start; set while the job waits, once a first forecast has been made."""
    end: Forecast | None = None
    """Forecast of the end; set only while the job has slots."""
    counterfactuals: list[Counterfactual] = []
    """Changes that would make a waiting job start, or start earlier."""
    forecast_error: ForecastError | None = None
    """Error of earlier forecasts of starts or, while the job has slots, of earlier forecasts of
    ends."""
    sync: SyncPlan | None = None
    """The choice that `sync: auto` made when the job was submitted; null if the document has a
    different `sync` or none."""
    round: OpenRound | None = None
    """The open round of a federated job. A round of silos appears only after it has been open
    for a few seconds."""


class Factor(View):
    """A factor that decides a waiting job's position in the queue."""

    name: str
    """`tier`, `priority`, `standing`, `overdue`, `work`, `submission` or `front`."""
    value: float | None = None
    """The compared value. Jobs with lower values come first, except for `priority` and `overdue`
    (1 if the job is overdue), for which jobs with higher values come first. Null if the factor is
    not compared."""
    message: str


class JobAhead(View):
    """A job ahead of another job in the queue."""

    job: OtherJob
    decided_by: str
    """The name of the first factor in which the jobs differ."""
    message: str
    """The values of this factor: first the value of the job ahead, then the value of the other
    job."""


class JobFactors(View):
    """The factors that decide a waiting job's position in the queue."""

    job_id: str
    state: JobState
    reason: Reason | None = None
    """Why the job has no position: it is held, or does not wait, or there is no current forecast.
    The fields below are empty if this field is set."""
    made_at: datetime | None = None
    """The time of the usage and of the running jobs to which the waiting jobs are compared."""
    position: int | None = None
    factors: list[Factor] = []
    """The factors, in the order in which they are compared."""
    ahead: list[JobAhead] = []
    """The nearest jobs ahead of the job, at most 20, in the order of the queue."""


class Decision(View):
    """A round of the scheduler that changed something."""

    number: int
    made_at: datetime
    started: list[str] = []
    """Ids of the jobs that were started. Each list of jobs in a decision contains at most 20
    jobs."""
    grew: list[str] = []
    shrank: list[str] = []
    """Jobs whose groups were asked to release slots."""
    left: list[str] = []
    """Running jobs that were asked to release all their slots."""
    failed: list[str] = []
    """Jobs that could not run even on an empty cluster."""
    num_changes: int
    num_waiting: int
    num_running: int


class DecisionPage(View):
    items: list[Decision]
    """The rounds, newest first."""
    next_before: int | None = None
    """Pass this as `before` to get older rounds; null if there are none."""


class DecisionOnJob(View):
    """The decision about one job, and the facts that it was based on."""

    job_id: str
    decision: str
    """`start`, `wait`, `preempt`, `grow`, `shrink`, `stay` or `impossible`."""
    reason: Reason | None = None
    num_workers: int | None = None
    node_ids: list[str] = []
    because_of: str | None = None
    """Id of the job for which this job had to release some or all of its slots."""
    queue: str | None = None
    owner: str | None = None
    priority: int | None = None
    left_s: float | None = None
    """Estimated remaining seconds of the job, based on its progress and earlier runs; null if
    unknown."""
    waited_s: float | None = None


class ReplayedDecision(Decision):
    """A round of the scheduler, and the decisions of the current policy in the same state."""

    nodes: dict[str, dict[str, float]]
    """Resources of each node that jobs could use."""
    is_same: bool
    """Whether the current policy makes the same decision."""
    decided: list[DecisionOnJob]
    """Decisions in the order in which the jobs were considered. Waiting jobs that did not affect
    any decision are omitted."""
    replayed: list[DecisionOnJob]
