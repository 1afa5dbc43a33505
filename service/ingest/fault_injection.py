"""Stores the progress of drills, which is derived from supervisors' reports and from the ends of
attempts.

A drill after which the group recovers in place ends when the supervisor reports the recovery. A
drill that ends its attempt (a preemption, or a loss without recovery in place) ends when the next
attempt trains.
"""

from __future__ import annotations

from datetime import datetime

from sqlalchemy.orm import Session

from dray.views import DrillKind, DrillState, JobState
from ray_workers.shared.contracts import Cause, Outcome
from ray_workers.shared.frame_fields import clean
from ray_workers.shared.supervisor_frames import DrillReport
from service.checkpoints.catalog import began_at_step
from service.db.models import AttemptRow, DrillRow, JobRow
from service.db.repositories import attempts as attempts_repository
from service.db.repositories import faults as repository
from service.domain.attempts import drills
from service.ingest.decoding import BadFrame
from service.lifecycle.transitions import remark

MAX_MESSAGE_CHARS = 1024


def take(session: Session, job: JobRow, report: DrillReport, at: datetime, now: datetime) -> None:
    """Store a supervisor's report of a drill at `at`. Raises BadFrame if no such drill exists."""
    row = repository.drill(session, job.id, report.id)
    if row is None:
        raise BadFrame("there is no such drill")
    state, message = report.state, report.message
    if not drills.is_news(DrillState(row.state), state):
        return
    recovered = state is DrillState.PASSED and report.recovery_s is not None  # a prepared script
    if row.resumes and not recovered:
        if row.state == DrillState.STRUCK:
            return  # the next attempt shows the result
        state = DrillState.STRUCK if state is DrillState.PASSED else state
    row.step = row.step if report.step is None else report.step
    if row.struck_at is None and state is not DrillState.FAILED:
        row.struck_at = at
    if state.is_over:
        row.recovery_s, row.steps_lost = report.recovery_s, report.steps_lost
    if state is DrillState.PASSED:
        message = drills.outcome_sentence(report.recovery_s, report.steps_lost)
    _advance(session, job, row, state, message, at, now)


def attempt_ended(
    session: Session,
    job: JobRow,
    attempt: AttemptRow,
    outcome: Outcome,
    ended_at: datetime,
    now: datetime,
) -> bool:
    """Update the drills of an attempt that ended. Return whether a drill caused the end; if it did,
    no retry budget is charged."""
    by_drill = False
    for row in repository.open_drills(session, job.id):
        if row.attempt != attempt.attempt:
            continue
        if row.state == DrillState.WAITING and _left_by(row, job, attempt, outcome):
            row.struck_at, row.step = ended_at, attempt.last_metric_step
            _advance(session, job, row, DrillState.STRUCK, "it left its slots", ended_at, now)
        by_drill = by_drill or row.state == DrillState.STRUCK
        if row.resumes and row.state == DrillState.STRUCK:
            continue
        how = (
            "the group did not recover in place"
            if row.state == DrillState.STRUCK
            else "the fault was never injected"
        )
        message = f"{how}, and the attempt ended: {clean(outcome.message)}"[:MAX_MESSAGE_CHARS]
        _advance(session, job, row, DrillState.FAILED, message, ended_at, now)
    return by_drill


def _left_by(row: DrillRow, job: JobRow, attempt: AttemptRow, outcome: Outcome) -> bool:
    """Whether this drill's preemption ended the attempt before any report mentioned the
    preemption."""
    return (
        row.kind == DrillKind.PREEMPT
        and outcome.cause in (Cause.PREEMPTED, Cause.STOPPED)
        and attempt.preempt_asked_at is None
        and job.state != JobState.CANCELLING
    )


def resumed(
    session: Session, job: JobRow, attempt: AttemptRow, at: datetime, now: datetime
) -> None:
    """Mark the open drills of earlier attempts as passed, because this attempt took a step at
    `at`."""
    for row in repository.open_drills(session, job.id):
        if row.attempt >= attempt.attempt:
            continue
        struck = attempts_repository.get(session, job.id, row.attempt)
        reached = row.step if struck is None else struck.last_metric_step
        began = began_at_step(attempt)
        if row.struck_at is not None:
            row.recovery_s = max(0.0, (at - row.struck_at).total_seconds())
        if reached is not None and began is not None:
            row.steps_lost = max(0, reached - began)
        message = drills.outcome_sentence(row.recovery_s, row.steps_lost)
        _advance(session, job, row, DrillState.PASSED, message, at, now)


def _advance(
    session: Session,
    job: JobRow,
    row: DrillRow,
    state: DrillState,
    message: str,
    at: datetime,
    now: datetime,
) -> None:
    row.state = state.value
    row.message = message or f"it has {state}"
    if state.is_over:
        row.finished_at = at
    shown = {
        "step": row.step,
        "recovery_s": row.recovery_s,
        "steps_lost": row.steps_lost,
    }
    remark(
        session,
        job,
        type_="drill",
        code=f"drill_{state}",
        message=f"drill of {row.kind}: {row.message}",
        now=now,
        data={"id": row.id, "kind": row.kind, "rank": row.rank}
        | {name: value for name, value in shown.items() if value is not None},
    )
