"""Storing what became of an attempt: one reply of its supervisor, one transaction.

A reply is fenced twice. Its attempt must be the job's live one, so that a supervisor that was
given up can't speak any more; and its cursor must lie beyond the stored one, so that a reply that
comes twice is stored once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

from sqlalchemy.orm import Session

from dray.views import JobState
from ray_workers.shared.contracts import Cause, Frame, FrameKind, Outcome, Phase, PollReply
from service.db.models import AttemptRow, JobRow
from service.db.repositories import attempts as attempts_repository
from service.db.repositories import jobs as repository
from service.db.session import notify, touch
from service.domain.retries import (
    MAX_ROLLBACKS,
    ROLLBACK_FACTOR,
    Budget,
    Budgets,
    GiveUp,
    Retry,
    decide,
)
from service.domain.states import Trigger
from service.domain.text import clean
from service.ingest import fault_injection, goodput, resume_reports, silent_processes
from service.ingest.rank_frames import RankFrames
from service.ingest.supervisor_frames import SupervisorFrames, generation, is_from_supervisor
from service.lifecycle import resizing
from service.lifecycle.transitions import move, runtime_left_s
from service.storage.storage import Storage
from service.telemetry.log_writer import LogStore


@dataclass(frozen=True)
class Recorded:
    """What a reply did."""

    changed: bool
    """Something was stored."""
    live: bool
    """The attempt is still the job's live one: poll on. False also if it was so before."""
    cursor: Mapping[str, int] = field(default_factory=dict)
    """What is stored by now: poll on from there."""


def record(
    session: Session,
    storage: Storage,
    job_id: str,
    attempt: int,
    reply: PollReply,
    now: datetime,
    *,
    asked: Mapping[str, int] | None = None,
) -> Recorded:
    """Store a reply: its frames, phase, cursor and outcome, once, or nothing.

    `asked` is the cursor that the poll was made with. Give it where two processes may poll the
    same attempt at once: a reply from an older cursor than the stored one is then ignored whole.
    """
    touch(session, job_id)
    rows = _live(session, job_id, attempt)
    if rows is None:
        return Recorded(changed=False, live=False)
    job, row = rows
    if _is_stale(row.cursor, reply, asked):
        return Recorded(changed=False, live=True, cursor=row.cursor)
    before = (row.cursor, row.phase)
    told: list[Frame] = []
    if dict(reply.cursor) != row.cursor:
        told = [frame for frame in reply.frames if is_from_supervisor(frame)]
        row.generation = max(row.generation, generation(told))
        reported = [frame for frame in reply.frames if not is_from_supervisor(frame)]
        RankFrames(session, storage, job, row, now).take(reported)
        row.cursor = dict(reply.cursor)
    _follow_phase(session, job, row, reply, now)
    SupervisorFrames(session, job, row, now).take(told)
    if reply.outcome is not None:
        LogStore(session, storage, job, row, now).note_lost(reply.outcome.log_lines_lost)
        ended_at = _at(reply.phase_times.get(Phase.ENDED), now)
        _end(session, job, row, reply.outcome, ended_at, now)
        return Recorded(changed=True, live=False)
    fell_silent = silent_processes.note(session, job, row, reply.silent, now)
    changed = fell_silent or before != (row.cursor, row.phase)
    if changed:
        notify(session, job_id)
    return Recorded(changed=changed, live=True, cursor=row.cursor)


def end_attempt(
    session: Session, job_id: str, attempt: int, outcome: Outcome, now: datetime
) -> Recorded:
    """Close an attempt that can't speak for itself: its supervisor is dead or was never born."""
    rows = _live(session, job_id, attempt)
    if rows is None:
        return Recorded(changed=False, live=False)
    _end(session, *rows, outcome, now, now)
    return Recorded(changed=True, live=False)


def _live(session: Session, job_id: str, attempt: int) -> tuple[JobRow, AttemptRow] | None:
    job = repository.lock(session, job_id)
    row = attempts_repository.get(session, job_id, attempt)
    if job is None or row is None or job.attempt != attempt or row.finished_at is not None:
        return None
    return job, row


def _is_stale(stored: Mapping[str, int], reply: PollReply, asked: Mapping[str, int] | None) -> bool:
    if asked is not None and dict(asked) != dict(stored):
        return True
    return any(reply.cursor.get(spool, at) < at for spool, at in stored.items())


def _follow_phase(
    session: Session, job: JobRow, row: AttemptRow, reply: PollReply, now: datetime
) -> None:
    """Move a job that starts as its attempt says; a repair in place is told of by frames."""
    row.phase = reply.phase or row.phase
    if row.started_at is None and Phase.STARTING in reply.phase_times:
        row.started_at = _at(reply.phase_times[Phase.STARTING], now)
    stepped = any(frame.kind == FrameKind.METRICS for frame in reply.frames)
    runs = stepped or Phase.RUNNING in reply.phase_times or reply.phase == Phase.RUNNING
    if job.state == JobState.STARTING and runs:
        job.free_requeues = 0
        message = f"trains on {_workers(job.world_size)}"
        move(session, job, Trigger.STEP, code="running", message=message, now=now)
        if row.attempt > 1:
            stepped_at = row.first_metric_at or _at(reply.phase_times.get(Phase.RUNNING), now)
            fault_injection.resumed(session, job, row, stepped_at, now)


