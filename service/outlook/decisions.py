"""Rounds of the scheduler, kept for some hours: what the policy saw, and what it decided.

A round is kept if somebody started, grew, was asked for slots or was found impossible. Of the jobs
that waited, those are kept that the decisions depended on. `replay` calls the policy again on what
was kept, and tells whether it decides the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy.orm import Session

from dray import views
from service.db.repositories.scheduling import decisions as repository
from service.db.session import touch
from service.domain.errors import DecisionNotFound
from service.domain.scheduling import policy
from service.domain.scheduling.outlook.situation import Situation
from service.domain.scheduling.placement.slots import count
from service.outlook import codec

KEPT_FOR = timedelta(hours=6)
MAX_BYTES = 32 * 2**20
"""Of all that is kept together."""
FEW_JOBS = 20
"""Waiting jobs that are all kept: to find out which of them count takes longer than the plan did.
"""
MAX_NAMED = 20
"""Jobs of each kind that a summary names."""

CHANGES = (policy.Start, policy.Grow, policy.Shrink, policy.Preempt, policy.Impossible)


@dataclass(frozen=True)
class SeenRound:
    """One round of the scheduler."""

    snapshot: policy.Snapshot
    decisions: tuple[policy.Decision, ...]
    now: datetime

    @property
    def changes(self) -> list[policy.Decision]:
        return _changes(self.decisions)


@dataclass(frozen=True)
class Record:
    """A round as it is kept."""

    made_at: datetime
    summary: dict[str, Any]
    data: bytes
    """All that a replay needs."""


def record(seen: SeenRound) -> Record:
    there = _needed(seen)
    kept = {job.job_id for job in there.snapshot.queue}
    decisions = [
        decision
        for decision in seen.decisions
        if decision.job_id in kept or not isinstance(decision, policy.Wait)
    ]
    data = codec.encode_record(there, decisions, seen.now)
    return Record(seen.now, _summary(seen), data)


def _needed(seen: SeenRound) -> Situation:
    """The situation of the round, without jobs that changed nothing."""
    by_id = {job.job_id: job for job in seen.snapshot.queue}
    in_order = [by_id.pop(d.job_id) for d in seen.decisions if d.job_id in by_id]
    whole = Situation(replace(seen.snapshot, queue=(*in_order, *by_id.values())))
    if len(by_id) + len(in_order) <= FEW_JOBS:
        return whole
    fewer = whole.first_jobs(2)
    again = SeenRound(fewer.snapshot, tuple(policy.plan(fewer.snapshot, seen.now)), seen.now)
    return fewer if again.changes == seen.changes else whole


def _summary(seen: SeenRound) -> dict[str, Any]:
    named: dict[str, list[str]] = {}
    for decision in seen.changes:
        named.setdefault(NAMES[type(decision)], []).append(decision.job_id)
    return {
        **{name: jobs[:MAX_NAMED] for name, jobs in named.items()},
        "num_changes": len(seen.changes),
        "num_waiting": len(seen.snapshot.queue),
        "num_running": len(seen.snapshot.running),
    }


NAMES: dict[type[policy.Decision], str] = {
    policy.Start: "started",
    policy.Grow: "grew",
    policy.Shrink: "shrank",
    policy.Preempt: "left",
    policy.Impossible: "failed",
}


def store(session: Session, records: Sequence[Record]) -> None:
    touch(session)  # no answer about a job has changed
    for each in records:
        repository.add(session, each.made_at, each.summary, each.data)


def forget(session: Session, now: datetime) -> None:
    touch(session)
    repository.forget(session, now - KEPT_FOR, MAX_BYTES)


def page(session: Session, before: int | None, limit: int) -> views.DecisionPage:
    """The newest rounds that are kept, or those before a number."""
    rows = repository.newest(session, before, limit)
    return views.DecisionPage(
        items=[
            views.Decision(number=row.number, made_at=row.made_at, **row.summary) for row in rows
        ],
        next_before=rows[-1].number if len(rows) == limit else None,
    )


def replay(session: Session, number: int) -> views.ReplayedDecision:
    """A round, and the decisions of the policy on it now. DecisionNotFound if it is not kept, or
    was written by another release."""
    row = repository.get(session, number)
    if row is None:
        hint = f"rounds are kept for {KEPT_FOR.total_seconds() / 3600:g} hours"
        raise DecisionNotFound(f"no round {number} of the scheduler is kept", hint=hint)
    try:
        there, decided, now = codec.decode_record(row.record)
    except codec.Unreadable as error:
        raise DecisionNotFound(
            f"another release of dray kept the round {number}, and it can't be read now"
        ) from error
    again = policy.plan(there.snapshot, now)
    seen: dict[str, SeenJob] = {job.job_id: job for job in there.snapshot.running}
    seen |= {job.job_id: job for job in there.snapshot.queue}
    return views.ReplayedDecision(
        number=number,
        made_at=row.made_at,
        **row.summary,
        nodes={node.id: dict(node.available_to_us) for node in there.snapshot.nodes},
        is_same=_outcomes(again) == _outcomes(decided),
        decided=[_view(decision, seen.get(decision.job_id)) for decision in decided],
        replayed=[_view(decision, seen.get(decision.job_id)) for decision in again],
    )


def _changes(decisions: Iterable[policy.Decision]) -> list[policy.Decision]:
    """Those that do not leave everything as it is. Why the others wait is told, and not compared:
    the places of the jobs that are kept are not their places in the whole queue."""
    return [decision for decision in decisions if isinstance(decision, CHANGES)]


def _outcomes(decisions: Iterable[policy.Decision]) -> list[policy.Decision]:
    """The changes without their sentences, which another release may word differently."""
    return [
        replace(each, reason=replace(each.reason, message=""))
        if isinstance(each, policy.Preempt | policy.Shrink | policy.Impossible)
        else each
        for each in _changes(decisions)
    ]


SeenJob = policy.WaitingJob | policy.RunningJob


def _view(decision: policy.Decision, job: SeenJob | None) -> views.DecisionOnJob:
    slices = getattr(decision, "slices", ())
    reason = getattr(decision, "reason", None)
    return views.DecisionOnJob(
        job_id=decision.job_id,
        decision=type(decision).__name__.lower(),
        reason=None if reason is None else views.Reason(code=reason.code, message=reason.message),
        num_workers=count(slices) if slices else None,
        node_ids=[part.node_id for part in slices],
        because_of=getattr(decision, "because_of", None),
        queue=None if job is None else job.queue,
        owner=None if job is None else job.owner,
        priority=None if job is None else job.priority,
        left_s=None if job is None else job.left_s,
        waited_s=None if job is None else job.waited_s,
    )
