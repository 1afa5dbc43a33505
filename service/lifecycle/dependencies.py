"""Effects of a job's end on jobs that have not started: its dependents, and trials of its sweep.

The effects are applied in the transaction in which the job ends, so the scheduler does not need to
search for affected jobs. While a job is being submitted, the jobs that it depends on are prevented
from ending (`hold`), so that the new job can't miss the end of one of them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from sqlalchemy.orm import Session

from dray.spec import JobSpec, Sweep
from dray.spec.ordering import After
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
    InvalidDocument,
)
from service.domain.scheduling.rules.dependencies import (
    BAD,
    Prerequisite,
    Prospect,
    each_prospect,
    is_against,
    never_satisfied,
    never_satisfied_each,
    prospect,
)
from service.domain.states import CANCELLED_BY_USER, TOO_MANY_FAILED, Trigger, transition
from service.lifecycle import moves

NEVER_SATISFIED = "dependency_never_satisfied"


@dataclass(frozen=True)
class Ended:
    """A job that has just ended."""

    job_id: str
    array_id: str | None
    array_index: int | None
    state: JobState
    is_stopped_early: bool = False
    """Whether the job is a trial that was stopped because other trials are better. The sweep can
    still succeed.
    """


def hold(session: Session, spec: JobSpec) -> list[Prerequisite]:
    """Return the jobs and arrays that the document's job must wait for.

    None of these jobs and arrays can end before this transaction ends. Raises DependencyNotFound
    for an unknown id, DependencyNeverSatisfied if a condition can no longer be satisfied, and
    InvalidDocument if two arrays with `each` have different sizes.
    """
    ids = [entry.job for entry in spec.after]
    if not ids:
        return []
    repository.hold_unfinished(session, ids)
    as_a_whole = repository.states(session, ids)
    by_element = repository.states(session, [e.job for e in spec.after if e.each], each=True)
    still_open = []
    for number, entry in enumerate(spec.after):
        states = (by_element if entry.each else as_a_whole).get(entry.job)
        if not states:
            raise DependencyNotFound(
                f"there is no job or array {entry.job}",
                pointer=f"/after/{number}/job",
                hint="`dray ls` lists the existing jobs and arrays",
            )
        if entry.each:
            _refuse_unequal(session, spec, entry.job, number)
            stands = each_prospect(states, entry.on)
        else:
            stands = prospect(states, entry.on)
        if stands is Prospect.NEVER:
            raise _refusal(entry, states, number)
        if stands is Prospect.OPEN:
            still_open.append(Prerequisite(entry.job, entry.on, entry.each))
    return still_open


def _refuse_unequal(session: Session, spec: JobSpec, array_id: str, number: int) -> None:
    size = arrays_repository.size(session, array_id)
    if spec.array is None and spec.sweep is None:
        why = "requires this document to define an array or a sweep"
    elif size != spec.num_jobs:
        why = f"requires arrays of equal size, but {array_id} has {size} jobs, not {spec.num_jobs}"
    else:
        return
    raise InvalidDocument(why, pointer=f"/after/{number}/each")


def insert(session: Session, waiter: str, after: Sequence[Prerequisite], now: datetime) -> None:
    """Store the dependencies of a new job or array, as returned by `hold`. Cancels the jobs of the
    array whose counterparts have already ended, but not as required."""
    arrays = [one.id for one in after if one.each]
    unfinished = repository.unfinished_arrays(session, arrays)
    repository.insert_all(session, waiter, [a for a in after if not a.each or a.id in unfinished])
    doomed: _Doomed = {}
    for one in after:
        if one.each:
            against = repository.ended_against(session, one.id, one.on)
            _add_each(session, doomed, waiter, one, against)
    resolve(session, _cancel(session, doomed, now), now)


def change(session: Session, job_id: str, spec: JobSpec) -> None:
    """Replace the dependencies of a waiting job, which has never started and belongs to no array,
    by the dependencies of its new document. The caller has called `repository.lock_changes`.

    Raises the errors of `hold`, and DependencyCircular if one of the jobs waits, directly or
    through others, for this job.
    """
    repository.withdraw(session, [job_id])
    still_open = hold(session, spec)
    for number, entry in enumerate(spec.after):
        is_own = entry.job == job_id
        chain = [job_id] if is_own else repository.chain(session, entry.job, job_id)
        _refuse_chain(chain, f"/after/{number}")
    repository.insert_all(session, job_id, still_open)


def refuse_circle(session: Session, job_id: str, *, pointer: str) -> None:
    """Raise DependencyCircular if a job whose name has been changed waits for itself, because
    singletons wait for earlier jobs with their name."""
    session.flush()
    _refuse_chain(repository.chain(session, job_id, job_id), pointer)


def _refuse_chain(chain: Sequence[str] | None, pointer: str) -> None:
    if chain is not None:
        raise DependencyCircular(
            f"the job would wait for itself: {', which waits for '.join(chain)}",
            pointer=pointer,
            hint="remove one of these dependencies",
        )


def _refusal(entry: After, states: Mapping[JobState, str], number: int) -> DependencyNeverSatisfied:
    bad = JobState.FAILED if JobState.FAILED in states else JobState.CANCELLED
    if entry.on == "failure":
        bad = JobState.SUCCEEDED
    return DependencyNeverSatisfied(
        f"this job could never start: it {never_satisfied(entry.job, states[bad], bad)}",
        pointer=f"/after/{number}",
        hint="use `on: end` to start the job after the other job has ended, whatever the result",
    )


def resolve(session: Session, ended: Sequence[Ended], now: datetime) -> None:
    """Settle the dependencies on jobs that have just ended. If a job did not end as another job
    required, cancel the other job, then cancel the jobs that required the success of the cancelled
    job, and so on."""
    while ended:
        array_ids = {one.array_id for one in ended if one.array_id is not None}
        rows = repository.waiting_for(session, [one.job_id for one in ended], array_ids)
        if not rows:
            return
        awaited = {of.id for _, of in rows}
        over = awaited - repository.unfinished_arrays(session, awaited & array_ids)
        ended = _cancel(session, _doomed(session, rows, ended, over), now)
        repository.settle(session, over)


def cancel_unstarted(
    session: Session, array_id: str, *, message: str, now: datetime, data: Mapping[str, Any]
) -> None:
    """Cancel, on behalf of the user, all jobs of an array that have had no attempt."""
    end_unstarted(session, [array_id], CANCELLED_BY_USER, message, now, data)


def end_unstarted(
    session: Session,
    units: Sequence[str],
    code: str,
    message: str,
    now: datetime,
    data: Mapping[str, Any],
) -> None:
    """Cancel, with this reason, those jobs in `units` (ids of jobs and arrays) that have had no
    attempt."""
    ended = _end(session, units, Trigger.CANCEL, code, message, now, data)
    resolve(session, ended, now)


_Doomed = dict[tuple[str, str, str | None], list[str]]
"""Jobs and arrays that can never start, keyed by the reason: the message, the id of the job or
array that they waited for, and the job that ended."""


def _doomed(
    session: Session,
    rows: Sequence[tuple[str, Prerequisite]],
    ended: Sequence[Ended],
    over: Collection[str],
) -> _Doomed:
    """Return the waiting jobs that can never start. `over` contains the jobs and arrays that have
    ended completely."""
    by_id = {one.job_id: one for one in ended}
    of_arrays: dict[str, list[Ended]] = {}
    for one in ended:
        if one.array_id is not None:
            of_arrays.setdefault(one.array_id, []).append(one)
    found: _Doomed = {}
    for waiter, of in rows:
        of_array = of_arrays.get(of.id, [])
        if of.each:
            states = {one.array_index: one.state for one in of_array}
            against = {index: its for index, its in states.items() if is_against(its, of.on)}
            _add_each(session, found, waiter, of, against)
        else:
            own = by_id.get(of.id)
            cause = _against(session, of, of_array, over) if own is None else own
            if cause is not None and is_against(cause.state, of.on):
                message = never_satisfied(of.id, cause.job_id, cause.state)
                found.setdefault((message, of.id, cause.job_id), []).append(waiter)
    return found


def _against(
    session: Session, of: Prerequisite, ended: Sequence[Ended], over: Collection[str]
) -> Ended | None:
    """Return one of these jobs of an array if the array can no longer end as required."""
    if of.on == "success":
        return next((one for one in ended if one.state in BAD and not one.is_stopped_early), None)
    if of.on == "end" or of.id not in over:
        return None
    states = repository.states(session, [of.id]).get(of.id, {})
    is_never = prospect(states, of.on) is Prospect.NEVER
    return replace(ended[-1], state=JobState.SUCCEEDED) if is_never else None


def _add_each(
    session: Session,
    doomed: _Doomed,
    waiter: str,
    of: Prerequisite,
    against: Mapping[int | None, JobState],
) -> None:
    """Add the jobs of the array `waiter` whose counterparts did not end as required. `against`
    contains the states of these counterparts by their indices."""
    for state in sorted(set(against.values())):
        indices = [index for index, its in against.items() if its is state and index is not None]
        ids = repository.with_indices(session, waiter, indices)
        doomed.setdefault((never_satisfied_each(of.id, state), of.id, None), []).extend(ids)


def _cancel(session: Session, doomed: _Doomed, now: datetime) -> list[Ended]:
    """Cancel jobs that can never start, and all jobs of arrays that can never start."""
    ended: list[Ended] = []
    for (message, after_id, job_id), waiters in doomed.items():
        data = {"after": after_id} | ({} if job_id is None else {"job": job_id})
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
        moves.ended(session, changed, state, now)
    repository.withdraw(session, units)
    for row in changed:
        notify(session, row.id, events_of(row.id))
    for array_id in {row.array_id for row in changed if row.array_id is not None}:
        notify(session, events_of(array_id))
    notify(session, QUEUE)
    return [Ended(row.id, row.array_id, row.array_index, state) for row in changed]


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
    end_unstarted(session, [row.array_id], TOO_MANY_FAILED, message, now, data)