def _end(
    session: Session,
    job: JobRow,
    row: AttemptRow,
    outcome: Outcome,
    ended_at: datetime,
    now: datetime,
) -> None:
    """Close the attempt and move the job: to its end, or back to the queue."""
    message = clean(outcome.message) or str(outcome.cause)
    row.phase = Phase.ENDED
    row.finished_at = ended_at
    row.reason_code, row.reason_message = str(outcome.cause), message
    row.failed_rank, row.exit_code = outcome.rank, outcome.exit_code
    resume_reports.close(session, job, row, now)
    resizing.close(row)
    if row.started_at is not None:
        job.runtime_used_s += max(0.0, (ended_at - row.started_at).total_seconds())
    goodput.close(session, job, row, outcome.cause, ended_at)
    by_drill = fault_injection.attempt_ended(session, job, row, outcome, ended_at, now)
    data = _details(job, outcome)
    if outcome.cause is Cause.SUCCEEDED:
        move(session, job, Trigger.SUCCEED, code="succeeded", message=message, now=now, data=data)
    elif job.state == JobState.CANCELLING:
        _cancelled(session, job, outcome, now)
    else:
        _retry_or_fail(session, job, outcome, message, now, by_drill=by_drill)


def _cancelled(session: Session, job: JobRow, outcome: Outcome, now: datetime) -> None:
    """Any end but a success is what the user asked for; the attempt keeps its own reason."""
    message = "cancelled by the user"
    if outcome.cause is not Cause.STOPPED:
        message += f"; meanwhile: {clean(outcome.message)}"
    move(
        session,
        job,
        Trigger.STOPPED,
        code="cancelled_by_user",
        message=message,
        now=now,
        data=_details(job, outcome),
    )


def _retry_or_fail(
    session: Session,
    job: JobRow,
    outcome: Outcome,
    message: str,
    now: datetime,
    *,
    by_drill: bool,
) -> None:
    cause = Cause.PREEMPTED if outcome.cause is Cause.STOPPED else outcome.cause
    ended = attempts_repository.num_diverged(session, job.id) if cause is Cause.DIVERGED else 0
    decision = decide(
        cause,
        Budgets(
            max_user_retries=job.max_user_retries,
            max_infra_retries=job.max_infra_retries,
            user_failures=job.user_failures,
            infra_failures=job.infra_failures,
            free_requeues=job.free_requeues,
            runtime_left_s=runtime_left_s(job),
            rolls_back=job.spec.get("train", {}).get("on_divergence") == "rollback",
            rollbacks=max(0, ended - 1),
        ),
        by_drill=by_drill,
        by_overload=outcome.slowness > 1.0,
    )
    _charge(job, cause, decision.budget)
    data = _details(job, outcome)
    if isinstance(decision, GiveUp):
        move(
            session,
            job,
            Trigger.FAIL,
            code=decision.code,
            message=f"{message} ({decision.because})",
            now=now,
            data=data,
        )
        return
    if cause is Cause.DIVERGED:
        sentence = f"goes back to its last checkpoint with {ROLLBACK_FACTOR**ended:g} of the rate"
        sentence = f"rollback {ended} of {MAX_ROLLBACKS}: {sentence}"
    else:
        sentence = _retry_sentence(cause, decision)
    move(
        session,
        job,
        Trigger.RETRY,
        code=cause,
        message=f"{message} ({sentence})",
        now=now,
        values={
            "not_before": now + timedelta(seconds=decision.delay_s),
            "world_size": job.num_workers,
        },
        data=data | {"delay_s": decision.delay_s, "charged_to": str(decision.budget)},
    )


def _charge(job: JobRow, cause: Cause, budget: Budget) -> None:
    if budget is Budget.USER:
        job.user_failures += 1
    elif budget is Budget.INFRA:
        job.infra_failures += 1
    else:
        job.free_requeues += 1
    if cause is Cause.PREEMPTED:
        job.preemptions += 1


def _retry_sentence(cause: Cause, retry: Retry) -> str:
    whose = "the data source" if cause is Cause.DATA_UNREACHABLE else "the cluster"
    charged = {
        Budget.USER: "counted against max_retries",
        Budget.INFRA: f"counted as a fault of {whose}",
        Budget.FREE: "not counted",
    }[retry.budget]
    return f"tried again in {retry.delay_s:g} s, {charged}"


def _details(job: JobRow, outcome: Outcome) -> dict[str, Any]:
    """Data of the event that tells of an attempt's end."""
    data: dict[str, Any] = {"cause": str(outcome.cause)}
    if job.log_lines_dropped:
        data["log_lines_dropped"] = job.log_lines_dropped
    if outcome.rank is not None:
        data["rank"] = outcome.rank
    if outcome.exit_code is not None:
        data["exit_code"] = outcome.exit_code
    return data


def _at(seconds: float | None, now: datetime) -> datetime:
    """A time that a worker gave, never later than now."""
    if seconds is None:
        return now
    try:
        return min(now, datetime.fromtimestamp(seconds, UTC))
    except (ValueError, OverflowError, OSError):
        return now


def _workers(count: int) -> str:
    return "1 worker" if count == 1 else f"{count} workers"
