"""Views of comparisons, experiments, tags and notes."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from dray.views.base import MetricValue, Reason, View
from dray.views.jobs import Cost, Goodput, JobState


class Annotations(View):
    """Tags, notes and colour of a job, which can be changed at any time."""

    tags: list[str]
    notes: str
    """Notes in Markdown; empty if the job has none."""
    colour: int | None = None
    """Number of the colour in which the web page draws the job's curves, from 0 to 19; unset unless
    a user has chosen one."""
    revision: int
    """Number of changes so far; also the ETag of the response."""
    updated_at: datetime | None
    updated_by: str | None


class FinalMetric(View):
    """The last value and the extremes of a series of rank 0. The extremes are null if all values
    are NaN."""

    last: MetricValue
    last_step: int
    min: MetricValue | None
    min_step: int | None
    max: MetricValue | None
    max_step: int | None


class ComparedJob(View):
    id: str
    name: str
    variant: str | None = None
    """The index of the job in its array, and the parameters of a trial (see `Job.variant`)."""
    colour: int | None = None
    """Number of the colour that a user has chosen for the job (see `Job.colour`)."""
    array_id: str | None = None
    """Id of the job's array or sweep."""
    labels: dict[str, str] = {}
    owner: str
    state: JobState
    experiment: str | None
    tags: list[str]
    world_size: int
    created_at: datetime
    waited_s: float
    """Seconds from submission to the first start, or until now."""
    ran_s: float | None
    """Seconds from the first start to the end, or until now; null before the first start."""
    goodput: Goodput | None
    cost: Cost | None


class FieldDifference(View):
    """A field whose value differs between the job documents."""

    pointer: str
    values: list[Any]
    """Value in each document, in the order of `jobs`; null if the document's value is null or
    missing."""


class ComparedMetric(View):
    key: str
    values: list[FinalMetric | None]
    """Values of each job, in the order of `jobs`; null if the job does not have this series."""
    changes: list[float | None]
    """Last value of each job minus the baseline's last value, in the order of `jobs`; null if
    either value is not a finite number, or if there is no baseline."""


class SyncFigures(View):
    """The cost of keeping the ranks' copies of the model in sync. A field is null if the job has
    not reported it."""

    topology: str
    """How the copies are kept in sync, such as `all-reduce`."""
    steps: int
    """Number of completed steps."""
    samples_per_s: float | None
    """Samples per second in the most recent steps."""
    sent_bytes: float | None
    """Bytes sent per step by all ranks together, averaged over the steps before the last
    evaluation."""
    staleness_mean: float | None
    """Mean number of updates that other ranks make after a rank has read the weights and before it
    updates them; 0 if all ranks take each step together."""
    staleness_max: float | None
    consensus_distance: float | None
    """Distance of the ranks' copies from their mean; 0 if all copies are identical."""
    loss: MetricValue | None
    """The last `val/loss`."""


class Comparison(View):
    """A comparison of several jobs."""

    jobs: list[ComparedJob]
    """The baseline, followed by the other jobs in the order of the request."""
    baseline: str | None
    """Id of the job that is pinned as the baseline of the experiment."""
    differences: list[FieldDifference]
    sync: list[SyncFigures | None]
    """Figures of each job, in the order of `jobs`; null for scripts, for jobs with a single rank,
    and for jobs whose ranks share one model or are federated clients."""
    metrics: list[ComparedMetric]


class Experiment(View):
    """The jobs that have the same value for the label `experiment`."""

    name: str
    num_jobs: int
    newest_job: str
    newest_name: str = ""
    newest_at: datetime | None = None
    """When the newest job was submitted."""
    baseline: str | None
    """Id of the job with which the other jobs are compared."""
    states: dict[JobState, int] = {}
    """Number of jobs in each state; states without jobs are omitted."""


class ExperimentPage(View):
    items: list[Experiment]
    next_cursor: str | None


