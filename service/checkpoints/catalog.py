"""Committed checkpoints: their rows in SQL, and their files in the storage. If a rank's report of a
checkpoint is lost, the files still show that the checkpoint was committed."""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from collections.abc import Iterator, Sequence
from typing import Any

from sqlalchemy import Row
from sqlalchemy.orm import Session

from dray import views
from dray.spec.program.recipes import MINIMISED
from ray_workers.shared.contracts import Cause, Frame, FrameKind
from ray_workers.shared.names import attempt_prefix
from service.db.models import AttemptRow, CheckpointRow, JobRow
from service.db.repositories import attempts as repository
from service.domain.attempts.lineage import last_steps
from service.domain.errors import CheckpointNotFound
from service.storage.storage import BadKey, Storage, check_file_name

MANIFEST = "manifest.json"
"""The file that commits a checkpoint, and is therefore written last (see
`ray_workers.training.checkpoint`)."""
MALFORMED = (LookupError, TypeError, ValueError, AttributeError, RecursionError)
"""Exceptions that can be raised when a malformed manifest is read."""
MAX_FOUND = 100
"""Number of an attempt's newest checkpoints that `committed` considers."""
MAX_MANIFEST_BYTES = 16 << 20


def began_at_step(attempt: AttemptRow | Row[Any, Any, Any]) -> int | None:
    """Return the number of steps that were complete when the attempt began to train; None if the
    attempt never began to train, or if the number is unknown.

    A script that does not report the step from which it resumed is assumed to begin just before the
    first metric that it reports. Metrics found in the script's output or files are ignored, because
    each series of such metrics has its own steps.
    """
    if attempt.resume_step is not None:
        return attempt.resume_step
    return None if attempt.first_metric_step is None else attempt.first_metric_step - 1


def counting_checkpoints(session: Session, job_id: str) -> list[CheckpointRow]:
    """Return the job's checkpoints, newest first, except for steps that a later attempt repeated.
    If the replicas of the model differed in an attempt, only its checkpoints up to the last
    comparison that showed equal replicas are included."""
    return _counting(session, job_id)[0]


def _counting(session: Session, job_id: str) -> tuple[list[CheckpointRow], list[CheckpointRow]]:
    """Return the job's checkpoints that count, and the checkpoints that do not count because the
    replicas might have differed. Both are newest first."""
    attempts = repository.of_job(session, job_id)
    ends = last_steps({row.attempt: began_at_step(row) for row in attempts})
    checked = {
        row.attempt: -1 if row.checked_step is None else row.checked_step
        for row in attempts
        if row.corrupted_step is not None or row.reason_code == Cause.CORRUPTED
    }
    counting, suspect = [], []
    for row in repository.checkpoints(session, job_id):
        if row.step > checked.get(row.attempt, row.step):
            suspect.append(row)
        elif row.step <= ends[row.attempt]:
            counting.append(row)
    return counting, suspect


def why_missing(session: Session, job_id: str, step: int | None = None) -> str:
    """Return the end of the sentence that states that the job has no checkpoint at this step, or no
    checkpoint at all if the step is None. The end is the reason why an existing checkpoint does not
    count, or an empty string."""
    _, suspect = _counting(session, job_id)
    if not any(step in (None, row.step) for row in suspect):
        return ""
    return " that was saved while the replicas of the model were known to be equal"


def of_job(session: Session, job: JobRow) -> tuple[list[CheckpointRow], CheckpointRow | None]:
    """Return the job's `counting_checkpoints`, and the checkpoint with the best value of the job's
    metric, if any."""
    rows = counting_checkpoints(session, job.id)
    return rows, best(rows, best_metric(job))


def best_metric(job: JobRow) -> str | None:
    """Return the metric that determines the job's best checkpoint."""
    metric: str | None = (job.spec.get("checkpoint") or {}).get("best")
    return metric


def best(rows: Sequence[CheckpointRow], metric: str | None) -> CheckpointRow | None:
    """Return the checkpoint with the best value of the metric, if any; in a tie, the oldest."""
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
    """Return the newest attempt's checkpoint at this step. Raises CheckpointNotFound if there is no
    such checkpoint."""
    rows = counting_checkpoints(session, job_id)
    for row in rows:
        if row.step == step:
            return row
    steps = ", ".join(str(row.step) for row in rows[:10])
    raise CheckpointNotFound(
        f"the job {job_id} has no checkpoint at step {step}{why_missing(session, job_id, step)}",
        hint=f"the job has checkpoints at steps {steps}" if steps else "the job has no checkpoints",
    )


