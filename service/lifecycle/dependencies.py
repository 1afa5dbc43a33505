"""Effects of a job's end on jobs that have not started: its dependents, and trials of its sweep.

The effects are applied in the transaction in which the job ends, so the scheduler does not need to
search for affected jobs. While a job is being submitted, the jobs that it depends on are prevented
from ending (`hold`), so that the new job can't miss the end of one of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy.orm import Session

from dray.spec import JobSpec, Sweep
from dray.views import JobState
from service.db.models import JobRow
from service.db.notifications import QUEUE, events_of
from service.db.repositories import events as events_repository
from service.db.repositories.submission import arrays as arrays_repository
from service.db.repositories.submission import dependencies as repository
from service.db.repositories.submission import sweeps as sweeps_repository
from service.db.session import notify
from service.domain.errors import (
    DependencyCircular,
    DependencyNeverSatisfied,
    DependencyNotFound,
)
from service.domain.scheduling.rules.dependencies import Prospect, never_satisfied, prospect
from service.domain.states import CANCELLED_BY_USER, TOO_MANY_FAILED, Trigger, transition
from service.lifecycle import moves

NEVER_SATISFIED = "dependency_never_satisfied"


@dataclass(frozen=True)
class Ended:
    """A job that has just ended."""

    job_id: str
    array_id: str | None
    state: JobState
    is_stopped_early: bool = False
    """Whether the job is a trial that was stopped because other trials are better. The sweep can
    still succeed.
    """


def hold(session: Session, spec: JobSpec) -> list[tuple[str, bool]]:
    """Return the ids of the jobs and arrays that the document's job must wait for, and whether each
    must succeed.

    None of these jobs and arrays can end before this transaction ends. Raises DependencyNotFound
    for an unknown id, and DependencyNeverSatisfied if a required success is no longer possible.
    """
    ids = [entry.job for entry in spec.after]
    if not ids:
        return []
    repository.hold_unfinished(session, ids)
    found = repository.states(session, ids)
    still_open = []
    for number, entry in enumerate(spec.after):
        states = found.get(entry.job)
        if not states:
            raise DependencyNotFound(
                f"there is no job or array {entry.job}",
                pointer=f"/after/{number}/job",
                hint="`dray ls` lists the existing jobs and arrays",
            )
        on_success = entry.on == "success"
        stands = prospect(states, on_success=on_success)
        if stands is Prospect.NEVER:
            raise _refusal(entry.job, states, number)
        if stands is Prospect.OPEN:
            still_open.append((entry.job, on_success))
    return still_open


def replace(session: Session, job_id: str, spec: JobSpec) -> None:
    """Replace the dependencies of a waiting job, which has never started and belongs to no array,
    by those of its new document. The caller has called `repository.lock_changes`.

    Raises the errors of `hold`, and DependencyCircular if one of the jobs waits, directly or
    through others, for this job.
    """
    repository.withdraw(session, [job_id])
    still_open = hold(session, spec)
    for number, entry in enumerate(spec.after):
        chain = repository.chain(session, entry.job, job_id)
        if chain is not None:
            others = ", which waits for ".join(chain)
            raise DependencyCircular(
                f"the job would wait for itself: {others}",
                pointer=f"/after/{number}",
                hint="remove one of these dependencies",
            )
    repository.insert_all(session, job_id, still_open)


def _refusal(after: str, states: Mapping[JobState, str], number: int) -> DependencyNeverSatisfied:
    bad = JobState.FAILED if JobState.FAILED in states else JobState.CANCELLED
    return DependencyNeverSatisfied(
        f"this job could never start: it {never_satisfied(after, states[bad], bad)}",
        pointer=f"/after/{number}",
        hint="use `on: end` to start the job after the other job has ended, whatever the result",
    )


def resolve(session: Session, ended: Sequence[Ended], now: datetime) -> None:
    """Settle the dependencies on jobs that have just ended. If a job required the success of a job
    that did not succeed, cancel the job, then cancel the jobs that required the success of the
    cancelled job, and so on."""
    while ended:
        array_ids = {one.array_id for one in ended if one.array_id is not None}
        rows = repository.waiting_for(session, [one.job_id for one in ended], array_ids)
        if not rows:
            return
        awaited = {after_id for _, after_id, _ in rows}
        over = awaited - repository.unfinished_arrays(session, awaited & array_ids)
        ended = _cancel(session, _doomed(rows, ended), now)
        repository.settle(session, over)


def cancel_unstarted(
    session: Session, array_id: str, *, message: str, now: datetime, data: Mapping[str, Any]
) -> None:
    """Cancel, on behalf of the user, all jobs of an array that have had no attempt."""
    end_unstarted(session, array_id, CANCELLED_BY_USER, message, now, data)


def end_unstarted(
    session: Session,
    array_id: str,
    code: str,
    message: str,
    now: datetime,
    data: Mapping[str, Any],
) -> None:
    """Cancel, with this reason, all jobs of an array that have had no attempt."""
    ended = _end(session, [array_id], Trigger.CANCEL, code, message, now, data)
    resolve(session, ended, now)


def _doomed(
    rows: Sequence[tuple[str, str, bool]], ended: Sequence[Ended]
) -> dict[str, tuple[str, Ended]]:
    """Return the waiting jobs that can never start, each with the id of the job or array that it
    waited for, and the job that did not succeed."""
    unsuccessful = {}
    for one in ended:
        if one.state is not JobState.SUCCEEDED:
            unsuccessful[one.job_id] = one
            if one.array_id is not None and not one.is_stopped_early:
                unsuccessful.setdefault(one.array_id, one)
    return {
        waiter: (after_id, unsuccessful[after_id])
        for waiter, after_id, on_success in rows
        if on_success and after_id in unsuccessful
    }


def _cancel(
    session: Session, doomed: Mapping[str, tuple[str, Ended]], now: datetime
) -> list[Ended]:
    """Cancel jobs that can never start, and all jobs of arrays that can never start."""
    by_cause: dict[tuple[str, Ended], list[str]] = {}
    for waiter, pair in doomed.items():
        by_cause.setdefault(pair, []).append(waiter)
    ended: list[Ended] = []
    for (after_id, cause), waiters in by_cause.items():
        message = never_satisfied(after_id, cause.job_id, cause.state)
        data = {"after": after_id, "job": cause.job_id}
        ended += _end(session, waiters, Trigger.UNMET, NEVER_SATISFIED, message, now, data)
    return ended


def _end(
    session: Session,
    units: Sequence[str],
    trigger: Trigger,
    code: str,
    message: str,
    now: datetime,
    data: Mapping[str, Any],
) -> list[Ended]:
    """End those jobs in `units` (ids of jobs and arrays) that have had no attempt. A bulk version
    of `transitions.move`."""
    state = transition(JobState.QUEUED, trigger, code)
    assert state is JobState.CANCELLED
    changed = arrays_repository.cancel_unstarted(
        session, units, code=code, message=message, now=now
    )
    event = {
        "time": now,
        "type": "state",
        "from_state": JobState.QUEUED,
        "to_state": state,
        "attempt": 0,
        "code": code,
        "message": message,
        "data": dict(data),
    }
    rows = [{**event, "job_id": row.id, "seq": row.event_seq} for row in changed]
    events_repository.add_events(session, rows)
    moves.note(session, rows)
    if rows:
        moves.ended(session, state, len(rows))
    repository.withdraw(session, units)
    for row in changed:
        notify(session, row.id, events_of(row.id))
    for array_id in {row.array_id for row in changed if row.array_id is not None}:
        notify(session, events_of(array_id))
    notify(session, QUEUE)
    return [Ended(row.id, row.array_id, state) for row in changed]


def trial_failed(session: Session, job: JobRow, now: datetime) -> None:
    """Cancel the trials that have not started if more trials have failed than the sweep allows.
    Started trials continue."""
    row = None if job.array_id is None else sweeps_repository.lock(session, job.array_id)
    if row is None:
        return
    sweep = Sweep.model_validate(row.sweep)
    failed = sweeps_repository.num_failed(session, row.array_id)
    if sweep.max_failed is None or failed <= sweep.max_failed:
        return
    trials = "1 trial" if failed == 1 else f"{failed} trials"
    message = f"never started: {trials} of its sweep failed, and max_failed is {sweep.max_failed}"
    data = {"failed": failed}
    end_unstarted(session, row.array_id, TOO_MANY_FAILED, message, now, data)