class MetricRange(View):
    """The range of a metric's last values over several jobs; null if no value is a number."""

    key: str
    num_jobs: int
    least: MetricValue | None
    least_job: str | None
    greatest: MetricValue | None
    greatest_job: str | None


class ExperimentSummary(Experiment):
    notes: str = ""
    """Notes in Markdown; empty if the experiment has none."""
    pinned: list[str] = []
    """Ids of the jobs that come first in the experiment's lists."""
    layout: dict[str, Any] = {}
    """The charts of the experiment's web page, which only the page interprets."""
    revision: int = 0
    """Number of changes by users so far; to be sent in `If-Match`, in double quotes."""
    updated_at: datetime | None = None
    updated_by: str | None = None
    num_summarised: int
    """Number of jobs, starting with the newest, that `metrics` covers."""
    metrics: list[MetricRange]


class JobGroup(View):
    """Jobs with the same value of a label, or of the same sweep or user."""

    key: str | None
    """The label's value, the array id of the sweep, or the user; null for jobs that have no such
    label or are in no sweep."""
    name: str | None = None
    """The name of the sweep's jobs; null if the jobs are not grouped by sweep."""
    num_jobs: int
    num_values: int
    """Number of jobs whose value is a number. Jobs without the value and jobs whose value is NaN
    don't count in the other figures, which are null if no job counts."""
    best: MetricValue | None = None
    """The smallest value or, if the order is descending, the largest value."""
    best_job: str | None = None
    mean: MetricValue | None = None
    std: MetricValue | None = None
    """Sample standard deviation; null if there is only one value."""
    min: MetricValue | None = None
    max: MetricValue | None = None
    as_of: datetime | None = None
    """The time up to which the figures cover the points of jobs that have not ended; null if the
    figures are final."""


class JobGroupPage(View):
    items: list[JobGroup]
    next_cursor: str | None


class ParameterImportance(View):
    """How much a metric depends on a parameter."""

    name: str
    num_values: int
    """Number of different values among the runs. A parameter that a run doesn't have counts as a
    value."""
    importance: float | None = None
    """The share of the metric's variance that depends on the parameter, alone or together with
    others, as far as the forest explains it. The sum over all parameters can be greater than 1.
    Null if there is a `reason` why nothing is known."""
    low: float | None = None
    """Lower end of the 90% interval."""
    high: float | None = None
    """Upper end of the 90% interval."""
    same_as: list[str] = []
    """Parameters that change together with this one in all runs, so their effects can't be
    distinguished from this parameter's."""


class Importance(View):
    """How much a metric depends on each parameter, estimated from runs."""

    metric: str
    num_runs: int
    """Number of runs from which the importance is estimated."""
    num_sampled_from: int
    """Number of runs that could be used. If there are too many runs, `num_runs` of them are chosen
    at random, always the same ones."""
    left_out: dict[str, int]
    """Number of runs that don't count, by reason: `failed`, `cancelled`, `stopped_early`,
    `unfinished`, or `without_value` for runs whose value is missing or not finite."""
    method: str
    """How the importance is estimated."""
    explained: float | None = None
    """The share of the variance that the forest explains for runs on which it was not trained; 1
    is a perfect prediction. The importances of a forest that explains little are imprecise."""
    reason: Reason | None = None
    """Why there are no importances: `too_few_runs`, `no_parameters`, `same_value`, or
    `not_explained` if the forest explains nothing; null if there are importances."""
    parameters: list[ParameterImportance]
    """The parameters that vary, the most important parameter first."""
    constant: list[str] = []
    """Parameters with the same value in all runs."""


class SavedView(View):
    """A list of jobs that a user saved under a name."""

    name: str
    owner: str
    project: str | None
    """The project that the view is for; null if the view is only for its owner."""
    query: dict[str, Any]
    """The filter of the list, and its `sort`, `columns` and `group`, as in the request; fields
    with default values are left out."""
    updated_at: datetime


class SavedViewPage(View):
    items: list[SavedView]
    next_cursor: str | None
