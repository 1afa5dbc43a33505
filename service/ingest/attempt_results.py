"""Stores the replies of supervisors. Each reply is stored atomically; one transaction can store the
replies of several attempts.

A reply must pass two checks. The attempt must be the job's live attempt, so replies from the
supervisor of an abandoned attempt are ignored. The reply's cursor must be beyond the stored cursor,
so a reply that arrives twice is stored once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from sqlalchemy.orm import Session

from dray.views import JobState
from ray_workers.shared.contracts import (
    SCRIPT_DIFFERS,
    Cause,
    Frame,
    FrameKind,
    Outcome,
    Phase,
    PollReply,
)
from ray_workers.shared.frame_fields import clean
from service.costs import spending, usage
from service.db.models import AttemptRow, JobRow
from service.db.repositories import attempts as attempts_repository
from service.db.repositories import events as events_repository
from service.db.repositories import faults as faults_repository
from service.db.repositories import jobs as repository
from service.db.repositories.bulk import change
from service.db.session import measure, notify, touch
from service.domain import meter
from service.domain.attempts.retries import (
    MAX_ROLLBACKS,
    ROLLBACK_FACTOR,
    Budgets,
    GiveUp,
    Retry,
    decide,
    is_same_error,
)
from service.domain.costs.prices import Prices
from service.domain.scheduling.rules.limits import held_message
from service.domain.scheduling.rules.times import shown
from service.domain.series import Points
from service.domain.states import CANCELLED_BY_USER, STOP_CODES, Trigger, once_stopped
from service.ingest import fault_injection, goodput, resume_reports, silent_processes, trials
from service.ingest.attempt_ends import (
    charge,
    confirmed,
    details,
    log_lines_lost,
    ran_s,
    retry_sentence,
)
from service.ingest.decoding import within
from service.ingest.rank_frames import RankFrames
from service.ingest.supervisor_frames import SupervisorFrames, generation, is_from_supervisor
from service.lifecycle import node_checks, resizing
from service.lifecycle.transitions import Ends, move, remark, runtime_left_s
from service.storage.staged_files import Files
from service.telemetry import system_metrics
from service.telemetry.known_attempts import KnownAttempt, KnownAttempts
from service.telemetry.log_writer import LogStore
from service.telemetry.metric_writer import MetricStore

LEFT_OUT = "reports_left_out"
"""Type of the event."""


@dataclass(frozen=True)
class Recorded:
    """The effect of a reply."""

    changed: bool
    """Whether anything was stored."""
    live: bool
    """Whether the attempt is still the job's live attempt, and must be polled again."""
    cursor: Mapping[str, int] = field(default_factory=dict)
    """The reports up to this cursor are stored; the next poll continues after this cursor."""


@dataclass(frozen=True)
class Received:
    """A reply of an attempt's supervisor."""

    job_id: str
    attempt: int
    reply: PollReply
    asked: Mapping[str, int] | None = None
    """The cursor of the poll, set if two processes can poll the same attempt at the same time. If
    this cursor is older than the stored cursor, the reply is ignored."""
    in_storage: Sequence[Frame] = ()
    """Reports of the attempt's checkpoints from `service.checkpoints.catalog`, if the reply has an
    outcome. Checkpoints that no rank reported are stored together with the outcome."""
    left_out: str | None = None
    """A message about the reports that were removed because they could not be stored."""


