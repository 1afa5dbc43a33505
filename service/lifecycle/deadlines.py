"""Enforces the deadlines of jobs: cancels waiting jobs that can't end in time, and asks running
jobs to save their state and leave."""

from __future__ import annotations

from collections.abc import Collection
from datetime import datetime

from sqlalchemy.orm import Session

from dray.spec import JobSpec
from dray.views import JobState
from service.db.models import JobRow
from service.db.repositories import jobs as repository
from service.domain.errors import Unsatisfiable
from service.domain.scheduling.rules.times import latest_start, shown
from service.domain.states import DEADLINE_PASSED, Trigger
from service.lifecycle import preemption
from service.lifecycle.transitions import Ends, move


def refuse_missed(spec: JobSpec, now: datetime, *, has_started: bool = False) -> None:
    """Raise Unsatisfiable if a job can't end before its deadline. A job that has started before
    might need less than its limit."""
    if spec.deadline is None:
        return
    hint = "give a later deadline, or leave the field out"
    if spec.deadline <= now:
        message = f"this job could never start: its deadline, {shown(spec.deadline)}, has passed"
        raise Unsatisfiable(message, pointer="/deadline", hint=hint)
    limit_s = None if has_started else spec.max_runtime_s
    begins_at = now if spec.begin_at is None else max(now, spec.begin_at)
    if limit_s is not None and (spec.deadline - begins_at).total_seconds() < limit_s:
        raise Unsatisfiable(
            f"this job could never start: its deadline is {shown(spec.deadline)}, but with "
            f"max_runtime_s: {limit_s} the job might run past its deadline",
            pointer="/deadline",
            hint=f"{hint}; or lower max_runtime_s",
        )


def cancel_waiting(session: Session, job_ids: Collection[str], now: datetime) -> int:
    """Cancel each of these jobs that waits and can no longer end before its deadline; return the
    number of cancelled jobs."""
    ends, number = Ends(), 0
    for job in repository.lock_all(session, job_ids).values():
        start_by = latest_start(job)
        if job.state is not JobState.QUEUED or start_by is None or start_by > now:
            continue
        message = _why_cancelled(job, now)
        code = DEADLINE_PASSED
        number += move(session, job, Trigger.EXPIRE, code=code, message=message, now=now, ends=ends)
    ends.settle(session, now)
    return number


def _why_cancelled(job: JobRow, now: datetime) -> str:
    assert job.deadline is not None
    if job.deadline > now:
        return (
            f"could no longer end before its deadline, {shown(job.deadline)}, "
            f"because its max_runtime_s is {job.max_runtime_s}"
        )
    before = "continued" if job.attempt else "started"
    return f"did not end in time: its deadline, {shown(job.deadline)}, passed before it {before}"


def stop_running(
    session: Session, job_id: str, attempt: int, grace_s: float, now: datetime
) -> bool:
    """Ask an attempt whose job's deadline has passed to save its state and leave; return False if
    it was already asked. When the attempt ends, its job is cancelled."""
    because = "has reached its deadline"
    return preemption.preempt_for(
        session, job_id, attempt, because, grace_s, now, code=DEADLINE_PASSED
    )