def files(storage: Storage, row: CheckpointRow) -> list[views.CheckpointFile]:
    """Return the files that the checkpoint's manifest lists, and the manifest itself. Blocking.

    Raises CheckpointNotFound if the manifest is missing or was changed after the commit. The paths
    in the manifest are checked, because a process that runs user code wrote it.
    """
    try:
        text = storage.read_bytes(f"{storage.key_of(row.url)}/{MANIFEST}")
    except (BadKey, FileNotFoundError):
        raise _broken(row, "the manifest is missing from the storage") from None
    if hashlib.sha256(text).hexdigest() != row.manifest_sha256:
        raise _broken(row, "the manifest was changed after the checkpoint was committed")
    try:
        found = files_of(json.loads(text))
    except MALFORMED:
        raise _broken(row, "the manifest does not list any files") from None
    return [
        *found,
        views.CheckpointFile(path=MANIFEST, size_bytes=len(text), sha256=row.manifest_sha256),
    ]


def files_of(manifest: Any) -> list[views.CheckpointFile]:
    """Return the files that a manifest lists. Raise one of the exceptions in `MALFORMED` if the
    manifest is malformed."""
    return [
        views.CheckpointFile(
            path=check_file_name(entry["path"]),
            size_bytes=entry["size_bytes"],
            sha256=entry["sha256"],
        )
        for entry in manifest["files"]
    ]


def locate(storage: Storage, row: CheckpointRow, path: str) -> tuple[views.CheckpointFile, str]:
    """Return a file of the checkpoint and its storage key. Raises CheckpointNotFound if the file is
    missing."""
    for file in files(storage, row):
        if file.path == path:
            key = f"{storage.key_of(row.url)}/{path}"
            try:
                size = storage.size_bytes(key)
            except (BadKey, FileNotFoundError):
                size = None
            if size != file.size_bytes:
                raise _broken(
                    row,
                    f"the file {path!r} was deleted or changed after the checkpoint was committed",
                )
            return file, key
    raise CheckpointNotFound(
        f"the checkpoint at step {row.step} has no file {path!r}",
        hint="list the checkpoint's files to see their paths",
    )


def _broken(row: CheckpointRow, why: str) -> CheckpointNotFound:
    return CheckpointNotFound(
        f"the checkpoint of job {row.job_id} at step {row.step} can't be read: {why}"
    )


def committed(storage: Storage, job_id: str, attempt: int) -> Iterator[Frame]:
    """Yield a report for each committed checkpoint, newest first, identical to the report that the
    rank sent. Blocking. Raises StorageUnavailable. A checkpoint counts as committed if its manifest
    names the same step as its folder, and every file has the size in the manifest. Hashes are
    compared when ranks load the checkpoint.
    """
    base = f"{attempt_prefix(job_id, attempt)}/checkpoints"
    folders = [name for name in storage.names(base) if name.startswith("step-")]
    for name in folders[: -MAX_FOUND - 1 : -1]:
        with contextlib.suppress(
            FileNotFoundError, *MALFORMED
        ):  # not committed, or not a checkpoint
            yield _report(storage, f"{base}/{name}", int(name.removeprefix("step-")))


def _report(storage: Storage, key: str, step: int) -> Frame:
    manifest_key = f"{key}/{MANIFEST}"
    if not 0 < storage.size_bytes(manifest_key) <= MAX_MANIFEST_BYTES:
        raise ValueError("the manifest's size is out of range")
    text = storage.read_bytes(manifest_key)
    manifest = json.loads(text)
    files = files_of(manifest)
    if manifest["step"] != step:
        raise ValueError("the manifest belongs to another step")
    if any(storage.size_bytes(f"{key}/{file.path}") != file.size_bytes for file in files):
        raise ValueError("a file is incomplete")
    body = {
        "step": step,
        "url": storage.url_of(key),
        "size_bytes": len(text) + sum(file.size_bytes for file in files),
        "manifest_sha256": hashlib.sha256(text).hexdigest(),
        "metrics": dict(manifest["metrics"]),
    }
    return Frame(rank=0, incarnation=0, kind=FrameKind.CHECKPOINT, time=time.time(), body=body)
