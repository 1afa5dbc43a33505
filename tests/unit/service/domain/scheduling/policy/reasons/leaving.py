"""The sentences about jobs that leave slots to other jobs."""

from __future__ import annotations

from service.domain.scheduling.policy import (
    Decision,
    Preempt,
    RunningJob,
    Shrink,
)
from service.domain.scheduling.rules.order import LONGEST_WAIT_S
from service.domain.scheduling.rules.queues import Queue
from tests.unit.service.domain.scheduling.policy.reasons.claims import Claims, says


@says(r"releases its slots for job (\S+), (.*)")
def leaves(claims: Claims, decision: Decision, name: str, why: str) -> None:
    assert isinstance(decision, Preempt)
    assert decision.because_of == name
    coming, running = claims.waiting[name], claims.running[decision.job_id]
    assert claims.decided[name].reason.code == "room_is_made"  # type: ignore[union-attr]
    if why == "which has a higher priority":
        assert coming.priority > running.priority
    elif why == "which is within its queue's quota":
        assert claims.queues[coming.queue].quota
    elif why == "which has less work left":
        assert claims.work(coming) < claims.work(running)
    elif why == "which has waited for more than a day":
        assert coming.waited_s > LONGEST_WAIT_S
    elif why == "which was moved to the front of its queue":
        assert coming.place < 0
    elif why == "which comes first until its duration is known":
        assert coming.left_s is None
    elif why == "because this job's queue has used more than its share":
        assert is_beyond_share(claims, running)
    else:
        assert why == "because this job's user has used more than their share", why
        assert is_user_beyond_share(claims, running)


def is_beyond_share(claims: Claims, running: RunningJob) -> bool:
    used = claims.snapshot.used_s
    active = {job.queue for job in claims.running.values()}
    active |= {job.queue for job in claims.waiting.values() if not (job.held or job.after)}
    active -= set(claims.snapshot.used_up) - {job.queue for job in claims.running.values()}
    of = {q: sum(s for (queue, _), s in used.items() if queue == q) for q in active}
    weights = {q: claims.queues.get(q, Queue(q)).weight for q in active}
    return of[running.queue] > sum(of.values()) * weights[running.queue] / sum(weights.values())


def is_user_beyond_share(claims: Claims, running: RunningJob) -> bool:
    used = claims.snapshot.used_s
    users = {job.owner for job in claims.running.values() if job.queue == running.queue}
    users |= {
        job.owner
        for job in claims.waiting.values()
        if job.queue == running.queue and not (job.held or job.after)
    }
    of = {owner: used.get((running.queue, owner), 0.0) for owner in users}
    return of[running.owner] > sum(of.values()) / len(of)


@says(
    r"releases its slots and resumes on (\d+) workers? instead of (\d+), (based on its "
    r"speed|because other jobs come first or gain more from its slots)"
)
def resumes(claims: Claims, decision: Decision, after: str, before: str, why: str) -> None:
    held = sum(n for _, _, n in claims.holding[decision.job_id])
    assert int(before) == held != int(after)
    if why != "based on its speed":
        assert int(after) < held
        assert {*claims.waiting, *claims.snapshot.elastic} - {decision.job_id}


@says(
    r"releases its slots temporarily, because other jobs come first or gain more from these slots"
)
def leaves_for_a_while(claims: Claims, decision: Decision) -> None:
    assert {*claims.waiting, *claims.snapshot.elastic} - {decision.job_id}


@says(r"continues with fewer workers, because other jobs come first or gain more from its slots")
def shrinks(claims: Claims, decision: Decision) -> None:
    assert isinstance(decision, Shrink)
    assert {*claims.waiting, *claims.snapshot.elastic} - {decision.job_id}


@says(r"continues with fewer workers, so that job (\S+) can start")
def shrinks_for(claims: Claims, decision: Decision, name: str) -> None:
    assert isinstance(decision, Shrink)
    assert decision.because_of == name
    assert claims.decided[name].reason.code == "room_is_made"  # type: ignore[union-attr]
