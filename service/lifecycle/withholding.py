"""Withholds a node with a fault, so that it gets no new work until an admin releases it."""

from __future__ import annotations

from collections.abc import Collection
from datetime import datetime

from sqlalchemy.orm import Session

from ray_workers.shared.frame_fields import clean
from service.db.models import WithheldRow
from service.db.repositories import jobs as jobs_repository
from service.db.repositories.scheduling import withheld as repository
from service.lifecycle.transitions import remark

GPU_FAULT = "gpu_fault"
FAULTY_CPU = "replicas_differ_on_cpu"
"""Code of a fault of a host's CPUs or memory, because of which the host's CPUs are withheld even if
it has GPUs."""


def withhold(
    session: Session,
    hostname: str,
    reason: str,
    *,
    code: str,
    now: datetime,
    gpu: str = "",
    mark: str = "",
    jobs: Collection[tuple[str, int]] = (),
    is_sick: bool = True,
) -> bool:
    """Give a node's GPUs (or its CPUs, if it has no GPU) no new work until an admin releases them,
    and add an event to these jobs. Running jobs continue.

    gpu: UUID of the GPU with the fault, if known. code: the kind of fault; a node has at most one
    fault of a GPU with the same code. mark: identifies the occurrence; a fault that was released is
    withheld again only if its mark differs. jobs: (job id, attempt) of the attempts that ran there.
    is_sick: if false, only add the events. Return whether the occurrence is new.
    """
    repository.lock_changes(session)
    key, text = (hostname[:255], gpu[:128], code[:64]), clean(reason)
    row = repository.get(session, *key)
    if row is not None and row.mark == mark[:255]:
        return False
    if row is None:
        names = {"hostname": key[0], "gpu": key[1], "code": key[2]}
        row = WithheldRow(**names, mark=mark[:255], reason=text, since=now, is_active=is_sick)
        repository.add(session, row)
    else:
        row.since = row.since if row.is_active else now
        row.mark, row.reason, row.is_active = mark[:255], text, is_sick
    end = "; its node gets no new work until an admin releases it" if is_sick else ""
    for job_id, attempt in jobs:
        job = jobs_repository.lock(session, job_id)
        if job is None:
            continue  # deleted in the meantime
        message = f"{text}, on {hostname}{end}"
        data = {"hostname": hostname, "gpu": gpu, "attempt": attempt, "is_sick": is_sick}
        remark(session, job, type_=GPU_FAULT, code=code, message=message, now=now, data=data)
    return True
