"""Base models that are the result of another job (`model.base: job://ID`).

The other job must have succeeded when this job is submitted, so that its files no longer change.
The other job can't be deleted before this job has ended. Its files are looked up for each attempt.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sqlalchemy.orm import Session

from dray.spec import JobSpec, Pretrained
from dray.spec.program import base_files
from dray.views import JobState
from ray_workers.shared.node_needs import ResultFile
from service.db.repositories import attempts as attempts_repository
from service.db.repositories import jobs as repository
from service.domain.errors import InvalidDocument

AT_BASE = "/model/base"


def refuse_unfit(session: Session, spec: JobSpec) -> None:
    """Raise InvalidDocument if the base is the result of a job that does not exist, has not
    succeeded, or stored no model that can be fine-tuned."""
    job_id = job_of(spec)
    if job_id is None:
        return
    job = repository.lock(session, job_id)  # so that it can't be deleted in the meantime
    fault: str | None
    if job is None or job.deleted_at is not None:
        fault = "does not exist: `dray ls` shows the existing jobs"
    elif job.state is not JobState.SUCCEEDED:
        fault = f"is {job.state}: a job can be a base only after it has succeeded"
    else:
        fault = base_files.fault_of_names([one.name for one in files_of(session, spec)])
        if fault is not None and job.spec.get("recipe") == "fine_tuning":
            fault = f"{fault}. The result contains a model unless model.adapter.merge is false"
    if fault is not None:
        raise InvalidDocument(f"the job {job_id} {fault}", pointer=AT_BASE)


def files_of(session: Session, spec: JobSpec) -> tuple[ResultFile, ...]:
    """Return the files of the job whose result is the base; empty if there is no such job."""
    job_id = job_of(spec)
    if job_id is None:
        return ()
    rows = attempts_repository.artifacts(session, job_id)
    return tuple(ResultFile(row.path, row.url, row.size_bytes, row.sha256) for row in rows)


def ancestor_ids(spec: JobSpec) -> list[str]:
    """Return the jobs from which a fine-tuning job gets its base or its weights."""
    if not isinstance(spec.model, Pretrained):
        return []
    starts = None if spec.init_from is None else spec.init_from.job
    return [one for one in (job_of(spec), starts) if one is not None]


def models_of(session: Session, job_ids: Sequence[str]) -> list[Pretrained]:
    """Return the base models of the jobs that exist and fine-tune a model."""
    found = []
    for job_id in job_ids:
        job = repository.get(session, job_id)
        model = None if job is None else job.spec.get("model")
        if isinstance(model, Mapping) and model.get("name") == "pretrained":
            found.append(Pretrained.model_validate(model))
    return found


def job_of(spec: JobSpec) -> str | None:
    """Return the id of the job whose result is the base; None for any other base."""
    return base_files.job_of(spec.model.base) if isinstance(spec.model, Pretrained) else None
