"""Starting a job from another job's checkpoint (`init_from`).

The checkpoint is chosen when the job is submitted, so that the choice does not depend on how long
the job waits. The other job can't be deleted before this job has ended, but the other job may
replace its checkpoints (`checkpoint.keep`). If the chosen checkpoint was deleted, this job starts
from the newest or best checkpoint that exists at the start. If `init_from` names a step, the ranks
report instead that the checkpoint no longer exists.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from sqlalchemy.orm import Session

from dray.spec import JobSpec
from dray.train.checkpoints import CheckpointRef
from service.checkpoints import catalog
from service.db.models import CheckpointRow, JobRow
from service.db.repositories import jobs as repository
from service.domain.errors import CheckpointInUse, InitFromDiffers, InitFromNotFound
from service.domain.init_from import continuing, weights

Wanted = Literal["latest", "best"] | int
MOST_OLDER = 10
_TAKE_WEIGHTS = "set init_from.take to weights"


@dataclass(frozen=True)
class InitFromCheckpoint:
    """A checkpoint of another job, as stored in a job's row."""

    job: str
    wanted: Wanted
    attempt: int
    step: int
    url: str
    manifest_sha256: str

    @classmethod
    def of(cls, wanted: Wanted, row: CheckpointRow) -> InitFromCheckpoint:
        return cls(row.job_id, wanted, row.attempt, row.step, row.url, row.manifest_sha256)

    def as_row(self) -> dict[str, Any]:
        return asdict(self)


def resolve(session: Session, spec: JobSpec) -> InitFromCheckpoint | None:
    """Return the checkpoint that `init_from` names; None if the document has no `init_from`.

    The other job is locked until the transaction ends, so that it can't be deleted in the meantime.

    Raises InitFromNotFound if the checkpoint does not exist, and InitFromDiffers if the documents
    show that the checkpoint does not fit.
    """
    asked = spec.init_from
    if asked is None:
        return None
    assert asked.job is not None, "the server has looked up the version of a registered model"
    job = repository.lock(session, asked.job)
    if job is None or job.deleted_at is not None:
        raise InitFromNotFound(
            f"the job {asked.job}, from which this job should start, does not exist",
            pointer="/init_from/job",
            hint="`dray ls` shows the existing jobs",
        )
    row = _chosen(session, job, asked.step)
    if row is None:
        raise _no_such_step(session, job, asked.step)
    _refuse_what_does_not_fit(job, row.step, spec)
    return InitFromCheckpoint.of(asked.step, row)


def current(
    session: Session, job: JobRow
) -> tuple[CheckpointRef | None, tuple[CheckpointRef, ...]]:
    """Return the checkpoint from which an attempt starts if the job has no checkpoints of its own,
    and up to `MOST_OLDER` older checkpoints of the other job, newest first."""
    if job.init_from is None:
        return None, ()
    origin = InitFromCheckpoint(**job.init_from)
    source = repository.get(session, origin.job)
    rows = [] if source is None else catalog.counting_checkpoints(session, source.id)
    kept = any(row.url == origin.url for row in rows)
    if not kept and source is not None and not isinstance(origin.wanted, int):
        row = _chosen(session, source, origin.wanted)
        origin = origin if row is None else InitFromCheckpoint.of(origin.wanted, row)
        job.init_from = origin.as_row()
    older = [_ref(row) for row in rows if row.step < origin.step][:MOST_OLDER]
    return _ref(origin), tuple(older)


def _ref(one: InitFromCheckpoint | CheckpointRow) -> CheckpointRef:
    return CheckpointRef(one.url, one.step, one.manifest_sha256)


def refuse_if_needed(session: Session, job_id: str) -> None:
    """Raise CheckpointInUse if an unfinished job starts from a checkpoint of this job, or has its
    result as the base model."""
    users = repository.starting_from(session, job_id)
    if not users:
        return
    named = ", ".join(users[:3]) + (f" and {len(users) - 3} more" if len(users) > 3 else "")
    one = len(users) == 1
    raise CheckpointInUse(
        f"the unfinished job{'' if one else 's'} {named} need{'s' if one else ''} a checkpoint or "
        f"the result of {job_id}",
        hint=(
            f"wait until {'that job has' if one else 'these jobs have'} ended, or cancel "
            f"{'it' if one else 'them'}"
        ),
    )


def _refuse_what_does_not_fit(source: JobRow, step: int, spec: JobSpec) -> None:
    """Raise InitFromDiffers unless `spec` can start from the state that the source job saved at
    `step`."""
    assert spec.init_from is not None
    is_whole = spec.init_from.take == "everything"
    try:
        before = JobSpec.model_validate(source.spec)
    except ValueError:
        if not is_whole:
            return  # the ranks compare the weights themselves
        raise InitFromDiffers(
            f"this version of dray can't read the document of {source.id}",
            pointer="/init_from/take",
            hint=_TAKE_WEIGHTS,
        ) from None
    found = weights.difference(before, spec)
    if found is not None:
        raise InitFromDiffers(
            f"can't start from the weights of {source.id}: {found.pointer} {found.why}",
            pointer=found.pointer,
            hint="use the earlier job's value, or remove init_from",
        )
    found = continuing.difference(before, step, spec) if is_whole else None
    if found is not None:
        raise InitFromDiffers(
            f"can't continue from the full state of {source.id}: {found.pointer} {found.why}",
            pointer=found.pointer,
            hint=f"change this field, or {_TAKE_WEIGHTS}",
        )


def _chosen(session: Session, job: JobRow, wanted: Wanted) -> CheckpointRow | None:
    rows, best = catalog.of_job(session, job)
    if wanted == "best":
        return best
    if wanted == "latest":
        return rows[0] if rows else None
    return next((row for row in rows if row.step == wanted), None)


def _no_such_step(session: Session, job: JobRow, wanted: Wanted) -> InitFromNotFound:
    rows = catalog.counting_checkpoints(session, job.id)
    steps = ", ".join(str(row.step) for row in rows[:10])
    metric = catalog.best_metric(job)
    if not rows:
        message = f"the job {job.id} has no checkpoint{catalog.why_missing(session, job.id)}"
        hint = None
    elif wanted == "best":
        why = f"none was measured by {metric}" if metric else "its checkpoint.best names no metric"
        message = f"the job {job.id} has no best checkpoint: {why}"
        hint = f"use latest, or one of the steps {steps}"
    else:
        why = catalog.why_missing(session, job.id, wanted) if isinstance(wanted, int) else ""
        message = f"the job {job.id} has no checkpoint at step {wanted}{why}"
        hint = f"the job has checkpoints at steps {steps}"
    return InitFromNotFound(message, pointer="/init_from/step", hint=hint)
