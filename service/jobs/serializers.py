"""Converts rows to the views of the API."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Literal

from sqlalchemy import Row
from sqlalchemy.orm import Session

from dray import views
from dray.views import DrillKind, DrillState
from service.db.models import (
    ArtifactRow,
    AttemptCostRow,
    AttemptRow,
    CheckpointRow,
    DrillRow,
    EventRow,
    JobRow,
)
from service.db.repositories import jobs as repository
from service.db.repositories import surroundings
from service.db.repositories.submission import sweeps as sweeps_repository
from service.domain.documents import shown
from service.domain.events import ACTOR
from service.domain.progress import without_rates
from service.domain.sweeps import naming
from service.ingest import goodput
from service.lifecycle.resizing import HOLDING


def jobs(session: Session, rows: Sequence[JobRow]) -> list[views.Job]:
    job_ids = [row.id for row in rows]
    labels, tags = repository.labels(session, job_ids), repository.tags(session, job_ids)
    named, cluster = variants(session, rows), _cluster(session)
    return [_job(row, labels[row.id], tags[row.id], named.get(row.id), *cluster) for row in rows]


def variants(session: Session, rows: Sequence[JobRow | Row[Any]]) -> dict[str, str]:
    """Return the `Job.variant` of the jobs that belong to an array, keyed by job id."""
    in_arrays = [row for row in rows if row.array_id is not None]
    if not in_arrays:
        return {}
    array_ids = sorted({row.array_id for row in in_arrays if row.array_id is not None})
    of_sweeps = sweeps_repository.searched(session, array_ids)
    names = {array_id: naming.varied(found) for array_id, found in of_sweeps.items()}
    trials = [row.id for row in in_arrays if row.array_id in names]
    values = sweeps_repository.parameters(session, trials)
    return {
        row.id: naming.variant(
            row.array_index or 0, values.get(row.id), names.get(row.array_id or "", {})
        )
        for row in in_arrays
    }


def _cluster(session: Session) -> tuple[str | None, bool]:
    """Return the URL of Ray's dashboard, and whether the cluster does not respond."""
    seen = surroundings.seen(session)
    return seen.ray_dashboard, seen.connected is False


def new_job(session: Session, row: JobRow, labels: Mapping[str, str]) -> views.Job:
    """Convert the row of a job that was just stored with these labels."""
    named = variants(session, [row]).get(row.id)
    return _job(row, dict(labels), [], named, *_cluster(session))


def job(session: Session, row: JobRow) -> views.Job:
    return jobs(session, [row])[0]


def status(session: Session, row: Row[Any]) -> views.Job:
    """Convert the row that `repositories.jobs.status` found."""
    tags = sorted((row.tags or "").split())
    named = variants(session, [row]).get(row.id)
    return _job(row, row.labels or {}, tags, named, row.ray_dashboard, row.connected is False)


def _job(
    row: JobRow | Row[Any],
    labels: dict[str, str],
    tags: list[str],
    variant: str | None,
    dashboard: str | None,
    is_silent: bool,
) -> views.Job:
    """Convert the row. `is_silent` is set if the cluster does not respond, so that it is unknown
    whether the job is training."""
    base = f"/v1/jobs/{row.id}"
    shown_progress = _progress(row, is_silent)
    return views.Job(
        id=row.id,
        name=row.name,
        owner=row.owner,
        project=row.project,
        labels=labels,
        tags=tags,
        state=row.state,
        reason=views.Reason(code=row.reason_code, message=row.reason_message),
        queue=row.queue,
        priority=row.priority,
        held_by=row.held_by,
        begin_at=row.begin_at,
        reservation=row.reservation,
        deadline=row.deadline,
        max_runtime_s=row.max_runtime_s,
        max_runtime_from=_source_of_limit(row),
        spec=shown(row.spec),
        array_id=row.array_id,
        array_index=row.array_index,
        variant=variant,
        colour=row.colour,
        schedule_id=row.schedule_id,
        scheduled_at=row.scheduled_at and datetime.fromisoformat(row.scheduled_at),
        attempt=row.attempt,
        world_size=row.world_size,
        spares=row.num_spares,
        spares_ready=row.spares_ready if row.state in HOLDING else 0,
        memory_copies=_memory_copies(row),
        position=row.position,
        progress=None if shown_progress is None else views.Progress(**shown_progress),
        summary=row.summary,
        warnings=[views.Reason(**each) for each in row.warnings or ()],
        recoveries=row.recoveries,
        goodput=goodput.view(row.slot_seconds),
        cost=None if row.cost is None else views.Cost(**row.cost),
        created_at=row.created_at,
        started_at=row.started_at,
        first_step_at=row.first_step_at,
        finished_at=row.finished_at,
        links=views.Links(
            self=base,
            metrics=f"{base}/metrics",
            logs=f"{base}/logs",
            events=f"{base}/events",
            artifacts=f"{base}/artifacts",
            ray_dashboard=dashboard,
        ),
    )


