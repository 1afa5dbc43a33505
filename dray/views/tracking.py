"""Comparisons of jobs, experiments, and what people wrote about jobs."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from dray.views.base import MetricValue, View
from dray.views.jobs import Cost, Goodput, JobState


class Annotations(View):
    """Tags and notes of a job, which may change at any time."""

    tags: list[str]
    notes: str
    """Markdown; empty if nobody wrote any."""
    revision: int
    """Number of changes so far; the answer's ETag."""
    updated_at: datetime | None
    updated_by: str | None


class FinalMetric(View):
    """A series of rank 0: its newest value and its extremes. A value is null if all are NaN."""

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
    """From the submit to the first start, or to now."""
    ran_s: float | None
    """From the first start to the end, or to now; null before it."""
    goodput: Goodput | None
    cost: Cost | None


class FieldDifference(View):
    """A field in which the documents differ."""

    pointer: str
    values: list[Any]
    """Of each job, in the order of `jobs`; null also where a document has no such field."""


class ComparedMetric(View):
    key: str
    values: list[FinalMetric | None]
    """Of each job, in the order of `jobs`; null of one that has no such series."""
    changes: list[float | None]
    """Newest value less that of the baseline; null where either is not a finite number, and
    without a baseline."""


class SyncFigures(View):
    """The price that a job's ranks paid for keeping their copies of the model in step. A figure is
    null where the job has not reported it."""

    topology: str
    """The way in which they did, such as `all-reduce`."""
    steps: int
    """Steps that are done."""
    samples_per_s: float | None
    """Of the newest steps."""
    sent_bytes: float | None
    """Bytes that all ranks together sent in a step, on average before the last evaluation."""
    staleness_mean: float | None
    """Updates of others that came between the reading of weights and the update with their
    gradient; 0 where all ranks take one step together."""
    staleness_max: float | None
    consensus_distance: float | None
    """Distance of the copies from their mean; 0 where all are equal."""
    loss: MetricValue | None
    """The newest `val/loss`."""


class Comparison(View):
    """Jobs side by side."""

    jobs: list[ComparedJob]
    """The baseline, then the others as they were asked for."""
    baseline: str | None
    """Id of the job that is pinned as the baseline of their experiment."""
    differences: list[FieldDifference]
    sync: list[SyncFigures | None]
    """Of each job, in the order of `jobs`; null of a script, of one rank, and of a job whose ranks
    share a model or are clients."""
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
    """The newest values of a metric over jobs. Null where no job has a number."""

    key: str
    num_jobs: int
    least: MetricValue | None
    least_job: str | None
    greatest: MetricValue | None
    greatest_job: str | None


class ExperimentSummary(Experiment):
    states: dict[JobState, int]
    """Number of jobs in each state that one is in."""
    num_summarised: int
    """Number of its newest jobs that `metrics` is about."""
    metrics: list[MetricRange]
