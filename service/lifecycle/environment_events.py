"""Events of a job about its environment and its fetched code."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime

from sqlalchemy.orm import Session

from dray.views import JobState
from ray_workers.shared.node_needs import JobNeed, NodeEnvironment
from service.db.repositories import jobs as repository
from service.domain.scheduling.rules.obstacles import PREPARING
from service.domain.states import Trigger
from service.lifecycle.transitions import move, remark

MAX_NAMED = 5
_CAN_T_BE_HAD: Mapping[JobNeed, str] = {
    JobNeed.ENVIRONMENT: "its environment can't be prepared",
    JobNeed.CODE: "its code can't be fetched",
}


def note_preparing(session: Session, job_id: str, message: str, now: datetime) -> None:
    """Add an event stating that the job is waiting until its nodes are prepared."""
    job = repository.lock(session, job_id)
    if job is not None and job.state == JobState.QUEUED:
        remark(session, job, type_="environment", code=PREPARING, message=message, now=now)


def note_ready(
    session: Session, job_id: str, attempt: int, answers: Sequence[NodeEnvironment], now: datetime
) -> None:
    """Add an event that describes the environment of the attempt that was just claimed, and states
    how the attempt's ranks start."""
    job = repository.lock(session, job_id)
    if job is None or job.attempt != attempt:
        return
    packages = sorted({package for answer in answers for package in answer.packages})
    replaced = sorted({name for answer in answers for name in answer.replaced})
    number = f"{len(packages)} package{'' if len(packages) == 1 else 's'}"
    message = f"the environment is ready: {number} in addition to the packages of the nodes"
    if replaced:
        message += (
            f"; it replaces {', '.join(replaced[:MAX_NAMED])}, which the forkserver has already "
            "imported, so each rank starts a fresh interpreter"
        )
    log = next((answer.log for answer in answers if answer.log), "")
    data = {"packages": packages, "replaced": replaced, "log": log}
    code = "environment_ready"
    remark(session, job, type_="environment", code=code, message=message, now=now, data=data)


def sentence_of(failure: NodeEnvironment) -> str:
    """Return a sentence that explains why a node can't be prepared for the job."""
    return f"{_CAN_T_BE_HAD[failure.need]}: {failure.message}"


def fail(
    session: Session, job_id: str, attempt_seen: int, answer: NodeEnvironment, now: datetime
) -> bool:
    """Fail a waiting job for which a node can't be prepared; return False if the job has
    changed."""
    job = repository.lock(session, job_id)
    if job is None or job.state != JobState.QUEUED or job.attempt != attempt_seen:
        return False
    code, message, data = "cannot_run", sentence_of(answer), {"log": answer.log}
    return move(session, job, Trigger.FAIL, code=code, message=message, now=now, data=data)
