"""Why a job waits and until when, and what the scheduler decided."""

from __future__ import annotations

from datetime import datetime

from dray.views.base import Reason, View
from dray.views.federation import OpenRound
from dray.views.jobs import JobState, OtherJob
from dray.views.planner import SyncPlan


class Forecast(View):
    """The expected time of a start or an end."""

    at: datetime | None = None
    """The expected time; for an end, the middle of the range. Null if the time is unknown; `reason`
    then has the reason."""
    earliest_at: datetime | None = None
    latest_at: datetime | None = None
    """The range, by the fastest and the slowest speeds at which the jobs are likely to go on. Null
    if `at` is null; `latest_at` is also null if a start has no latest time."""
    not_before: datetime | None = None
    """If `at` is null, a time before which the start or end is impossible."""
    reason: Reason | None = None
    num_assumed: int = 0
    """Number of jobs with unknown duration, for which the forecast assumes the duration of other
    recent jobs."""
    made_at: datetime
    first_at: datetime | None = None
    """The first forecast, whose error is measured."""


class ForecastError(View):
    """The error of first forecasts."""

    count: int
    """Number of forecasts of the last 7 days whose start or end has happened."""
    median_s: float | None = None
    """Median of the absolute error, in seconds."""
    p90_s: float | None = None
    """90th percentile of the absolute error, in seconds."""
    median_ahead_s: float | None = None
    """Median of the seconds between a forecast and its start or end."""


class ForecastErrors(View):
    starts: ForecastError
    ends: ForecastError


class Counterfactual(View):
    """A change of a waiting job, and the time at which the job would then start."""

    message: str
    """`starts now with 4 workers`, `starts earlier at priority 70`, `not on the cluster as it is:
    each worker needs 16 GPU ...`."""
    at: datetime | None = None
    """When the job would start; null if never, or if the time is unknown."""
    num_workers: int | None = None
    queue: str | None = None
    priority: int | None = None
    """The change, which may be another queue with a lower priority. All three fields are null for a
    job that could never start unchanged, and for changes that only the message names: less of a
    resource for each worker, `elastic.min_workers`, and no `required_topology`."""


class Explanation(View):
    """Why a job is in its state."""

    state: JobState
    reason: Reason
    position: int | None = None
    """Position, from 1, in the order in which the scheduler considers jobs; only while the job
    waits."""
    queue_length: int | None = None
    """Number of waiting jobs, including this job; only while it waits."""
    blocked_by: list[str] = []
    """Ids of the jobs that hold the slots that this job waits for, or of the jobs and arrays that
    must end before it starts."""
    ahead: list[OtherJob] = []
    """The first 20 jobs ahead in the queue, in the order in which they start."""
    running: list[OtherJob] = []
    """The first 20 jobs that hold slots, beginning with the jobs in `blocked_by`."""
    favoured: list[Reason] = []
    """Rules by which jobs of other users or queues start before this job: quotas of other queues,
    and use beyond the share of this job's queue or user."""
    expected_start_at: datetime | None = None
    """Equal to `start.at`."""
    start: Forecast | None = None
    """Forecast of the start; only while the job waits, from the first forecast on."""
    end: Forecast | None = None
    """Forecast of the end; only while the job has slots."""
    counterfactuals: list[Counterfactual] = []
    """Changes with which a waiting job would start, or start earlier."""
    forecast_error: ForecastError | None = None
    """Error of earlier forecasts of starts; while the job has slots, of ends."""
    sync: SyncPlan | None = None
    """The choice that `sync: auto` made when the job was submitted; null if the document gave
    another `sync`, or none."""
    round: OpenRound | None = None
    """The open round of a federated job. Rounds of silos are shown once they have been open for
    some seconds."""


class Decision(View):
    """A round of the scheduler that changed something."""

    number: int
    made_at: datetime
    started: list[str] = []
    """Ids of the started jobs; this list and the lists below have only the first 20 jobs."""
    grew: list[str] = []
    shrank: list[str] = []
    """Jobs whose groups were asked to release slots."""
    left: list[str] = []
    """Running jobs that were asked to leave their slots."""
    failed: list[str] = []
    """Jobs that could not run even if the cluster were empty."""
    num_changes: int
    num_waiting: int
    num_running: int


class DecisionPage(View):
    items: list[Decision]
    """The rounds, newest first."""
    next_before: int | None = None
    """Pass as `before` to get older rounds; null if there are none."""


class DecisionOnJob(View):
    """The decision about one job, and the facts that it was based on."""

    job_id: str
    decision: str
    """`start`, `wait`, `preempt`, `grow`, `shrink`, `stay` or `impossible`."""
    reason: Reason | None = None
    num_workers: int | None = None
    node_ids: list[str] = []
    because_of: str | None = None
    """The job for which this job had to leave or release slots."""
    queue: str | None = None
    owner: str | None = None
    priority: int | None = None
    left_s: float | None = None
    """Remaining seconds of the job, by its progress and earlier runs; null if unknown."""
    waited_s: float | None = None


class ReplayedDecision(Decision):
    """A round of the scheduler, and the present policy's decision from the same state."""

    nodes: dict[str, dict[str, float]]
    """Resources of each node that jobs could use."""
    is_same: bool
    """Whether the present policy makes the same decision."""
    decided: list[DecisionOnJob]
    """Decisions in the order in which the jobs were considered. Waiting jobs that no decision
    depended on are left out."""
    replayed: list[DecisionOnJob]