def _memory_copies(row: JobRow | Row[Any]) -> views.MemoryCopies | None:
    if row.memory_copies is None or row.state not in HOLDING:
        return None
    return views.MemoryCopies(**row.memory_copies)


def _source_of_limit(row: JobRow | Row[Any]) -> Literal["job", "queue"] | None:
    if row.max_runtime_s is None:
        return None
    return "queue" if row.is_runtime_of_queue else "job"


def progress(session: Session, row: JobRow) -> Mapping[str, Any] | None:
    """Return the progress to show."""
    return _progress(row, _cluster(session)[1])


def _progress(row: JobRow | Row[Any], is_silent: bool) -> Mapping[str, Any] | None:
    runs = row.state == views.JobState.RUNNING and not is_silent
    shown: Mapping[str, Any] | None = row.progress if runs else without_rates(row.progress)
    return shown


def other_job(row: Row[Any]) -> views.OtherJob:
    return views.OtherJob(
        id=row.id,
        name=row.name,
        state=row.state,
        priority=row.priority,
        world_size=row.world_size,
    )


def event(row: EventRow) -> views.Event:
    data = dict(row.data)
    actor = data.pop(ACTOR, None)
    return views.Event(
        seq=row.seq,
        time=row.time,
        type=row.type,
        from_state=row.from_state,
        to_state=row.to_state,
        attempt=row.attempt,
        code=row.code,
        message=row.message,
        actor=actor if isinstance(actor, str) else None,
        data=data,
    )


def attempt(row: AttemptRow, cost: AttemptCostRow | None) -> views.Attempt:
    reason = None
    if row.reason_code is not None:
        reason = views.Reason(code=row.reason_code, message=row.reason_message or "")
    return views.Attempt(
        attempt=row.attempt,
        state=row.phase,
        world_size=row.world_size,
        resume_step=row.resume_step or 0,
        receipt=None if row.receipt is None else views.Receipt.model_validate(row.receipt),
        reason=reason,
        cost=None if cost is None else _cost(cost),
        created_at=row.created_at,
        started_at=row.started_at,
        finished_at=row.finished_at,
    )


def _cost(row: AttemptCostRow) -> views.Cost:
    return views.Cost(
        currency=row.currency,
        total=row.total,
        useful=row.useful,
        wasted=max(0.0, row.total - row.useful - row.unreported),
        unreported=row.unreported,
    )


def checkpoint(
    row: CheckpointRow, *, is_latest: bool, is_best: bool, metric: str | None
) -> views.Checkpoint:
    return views.Checkpoint(
        attempt=row.attempt,
        step=row.step,
        size_bytes=row.size_bytes,
        sha256=row.manifest_sha256,
        created_at=row.created_at,
        is_latest=is_latest,
        is_best=is_best,
        metric=row.metrics.get(metric) if metric else None,
        url=row.url,
    )


def artifact(row: ArtifactRow) -> views.Artifact:
    return views.Artifact(
        id=row.id,
        path=row.path,
        size_bytes=row.size_bytes,
        sha256=row.sha256,
        created_at=row.created_at,
    )


def drill(row: DrillRow) -> views.Drill:
    return views.Drill(
        id=row.id,
        kind=DrillKind(row.kind),
        rank=row.rank,
        at_step=row.at_step,
        attempt=row.attempt,
        state=DrillState(row.state),
        step=row.step,
        recovery_s=row.recovery_s,
        steps_lost=row.steps_lost,
        message=row.message,
        created_at=row.created_at,
        finished_at=row.finished_at,
    )