def record(
    session: Session,
    storage: Files,
    received: Sequence[Received],
    now: datetime,
    *,
    prices: Prices | None = None,
    known: KnownAttempts | None = None,
) -> list[Recorded]:
    """Store replies of different jobs. Each reply's frames, phase, cursor and outcome are stored
    atomically.

    `prices` is None if no prices are set. `known` caches facts about the attempts.
    """
    job_ids = [one.job_id for one in received]
    assert len(set(job_ids)) == len(job_ids), "two replies of one job must not share a transaction"
    touch(session, *job_ids)
    jobs = repository.lock_all(session, job_ids)
    attempts = attempts_repository.live_of(session, job_ids)
    drilled = faults_repository.with_open_drills(session, job_ids)
    ending = [one.job_id for one in received if one.reply.outcome is not None]
    lacking = events_repository.with_event(session, ending, LEFT_OUT)
    known = known or KnownAttempts()
    ends = Ends()
    recorded = []
    for one in received:
        job, row = jobs.get(one.job_id), attempts.get(one.job_id)
        if job is None or row is None or not one.attempt == row.attempt == job.attempt:
            recorded.append(Recorded(changed=False, live=False))
        elif _is_stale(row.cursor, one.reply, one.asked):
            recorded.append(Recorded(changed=False, live=True, cursor=row.cursor))
        else:
            facts = known.take(session, job.id, row.attempt, row.cursor)
            recorder = _Recorder(
                *(session, storage, job, row, now, prices, ends, facts),
                is_drilled=one.job_id in drilled,
                lacks_reports=(one.job_id, one.attempt) in lacking,
            )
            effect = recorder.take(one)
            if effect.live:
                known.keep(job.id, row.attempt, row.cursor, facts)
            recorded.append(effect)
    ends.settle(session, now)
    return recorded


