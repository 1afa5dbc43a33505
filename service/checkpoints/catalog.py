"""Committed checkpoints: which is meant, which is best, and what files each is made of."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

from sqlalchemy import Row
from sqlalchemy.orm import Session

from dray import views
from dray.spec.recipes import MINIMISED
from service.db.models import AttemptRow, CheckpointRow, JobRow
from service.db.repositories import attempts as repository
from service.domain.errors import CheckpointNotFound
from service.domain.lineage import last_steps
from service.storage.storage import BadKey, Storage, check_key

MANIFEST = "manifest.json"
"""Written last by `ray_workers.training.checkpoint.checkpoint_files`: it commits the checkpoint."""


def began_at_step(attempt: AttemptRow | Row[Any, Any, Any]) -> int | None:
    """Steps done when the attempt began to train; None if it never did.

    A script that says nothing of resuming is taken to begin right before its first metric.
    """
    if attempt.resume_step is not None:
        return attempt.resume_step
    return None if attempt.first_metric_step is None else attempt.first_metric_step - 1


def counting_checkpoints(session: Session, job_id: str) -> list[CheckpointRow]:
    """Newest first, without those that a later attempt went back behind."""
    rows = repository.of_job(session, job_id)
    ends = last_steps({row.attempt: began_at_step(row) for row in rows})
    return [row for row in repository.checkpoints(session, job_id) if row.step <= ends[row.attempt]]


def of_job(session: Session, job: JobRow) -> tuple[list[CheckpointRow], CheckpointRow | None]:
    """Those that are kept and still count, newest first; and the best, if a metric names one."""
    rows = counting_checkpoints(session, job.id)
    return rows, best(rows, best_metric(job))


def best_metric(job: JobRow) -> str | None:
    """The metric that names the job's best checkpoint."""
    metric: str | None = (job.spec.get("checkpoint") or {}).get("best")
    return metric


def best(rows: Sequence[CheckpointRow], metric: str | None) -> CheckpointRow | None:
    """The one with the least or the most of the metric, as the metric is; the oldest of equals."""
    measured = [
        (row, value)
        for row in rows
        if metric and isinstance(value := row.metrics.get(metric), int | float)
    ]
    if not measured:
        return None
    sign = 1 if metric in MINIMISED else -1
    return min(measured, key=lambda pair: (sign * pair[1], pair[0].attempt, pair[0].step))[0]


def at_step(session: Session, job_id: str, step: int) -> CheckpointRow:
    """The newest attempt's checkpoint of this step. CheckpointNotFound if none counts."""
    rows = counting_checkpoints(session, job_id)
    for row in rows:
        if row.step == step:
            return row
    steps = ", ".join(str(row.step) for row in rows[:10])
    raise CheckpointNotFound(
        f"the job {job_id} has no checkpoint of step {step}",
        hint=f"it has those of {steps}" if steps else "it has none",
    )


def files(storage: Storage, row: CheckpointRow) -> list[views.CheckpointFile]:
    """What the checkpoint is made of, by its manifest, which comes last. Blocking.

    CheckpointNotFound if the manifest is gone or is not the one that was committed. What it says
    was written by a process that ran a user's code, so paths are checked.
    """
    try:
        text = storage.read_bytes(f"{storage.key_of(row.url)}/{MANIFEST}")
    except (BadKey, FileNotFoundError):
        raise _broken(row, "its manifest is not in the storage") from None
    if hashlib.sha256(text).hexdigest() != row.manifest_sha256:
        raise _broken(row, "its manifest is not the one that was committed")
    try:
        found = [
            views.CheckpointFile(
                path=check_key(entry["path"]),
                size_bytes=entry["size_bytes"],
                sha256=entry["sha256"],
            )
            for entry in json.loads(text)["files"]
        ]
    except (LookupError, TypeError, ValueError, AttributeError):
        raise _broken(row, "its manifest names no files") from None
    return [
        *found,
        views.CheckpointFile(path=MANIFEST, size_bytes=len(text), sha256=row.manifest_sha256),
    ]


def locate(storage: Storage, row: CheckpointRow, path: str) -> tuple[views.CheckpointFile, str]:
    """One of the checkpoint's files, and its key. CheckpointNotFound if it has none such."""
    for file in files(storage, row):
        if file.path == path:
            key = f"{storage.key_of(row.url)}/{path}"
            try:
                size = storage.size_bytes(key)
            except (BadKey, FileNotFoundError):
                size = None
            if size != file.size_bytes:
                raise _broken(row, f"its file {path!r} is not in the storage as it was committed")
            return file, key
    raise CheckpointNotFound(
        f"the checkpoint of step {row.step} has no file {path!r}",
        hint="its list of files has their paths",
    )


def _broken(row: CheckpointRow, why: str) -> CheckpointNotFound:
    return CheckpointNotFound(
        f"the checkpoint of step {row.step} of the job {row.job_id} can't be read: {why}"
    )
