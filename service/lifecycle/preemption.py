"""Asks attempts to save their state and release their slots, because a user requested it, a node is
being drained or is reserved, the job's deadline has passed, or the service is stopping its cluster.

The request is stored in the attempt's row, and the reconciler sends it as a command. When the
attempt ends, its job returns to the queue, and no retry is charged.
"""

from __future__ import annotations

import math
from datetime import datetime

from sqlalchemy.orm import Session

from dray.views import JobState
from service.cluster.port import ClusterSnapshot
from service.db.models import AttemptRow, JobRow
from service.db.notifications import ATTEMPTS, QUEUE
from service.db.repositories import attempts as attempts_repository
from service.db.repositories import jobs as repository
from service.db.session import notify, touch
from service.domain.events import ACTOR
from service.domain.scheduling.rules.obstacles import Reason
from service.domain.states import BEING_STOPPED, RESERVATION_BEGINS, Trigger
from service.lifecycle.transitions import move, remark

HOLDING = (JobState.STARTING, JobState.RUNNING, JobState.RECOVERING)
LOSES_WORK = "its processes get SIGTERM, and work that they do not save is lost"
RESERVE_S = 2.0
"""Seconds of a drained node's remaining time that are reserved for sending the command and freeing
the slots."""


AT_DEADLINE_S = 60.0
"""A grace period that ends after the job's deadline is shortened to the deadline, or to this many
seconds."""


def ask(
    session: Session,
    job: JobRow,
    attempt: AttemptRow,
    grace_s: float,
    now: datetime,
    *,
    code: str = "preempt_asked",
    because: str = "",
    actor: str | None = None,
) -> bool:
    """Ask an attempt to release its slots. The job must be locked. Return False if the attempt was
    already asked, in which case the first grace period remains valid."""
    if attempt.preempt_asked_at is not None:
        return False
    if job.deadline is not None:
        left_s = (job.deadline - now).total_seconds()
        grace_s = min(grace_s, max(left_s, AT_DEADLINE_S))
    attempt.preempt_asked_at, attempt.preempt_grace_s = now, grace_s
    within = f"{round(grace_s, 1):g} s{because}"
    message = f"was asked to save a checkpoint and release its slots within {within}"
    if not job.yields:
        message = f"was asked to release its slots within {within}; {LOSES_WORK}"
    remark(
        session,
        job,
        type_="preempting",
        code=code,
        message=message,
        now=now,
        data={"grace_s": grace_s} | ({} if actor is None else {ACTOR: actor}),
    )
    notify(session, QUEUE, ATTEMPTS)
    return True


def hold(session: Session, job: JobRow, attempt: AttemptRow, actor: str, now: datetime) -> bool:
    """Hold the job once the attempt, which was asked to release its slots, has returned it to the
    queue. The job must be locked. Returns False if this was already requested."""
    if attempt.hold_asked_by is not None:
        return False
    attempt.hold_asked_by = actor
    remark(
        session,
        job,
        type_="preempting",
        code="hold_asked",
        message=f"will be held by {actor} once it waits again",
        now=now,
        data={ACTOR: actor},
    )
    return True


def to_be_held(session: Session, job: JobRow) -> AttemptRow | None:
    """Return the running attempt of the job if the job will be held after it."""
    if job.state not in HOLDING:
        return None
    attempt = attempts_repository.get(session, job.id, job.attempt)
    return attempt if attempt is not None and attempt.hold_asked_by is not None else None


def leave_nodes(session: Session, snapshot: ClusterSnapshot, grace_s: float, now: datetime) -> int:
    """Ask the attempts on drained nodes to release their slots; return the number of attempts that
    were asked."""
    touch(session)
    drained = {node.node_id: node for node in snapshot.nodes if node.drained_by is not None}
    asked = 0
    for attempt in attempts_repository.live(session):
        on = next((p["node_id"] for p in attempt.slices if p["node_id"] in drained), None)
        if on is None or attempt.cluster_session != snapshot.session:
            continue
        node = drained[on]
        left_s = max(0.0, (node.drained_by or math.inf) - now.timestamp() - RESERVE_S)
        because = f": its node {node.hostname} is being drained"
        asked += _ask_live(session, attempt, min(grace_s, left_s), now, "node_drained", because)
    return asked


def leave_all(session: Session, grace_s: float, now: datetime) -> int:
    """Ask every attempt that holds slots to leave; return the number of attempts that were
    asked."""
    touch(session)
    because = ": the service is stopping, together with its Ray cluster"
    return sum(
        _ask_live(session, attempt, grace_s, now, "service_stops", because)
        for attempt in attempts_repository.live(session)
    )


def preempt_for(
    session: Session,
    job_id: str,
    attempt: int,
    because: str,
    grace_s: float,
    now: datetime,
    *,
    code: str = "makes_room",
) -> bool:
    """Ask an attempt to release its slots, by default for another job; return False if it no
    longer holds slots or was already asked."""
    touch(session)
    seen = attempts_repository.get(session, job_id, attempt)
    if seen is None:
        return False
    return _ask_live(session, seen, grace_s, now, code, f": it {because}")


def cancel_for(session: Session, job_id: str, attempt: int, reason: Reason, now: datetime) -> bool:
    """Stop a job that has slots, because a reservation cancels it; return False if its attempt has
    ended or is already being stopped."""
    touch(session)
    job = repository.lock(session, job_id)
    if job is None or job.attempt != attempt or job.state not in HOLDING:
        return False
    message = f"{reason.message}{BEING_STOPPED}"
    return move(session, job, Trigger.CANCEL, code=RESERVATION_BEGINS, message=message, now=now)


def _ask_live(
    session: Session, seen: AttemptRow, grace_s: float, now: datetime, code: str, because: str
) -> bool:
    """Ask the attempt to leave, unless its job has changed since the attempt was read."""
    job = repository.lock(session, seen.job_id)
    if job is None or job.attempt != seen.attempt or job.state not in HOLDING:
        return False
    session.refresh(seen)
    if seen.finished_at is not None:
        return False
    return ask(session, job, seen, grace_s, now, code=code, because=because)
