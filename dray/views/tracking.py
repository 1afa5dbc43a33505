"""Comparisons of jobs, experiments, and users' tags and notes."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from dray.views.base import MetricValue, View
from dray.views.jobs import Cost, Goodput, JobState


class Annotations(View):
    """Tags and notes of a job, which may change at any time."""

    tags: list[str]
    notes: str
    """Notes in Markdown; empty if there are none."""
    revision: int
    """Number of changes so far, which is also the answer's ETag."""
    updated_at: datetime | None
    updated_by: str | None


class FinalMetric(View):
    """A series of rank 0: its newest value and its extremes, which are null if all values are
    NaN."""

    last: MetricValue
    last_step: int
    min: MetricValue | None
    min_step: int | None
    max: MetricValue | None
    max_step: int | None


class ComparedJob(View):
    id: str
    name: str
    owner: str
    state: JobState
    experiment: str | None
    tags: list[str]
    world_size: int
    created_at: datetime
    waited_s: float
    """Seconds from the submission to the first start, or until now."""
    ran_s: float | None
    """Seconds from the first start to the end, or until now; null before the first start."""
    goodput: Goodput | None
    cost: Cost | None


class FieldDifference(View):
    """A field in which the documents differ."""

    pointer: str
    values: list[Any]
    """Value of each job, in the order of `jobs`; also null if a document has no such field."""


class ComparedMetric(View):
    key: str
    values: list[FinalMetric | None]
    """Values of each job, in the order of `jobs`; null for a job without this series."""
    changes: list[float | None]
    """Newest value minus the baseline's newest value; null if either is not a finite number, or if
    there is no baseline."""


class SyncFigures(View):
    """The cost of keeping the ranks' copies of the model in sync. A figure is null if the job has
    not reported it."""

    topology: str
    """How the copies are kept in sync, such as `all-reduce`."""
    steps: int
    """Number of completed steps."""
    samples_per_s: float | None
    """Samples per second in the newest steps."""
    sent_bytes: float | None
    """Bytes that all ranks together sent per step, averaged over the steps before the last
    evaluation."""
    staleness_mean: float | None
    """Mean number of updates by other ranks between a rank's reading of the weights and its own
    update; 0 if all ranks take each step together."""
    staleness_max: float | None
    consensus_distance: float | None
    """Distance of the copies from their mean; 0 if all copies are equal."""
    loss: MetricValue | None
    """The newest `val/loss`."""


class Comparison(View):
    """A comparison of several jobs."""

    jobs: list[ComparedJob]
    """The baseline, then the other jobs in the order of the request."""
    baseline: str | None
    """Id of the job that is pinned as the baseline of their experiment."""
    differences: list[FieldDifference]
    sync: list[SyncFigures | None]
    """Figures of each job, in the order of `jobs`; null for a script, for a job with one rank, and
    for a job whose ranks share a model or are clients."""
    metrics: list[ComparedMetric]


class Experiment(View):
    """The jobs whose label `experiment` has this value."""

    name: str
    num_jobs: int
    newest_job: str
    baseline: str | None
    """Id of the job that the others are compared with."""


class ExperimentPage(View):
    items: list[Experiment]
    next_cursor: str | None


class MetricRange(View):
    """The range of the newest values of a metric over jobs; null if no job has a number."""

    key: str
    num_jobs: int
    least: MetricValue | None
    least_job: str | None
    greatest: MetricValue | None
    greatest_job: str | None


class ExperimentSummary(Experiment):
    states: dict[JobState, int]
    """Number of jobs in each state; states without jobs are left out."""
    num_summarised: int
    """Number of the experiment's newest jobs that `metrics` covers."""
    metrics: list[MetricRange]
