"""Withholds a node with a fault, so that it gets no new work until an admin releases it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy.orm import Session

from ray_workers.shared.frame_fields import clean
from service.db.models import JobRow, ProgramFaultRow, WithheldRow
from service.db.repositories import jobs as jobs_repository
from service.db.repositories.scheduling import withheld as repository
from service.lifecycle.transitions import remark

GPU_FAULT = "gpu_fault"
FAULTY_CPU = "replicas_differ_on_cpu"
"""Code of a fault of a host's CPUs or memory, because of which the host's CPUs are withheld even if
it has GPUs."""
PROGRAM_PERIOD = timedelta(minutes=10)
"""A job gets at most one event in this time about the same error of its program. Further errors are
counted, and reported together in the next event."""


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
    count: int = 1,
) -> bool:
    """Give a node's GPUs (or its CPUs, if it has no GPU) no new work until an admin releases them,
    and add an event to these jobs. Running jobs continue.

    gpu: UUID of the GPU with the fault, if known. code: the kind of fault; a node has at most one
    fault of a GPU with the same code. mark: identifies the occurrence; a fault that was released is
    withheld again only if its mark differs. jobs: (job id, attempt) of the attempts that ran there.
    is_sick: if false, the error was caused by a program, so only add the events, at most one for
    each job and code in `PROGRAM_PERIOD`. count: how many times the fault has happened. Return
    whether the occurrence is new.
    """
    repository.lock_changes(session)
    key, text = (hostname[:255], gpu[:128], code[:64]), clean(reason)
    row = repository.get(session, *key)
    if row is not None and row.mark == mark[:255]:
        return False
    number = count - row.count if row is not None and count > row.count else count
    if row is None:
        names = {"hostname": key[0], "gpu": key[1], "code": key[2]}
        row = WithheldRow(**names, mark=mark[:255], reason=text, since=now, is_active=is_sick)
        row.count = count
        repository.add(session, row)
    else:
        row.since = row.since if row.is_active else now
        row.mark, row.reason, row.is_active, row.count = mark[:255], text, is_sick, count
    end = "; its node gets no new work until an admin releases it" if is_sick else ""
    for job_id, attempt in jobs:
        job = jobs_repository.lock(session, job_id)
        if job is None:
            continue  # deleted in the meantime
        message = f"{text}, on {hostname}{end}"
        data = {"hostname": hostname, "gpu": gpu, "attempt": attempt, "is_sick": is_sick}
        if not is_sick:
            _note_program_fault(session, job, key[2], message, number, now, data)
            continue
        remark(session, job, type_=GPU_FAULT, code=code, message=message, now=now, data=data)
    return True


def _note_program_fault(
    session: Session,
    job: JobRow,
    code: str,
    message: str,
    number: int,
    now: datetime,
    data: Mapping[str, Any],
) -> None:
    """Add an event about errors of the job's program, or count them for the next event."""
    row = repository.program_fault(session, job.id, code)
    if row is None:
        row = ProgramFaultRow(job_id=job.id, code=code, reported_at=now, number=0, message=message)
        repository.add(session, row)
        times = "" if number == 1 else f", {number} times"
        _report(session, job, code, f"{message}{times}", {**data, "count": number}, now)
        return
    row.number, row.message = row.number + number, message
    if now - row.reported_at >= PROGRAM_PERIOD:
        _report_counted(session, job, row, now)


def report_counted(session: Session, now: datetime) -> None:
    """Add the events about errors of programs that were counted for `PROGRAM_PERIOD`."""
    for job_id, code in repository.counted_before(session, now - PROGRAM_PERIOD):
        job = jobs_repository.lock(session, job_id)
        row = None if job is None else repository.program_fault(session, job_id, code)
        if job is None or row is None:
            continue
        if row.number:
            _report_counted(session, job, row, now)
        else:
            session.delete(row)


def _report_counted(session: Session, job: JobRow, row: ProgramFaultRow, now: datetime) -> None:
    number, since = row.number, f"{row.reported_at:%Y-%m-%d %H:%M:%S} UTC"
    row.number, row.reported_at = 0, now
    times = "once more" if number == 1 else f"{number} more times"
    message = f"{row.message}, {times} since {since}"
    _report(session, job, row.code, message, {"is_sick": False, "count": number}, now)


def _report(
    session: Session, job: JobRow, code: str, message: str, data: Mapping[str, Any], now: datetime
) -> None:
    remark(session, job, type_=GPU_FAULT, code=code, message=message, now=now, data=data)
