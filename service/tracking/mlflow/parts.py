"""The next part of a job to export to MLflow. A part is read in one transaction and has a bounded
size."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from sqlalchemy.orm import Session

from service.db.models import ArtifactRow, JobRow, MlflowExportRow
from service.db.repositories import attempts as attempts_repository
from service.db.repositories import jobs as jobs_repository
from service.db.repositories.catalog import mlflow_exports as repository
from service.db.repositories.catalog import registry, tracking
from service.domain.series import Points
from service.jobs import serializers
from service.telemetry import metric_reader
from service.tracking.mlflow.models import CONFIGS
from service.tracking.mlflow.runs import (
    STATUS,
    artifact_path_of,
    experiment_of,
    key_of,
    milliseconds,
    params_of,
    tags_of,
)

POINTS_OF_A_PART = 10_000
"""Maximum number of points of all metrics in one part."""

Metric = tuple[str, float, int, int]
"""(key, value, Unix time in milliseconds, step)"""


@dataclass(frozen=True)
class NewRun:
    experiment: str
    name: str
    job_id: str
    start_time_ms: int
    params: dict[str, str]


@dataclass(frozen=True)
class ArtifactFile:
    id: str
    path: str
    url: str
    size_bytes: int
    sha256: str


@dataclass(frozen=True)
class RegisteredVersion:
    """A version of a registered model that is the result of the job."""

    name: str
    version: int
    card: str
    aliases: list[str]


@dataclass(frozen=True)
class JobPart:
    """The part of a job's data that has not yet been exported to the job's run."""

    run: NewRun
    run_id: str | None
    status: str
    end_time_ms: int | None
    tags: dict[str, str]
    metrics: list[Metric]
    artifacts: list[ArtifactFile]
    model: ArtifactFile | None
    """The file that describes a recipe's model."""
    versions: list[RegisteredVersion]
    is_changed: bool
    """Whether the status or the tags may have changed since the last part."""
    event_seq: int
    revision: int
    """The revision of tags and notes."""
    after_step: int
    last_steps: dict[str, int]
    has_more: bool
    """Whether the job has more points after this part."""
    is_over: bool

    @property
    def completes(self) -> bool:
        """Whether this part completes the run."""
        return self.is_over and not self.has_more


def next_part(session: Session, job_id: str) -> JobPart | None:
    """Return the next part; None if the job no longer exists."""
    job, row = jobs_repository.get(session, job_id), repository.get(session, job_id)
    if job is None or row is None or job.deleted_at is not None:
        return None
    view, annotation = serializers.job(session, job), tracking.annotation(session, job_id)
    revision = 0 if annotation is None else annotation.revision
    series, after_step, has_more = _new_points(session, job, row)
    times = metric_reader.read_times(session, job_id, series, max_points=POINTS_OF_A_PART) or {}
    fallback = (job.started_at or job.created_at).timestamp()
    metrics = [
        (key_of(key), value, int(1000 * at), step)
        for key, (steps, values) in series.items()
        for step, value, at in zip(
            steps, values, times.get(key) or [fallback] * len(steps), strict=True
        )
    ]
    last_steps = {**row.last_steps, **{key: steps[-1] for key, (steps, _) in series.items()}}
    found = [_file(one) for one in attempts_repository.artifacts(session, job_id)]
    by_recipe = found if view.spec.get("recipe") else []
    return JobPart(
        run=NewRun(
            experiment=experiment_of(view.labels),
            name=view.title,
            job_id=job_id,
            start_time_ms=milliseconds(job.created_at),
            params=params_of(view.spec),
        ),
        run_id=row.run_id,
        status=STATUS[job.state],
        end_time_ms=None if job.finished_at is None else milliseconds(job.finished_at),
        tags={
            **tags_of(view, None if annotation is None else annotation.notes),
            "mlflow.runName": view.title,
        },
        metrics=sorted(metrics, key=lambda metric: metric[3]),
        artifacts=[one for one in found if row.artifacts.get(one.id) != one.sha256],
        model=next((one for path in CONFIGS for one in by_recipe if one.path == path), None),
        versions=versions_of(session, job_id),
        is_changed=(job.event_seq, revision) != (row.event_seq, row.revision),
        event_seq=job.event_seq,
        revision=revision,
        after_step=after_step,
        last_steps=last_steps,
        has_more=has_more,
        is_over=job.state.is_terminal,
    )


def versions_of(session: Session, job_id: str) -> list[RegisteredVersion]:
    """Return the versions of registered models that are the result of the job."""
    rows = registry.results_of(session, job_id)
    aliases = registry.aliases(session, {model.folded for model, _ in rows})
    return [
        RegisteredVersion(
            model.name,
            row.version,
            row.card,
            [alias for alias, number in aliases[model.folded].items() if number == row.version],
        )
        for model, row in rows
    ]


def _file(row: ArtifactRow) -> ArtifactFile:
    return ArtifactFile(row.id, artifact_path_of(row.path), row.url, row.size_bytes, row.sha256)


def _new_points(
    session: Session, job: JobRow, row: MlflowExportRow
) -> tuple[dict[str, Points], int, bool]:
    """Return the next points of rank 0, the step after which to continue, and whether there are
    more points. If a later attempt repeats a step, the run keeps the first value, because MLflow
    can't replace values.
    """
    known: Mapping[str, int] = row.last_steps
    most = max(2, POINTS_OF_A_PART // max(1, job.num_metric_keys))

    def read(keys: list[str] | None, after_step: int) -> tuple[dict[str, Points], int | None]:
        series, end = metric_reader.read_in_order(
            session, job.id, keys=keys, rank=0, after_step=after_step, max_points=most
        )
        fresh = {}
        for key, (steps, values) in series.items():
            begin = next((n for n, at in enumerate(steps) if at > known.get(key, -1)), len(steps))
            if begin < len(steps):
                fresh[key] = steps[begin:], values[begin:]
        return fresh, end

    series, end = read(None, row.after_step)
    if end is not None:
        return series, end, True
    newest = max((steps[-1] for steps, _ in series.values()), default=row.after_step + 1)
    after_step = max(row.after_step, newest - 1)  # the newest step may be incomplete
    if series or not job.state.is_terminal:
        return series, after_step, job.state.is_terminal
    # Also export new points at steps up to `after_step`: compare each metric's last step with its
    # last exported step.
    ends = metric_reader.read(session, job.id, keys=None, rank=0, after_step=-1, max_points=2)
    for key, (steps, _) in ends.items():
        if steps[-1] > known.get(key, -1):
            series, _ = read([key], known.get(key, -1))
            return series, after_step, True
    return {}, after_step, False
