"""Stored scheduling rounds: the input of the policy and its decisions, kept for a few hours.

A round is stored if a job started, grew, was asked to release slots, or was found to be impossible.
Only waiting jobs that affected the decisions are stored. `replay` calls the policy again with the
stored input, and shows whether the decisions are the same.
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
"""Maximum total size of the stored rounds."""
FEW_JOBS = 20
"""If at most this many jobs are waiting, all of them are stored, because finding the relevant jobs
would take longer than the scheduling round took."""
MAX_NAMED = 20
"""Maximum number of jobs listed in a summary for each kind of decision."""

CHANGES = (policy.Start, policy.Grow, policy.Shrink, policy.Preempt, policy.Impossible)


@dataclass(frozen=True)
class SeenRound:
    """One scheduling round."""

    snapshot: policy.Snapshot
    decisions: tuple[policy.Decision, ...]
    now: datetime

    @property
    def changes(self) -> list[policy.Decision]:
        return _changes(self.decisions)


@dataclass(frozen=True)
class Record:
    """A round to store."""

    made_at: datetime
    summary: dict[str, Any]
    data: bytes
    """The data needed for a replay."""


def record(seen: SeenRound) -> Record:
    situation = _needed(seen)
    kept = {job.job_id for job in situation.snapshot.queue}
    decisions = [
        decision
        for decision in seen.decisions
        if decision.job_id in kept or not isinstance(decision, policy.Wait)
    ]
    data = codec.encode_record(situation, decisions, seen.now)
    return Record(seen.now, _summary(seen), data)


def _needed(seen: SeenRound) -> Situation:
    """Return the situation of the round, without the jobs that did not affect the decisions."""
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
    touch(session)  # no job has changed
    for each in records:
        repository.add(session, each.made_at, each.summary, each.data)


def forget(session: Session, now: datetime) -> None:
    touch(session)
    repository.forget(session, now - KEPT_FOR, MAX_BYTES)


def page(session: Session, before: int | None, limit: int) -> views.DecisionPage:
    """Return the latest stored rounds, or the rounds with numbers below `before`."""
    rows = repository.newest(session, before, limit)
    return views.DecisionPage(
        items=[
            views.Decision(number=row.number, made_at=row.made_at, **row.summary) for row in rows
        ],
        next_before=rows[-1].number if len(rows) == limit else None,
    )


def replay(session: Session, number: int) -> views.ReplayedDecision:
    """Return a round, and the current policy's decisions for the same input. Raises
    DecisionNotFound if the round is not stored, or was written by another release."""
    row = repository.get(session, number)
    if row is None:
        hint = f"scheduling rounds are kept for {KEPT_FOR.total_seconds() / 3600:g} hours"
        raise DecisionNotFound(f"scheduling round {number} is not stored", hint=hint)
    try:
        situation, decided, now = codec.decode_record(row.record)
    except codec.Unreadable as error:
        raise DecisionNotFound(
            f"scheduling round {number} was stored by another release of dray, and this release "
            "can't read it"
        ) from error
    again = policy.plan(situation.snapshot, now)
    seen: dict[str, SeenJob] = {job.job_id: job for job in situation.snapshot.running}
    seen |= {job.job_id: job for job in situation.snapshot.queue}
    return views.ReplayedDecision(
        number=number,
        made_at=row.made_at,
        **row.summary,
        nodes={node.id: dict(node.available_to_us) for node in situation.snapshot.nodes},
        is_same=_outcomes(again) == _outcomes(decided),
        decided=[_view(decision, seen.get(decision.job_id)) for decision in decided],
        replayed=[_view(decision, seen.get(decision.job_id)) for decision in again],
    )


def _changes(decisions: Iterable[policy.Decision]) -> list[policy.Decision]:
    """Return the decisions that change a job. The other decisions are shown but not compared: they
    contain queue positions, which a replay can't reproduce without all waiting jobs."""
    return [decision for decision in decisions if isinstance(decision, CHANGES)]


def _outcomes(decisions: Iterable[policy.Decision]) -> list[policy.Decision]:
    """Return the changes without their messages, whose wording can differ between releases."""
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
