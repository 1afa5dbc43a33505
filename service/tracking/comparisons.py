"""Comparison of jobs: the differences between their documents, and the results of each job."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from sqlalchemy.orm import Session

from dray import views
from dray.arguments import with_parameters
from dray.spec import AllReduce, ParameterServer
from ray_workers.shared.contracts import (
    ALL_SENT_BYTES,
    CONSENSUS_DISTANCE,
    STALENESS_MAX,
    STALENESS_MEAN,
)
from service.db.models import JobRow
from service.db.repositories import jobs as jobs_repository
from service.db.repositories.catalog import experiments as repository
from service.db.repositories.telemetry import metric_summaries
from service.db.repositories.telemetry.metric_summaries import MetricSummary
from service.domain import documents
from service.domain.errors import NotComparable
from service.domain.tracking.differences import differences
from service.domain.tracking.search_tree import EXPERIMENT
from service.ingest import goodput
from service.jobs import serializers
from service.jobs.service import found
from service.telemetry.chunk_columns import by_name

LOSS = "val/loss"


def compare(session: Session, job_ids: Sequence[str], now: datetime) -> views.Comparison:
    """Compare jobs with each other and with their experiment's baseline.

    Raises NotFound if a job does not exist, and NotComparable for a single job without a baseline.
    """
    rows = [found(session, job_id) for job_id in dict.fromkeys(job_ids)]
    labels = jobs_repository.labels(session, [row.id for row in rows])
    baseline = _baseline(session, labels)
    if baseline is not None:
        others = [row for row in rows if row.id != baseline]
        rows = [found(session, baseline), *others]
    if len(rows) == 1:
        raise NotComparable(
            f"{rows[0].id} is a single job without a baseline",
            hint="specify another job, or pin a baseline for the experiment: "
            "dray experiment baseline EXPERIMENT JOB",
        )
    ids = [row.id for row in rows]
    summaries = metric_summaries.of_jobs(session, ids)
    labels, tags = jobs_repository.labels(session, ids), jobs_repository.tags(session, ids)
    variants = serializers.variants(session, rows)
    return views.Comparison(
        jobs=[_job(row, variants.get(row.id), labels[row.id], tags[row.id], now) for row in rows],
        baseline=baseline,
        differences=[
            views.FieldDifference(pointer=pointer, values=values)
            for pointer, values in differences(
                [with_parameters(_document(row)) for row in rows]
            ).items()
        ],
        sync=[_sync(row, summaries[row.id]) for row in rows],
        metrics=_metrics([summaries[each] for each in ids], has_baseline=baseline is not None),
    )


def _baseline(session: Session, labels: Mapping[str, Mapping[str, str]]) -> str | None:
    """Return the baseline of the jobs' experiment; None if the jobs are not all in the same
    experiment."""
    names = {of_job[EXPERIMENT] for of_job in labels.values() if EXPERIMENT in of_job}
    if len(names) != 1:
        return None
    return next(iter(repository.baselines(session, names).values()), None)


def _document(row: JobRow) -> Mapping[str, Any]:
    """Return the job's document with the defaults of this release, so that a field that an earlier
    release did not have is no difference. A document that this release rejects is returned as
    stored."""
    try:
        return documents.checked(row.spec).document
    except documents.DocumentRefused:
        return documents.shown(row.spec)


def _job(
    row: JobRow, variant: str | None, labels: dict[str, str], tags: list[str], now: datetime
) -> views.ComparedJob:
    ended = row.finished_at or now
    ran_s = None if row.started_at is None else (ended - row.started_at).total_seconds()
    return views.ComparedJob(
        id=row.id,
        name=row.name,
        owner=row.owner,
        state=row.state,
        variant=variant,
        colour=row.colour,
        array_id=row.array_id,
        experiment=labels.get(EXPERIMENT),
        labels=labels,
        tags=tags,
        world_size=row.world_size,
        created_at=row.created_at,
        waited_s=max(0.0, ((row.started_at or ended) - row.created_at).total_seconds()),
        ran_s=None if ran_s is None else max(0.0, ran_s),
        goodput=goodput.view(row.slot_seconds),
        cost=None if row.cost is None else views.Cost(**row.cost),
    )


def _sync(row: JobRow, summaries: Mapping[str, MetricSummary]) -> views.SyncFigures | None:
    try:
        spec = documents.checked(row.spec).spec
    except documents.DocumentRefused:
        return None
    # `sync` describes only ranks with complete copies of the model. For example, `sync` does not
    # apply if the model is divided.
    has_copies = spec.recipe is not None and not spec.is_divided and spec.federated is None
    if spec.resources.num_workers == 1 or not has_copies:
        return None

    def last(key: str) -> float | None:
        value = None if key not in summaries else summaries[key].last_value
        return value if value is not None and math.isfinite(value) else None

    is_one_step = not spec.copies_differ and (
        not isinstance(spec.sync, ParameterServer) or spec.sync.mode == "synchronous"
    )
    loss = summaries.get(LOSS)
    progress = row.progress or {}
    return views.SyncFigures(
        topology=(spec.sync or AllReduce()).label,
        steps=progress.get("step", 0),
        samples_per_s=progress.get("samples_per_s"),
        sent_bytes=last(ALL_SENT_BYTES),
        staleness_mean=0.0 if is_one_step else last(STALENESS_MEAN),
        staleness_max=0.0 if is_one_step else last(STALENESS_MAX),
        consensus_distance=0.0 if is_one_step else last(CONSENSUS_DISTANCE),
        loss=None if loss is None else _final(loss).last,
    )


def _metrics(
    of_jobs: Sequence[Mapping[str, MetricSummary]], *, has_baseline: bool
) -> list[views.ComparedMetric]:
    """Return the metrics of all jobs. `has_baseline` states whether the first job is the
    baseline."""
    metrics = []
    for key in sorted({key for of_job in of_jobs for key in of_job}):
        values = [of_job.get(key) for of_job in of_jobs]
        first = values[0] if has_baseline else None
        metrics.append(
            views.ComparedMetric(
                key=key,
                values=[None if one is None else _final(one) for one in values],
                changes=[_change(first, one) for one in values],
            )
        )
    return metrics


def _final(summary: MetricSummary) -> views.FinalMetric:
    return views.FinalMetric(
        last=by_name(math.nan if summary.last_value is None else summary.last_value),
        last_step=summary.last_step,
        min=None if summary.min_value is None else by_name(summary.min_value),
        min_step=summary.min_step,
        max=None if summary.max_value is None else by_name(summary.max_value),
        max_step=summary.max_step,
    )


def _change(baseline: MetricSummary | None, summary: MetricSummary | None) -> float | None:
    if baseline is None or summary is None:
        return None
    if baseline.last_value is None or summary.last_value is None:
        return None
    change = summary.last_value - baseline.last_value
    return change if math.isfinite(change) else None