@dataclass(frozen=True)
class _Recorder:
    """Stores one reply of an attempt. The attempt's job must be locked."""

    session: Session
    storage: Files
    job: JobRow
    row: AttemptRow
    now: datetime
    prices: Prices | None
    ends: Ends
    known: KnownAttempt
    """Cached facts about the attempt, which are kept up to date."""
    is_drilled: bool
    """Whether the job has drills that have not ended."""
    lacks_reports: bool
    """Whether reports were omitted from an earlier reply of the attempt."""

    def take(self, received: Received) -> Recorded:
        session, job, row, now, reply = self.session, self.job, self.row, self.now, received.reply
        before = (row.cursor, row.phase)
        of_supervisor: list[Frame] = []
        stored: Mapping[tuple[str, int], Points] = {}
        if dict(reply.cursor) != row.cursor:
            of_supervisor = [frame for frame in reply.frames if is_from_supervisor(frame)]
            row.generation = max(row.generation, generation(of_supervisor))
            reported = [frame for frame in reply.frames if not is_from_supervisor(frame)]
            stored = RankFrames(session, self.storage, job, row, now, self.known).take(reported)
            row.cursor = dict(reply.cursor)
        if received.left_out is not None:
            remark(session, job, type_=LEFT_OUT, code=LEFT_OUT, message=received.left_out, now=now)
        self._follow_phase(reply)
        SupervisorFrames(session, job, row, now, self.known, self.prices).take(of_supervisor)
        lacks_reports = self.lacks_reports or received.left_out is not None
        outcome = reply.outcome and confirmed(reply.outcome, lacks_reports=lacks_reports)
        has_succeeded = outcome is not None and outcome.cause is Cause.SUCCEEDED
        trials.follow(session, job, stored, now, may_stop=not has_succeeded)
        if outcome is not None:
            lost = log_lines_lost(session, row, outcome)
            LogStore(session, self.storage, job, row, now, self.known).close(lost)
            MetricStore(session, job, row, now, self.known).close()
            system_metrics.close(session, job.id, self.known)
            self._take_unreported(received.in_storage)
            self._end(outcome, self._at(reply.phase_times.get(Phase.ENDED)))
            return Recorded(changed=True, live=False)
        fell_silent = silent_processes.note(session, job, row, reply.silent, now)
        changed = fell_silent or before != (row.cursor, row.phase)
        if changed:
            notify(session, job.id)
        return Recorded(changed=changed, live=True, cursor=row.cursor)

    def _follow_phase(self, reply: PollReply) -> None:
        """Update the attempt's phase. If the attempt of a starting job has begun to train, also
        change the job's state. In-place recoveries are instead reported by frames."""
        job, row, now = self.job, self.row, self.now
        row.phase = reply.phase or row.phase
        if row.started_at is None and Phase.STARTING in reply.phase_times:
            row.started_at = self._at(reply.phase_times[Phase.STARTING])
        stepped = any(frame.kind == FrameKind.METRICS for frame in reply.frames)
        runs = stepped or Phase.RUNNING in reply.phase_times or reply.phase == Phase.RUNNING
        if job.state == JobState.STARTING and runs:
            job.free_requeues = 0
            row.running_at = now
            message = f"trains on {_workers(job.world_size)}"
            move(self.session, job, Trigger.STEP, code="running", message=message, now=now)
            self._measure_start()
            if row.attempt > 1 and self.is_drilled:
                stepped_at = row.first_metric_at or self._at(reply.phase_times.get(Phase.RUNNING))
                fault_injection.resumed(self.session, job, row, stepped_at, now)

    def _measure_start(self) -> None:
        session, job, row, now = self.session, self.job, self.row, self.now
        measure(session, meter.JOB_START, _seconds(row.created_at, now))
        if row.attempt == 1:
            return
        last = attempts_repository.get(session, job.id, row.attempt - 1)
        if last is None or last.finished_at is None:
            return
        if last.reason_code not in (Cause.PREEMPTED, Cause.STOPPED):
            measure(session, meter.RECOVERY, _seconds(last.finished_at, now), "restart")

    def _at(self, seconds: float | None) -> datetime:
        """Return a worker's time, or the current time if a wrong clock puts the worker's time
        outside of the attempt's life."""
        if seconds is None:
            return self.now
        return within(seconds, self.row.started_at or self.row.created_at, self.now)

    def _end(self, outcome: Outcome, ended_at: datetime) -> None:
        """Close the attempt, and end the job or put it back into the queue."""
        session, job, row, now = self.session, self.job, self.row, self.now
        message = clean(outcome.message) or str(outcome.cause)
        change(
            row,
            phase=Phase.ENDED,
            finished_at=ended_at,
            reason_code=str(outcome.cause),
            reason_message=message,
            failed_rank=outcome.rank,
            exit_code=outcome.exit_code,
        )
        resume_reports.close(session, job, row, now)
        resizing.close(row)
        goodput.close(session, job, row, outcome.cause, ended_at)
        spending.charge(session, job, row, self.prices, ended_at)
        usage.attempt_ended(session, job, row)
        job.runtime_used_s += ran_s(row, outcome, ended_at)
        by_drill = self.is_drilled and fault_injection.attempt_ended(
            session, job, row, outcome, ended_at, now
        )
        if not self.is_drilled:
            node_checks.attempt_ended(session, job, row, outcome, now)
        if outcome.cause is Cause.SUCCEEDED:
            self._move(Trigger.SUCCEED, "succeeded", message, outcome)
        elif job.state == JobState.CANCELLING:
            self._cancelled(outcome)
        else:
            self._retry_or_fail(outcome, message, by_drill=by_drill)

    def _move(self, trigger: Trigger, code: str, message: str, outcome: Outcome) -> None:
        """End the job. If results could not be kept, the message contains a sentence about them."""
        left = clean(outcome.left_behind)
        move(
            self.session,
            self.job,
            trigger,
            code=code,
            message=f"{message}. {left}" if left else message,
            now=self.now,
            data=details(self.job, outcome),
            ends=self.ends,
        )

    def _cancelled(self, outcome: Outcome) -> None:
        """End a job that is being cancelled. The reason for the end of its attempt does not
        change."""
        job = self.job
        message = once_stopped(job.reason_message)
        if outcome.cause is not Cause.STOPPED:
            message += f"; meanwhile: {clean(outcome.message)}"
        code = job.reason_code if job.reason_code in STOP_CODES else CANCELLED_BY_USER
        self._move(Trigger.STOPPED, code, message, outcome)

    def _retry_or_fail(self, outcome: Outcome, message: str, *, by_drill: bool) -> None:
        session, job, now = self.session, self.job, self.now
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
                fails_alike=cause is Cause.USER_ERROR and self._fails_alike(message),
                script_differs_again=SCRIPT_DIFFERS in message and self._differed_before(),
            ),
            by_drill=by_drill,
            by_overload=outcome.slowness > 1.0,
        )
        if isinstance(decision, Retry) and job.deadline is not None and job.deadline <= now:
            stopped = f"was stopped at its deadline, {shown(job.deadline)}"
            stopped += "" if cause is Cause.PREEMPTED else f"; its last attempt: {message}"
            self._move(Trigger.EXPIRE, "deadline_passed", stopped, outcome)
            return
        charge(job, cause, decision.budget)
        if isinstance(decision, GiveUp):
            self._move(Trigger.FAIL, decision.code, f"{message} ({decision.because})", outcome)
            return
        if cause is Cause.DIVERGED:
            sentence = (
                "returns to its last checkpoint with the learning rate multiplied by "
                f"{ROLLBACK_FACTOR**ended:g}"
            )
            sentence = f"rollback {ended} of {MAX_ROLLBACKS}: {sentence}"
        else:
            sentence = retry_sentence(cause, decision)
        held_by = self.row.hold_asked_by
        held = "" if held_by is None else f"; {held_message(held_by, job.id)}"
        move(
            session,
            job,
            Trigger.RETRY,
            code=cause,
            message=f"{message} ({sentence}){held}",
            now=now,
            values={
                "held_by": held_by,
                "not_before": now + timedelta(seconds=decision.delay_s),
                "world_size": job.num_workers - job.num_spares,
            },
            data=details(job, outcome)
            | {"delay_s": decision.delay_s, "charged_to": str(decision.budget)},
        )

    def _fails_alike(self, message: str) -> bool:
        """Whether the previous attempt ended with the same error in the user's code."""
        before = attempts_repository.get(self.session, self.job.id, self.row.attempt - 1)
        if before is None or before.reason_code != Cause.USER_ERROR:
            return False
        return is_same_error(message, before.reason_message or "")

    def _differed_before(self) -> bool:
        """Whether the previous attempt ended because its script's ranks were not equal."""
        before = attempts_repository.get(self.session, self.job.id, self.row.attempt - 1)
        return before is not None and SCRIPT_DIFFERS in (before.reason_message or "")

    def _take_unreported(self, in_storage: Sequence[Frame]) -> None:
        """Store the checkpoints that no rank reported, with an event that names them."""
        session, job, row, now = self.session, self.job, self.row, self.now

        def stored() -> set[int]:
            rows = attempts_repository.checkpoints(session, job.id)
            return {each.step for each in rows if each.attempt == row.attempt}

        if not in_storage:
            return
        before = stored()
        missing = [frame for frame in in_storage if frame.body["step"] not in before]
        RankFrames(session, self.storage, job, row, now, self.known).take(missing)
        steps = sorted(stored() - before)
        if not steps:
            return
        shown = ", ".join(map(str, steps))
        remark(
            session,
            job,
            type_="checkpoints_found",
            code="checkpoints_found",
            message=f"the storage contains checkpoints that no rank reported: steps {shown}",
            now=now,
            data={"steps": steps},
        )


def _is_stale(stored: Mapping[str, int], reply: PollReply, asked: Mapping[str, int] | None) -> bool:
    if asked is not None and dict(asked) != dict(stored):
        return True
    return any(reply.cursor.get(spool, at) < at for spool, at in stored.items())


def _seconds(since: datetime, until: datetime) -> float:
    return max(0.0, (until - since).total_seconds())


def _workers(count: int) -> str:
    return "1 worker" if count == 1 else f"{count} workers"
