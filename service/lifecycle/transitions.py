"""Changes the states of jobs. Every change is a compare-and-set, and is recorded as an event.

The functions take the Session of a `Database.write`, so each change and its event are written in
the same transaction as the caller's other writes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from sqlalchemy import Row
from sqlalchemy.orm import Session

from dray.views import JobState
from service.db.models import JobRow
from service.db.notifications import ATTEMPTS, QUEUE, events_of
from service.db.repositories import events as events_repository
from service.db.repositories import faults as faults_repository
from service.db.repositories import jobs as repository
from service.db.repositories.bulk import change
from service.db.repositories.scheduling import planned_jobs
from service.db.repositories.submission import dependencies as dependencies_repository
from service.db.session import notify, touch
from service.domain.scheduling import policy
from service.domain.scheduling.rules.limits import BUDGET_USED_UP, HELD
from service.domain.scheduling.rules.reservations import WAITING_FOR_RESERVATION
from service.domain.scheduling.rules.times import BEGINS_AT
from service.domain.states import STOPPED_EARLY, Trigger, transition
from service.lifecycle import dependencies, moves

KEPT_BACK = frozenset(
    {
        *(HELD, BUDGET_USED_UP, BEGINS_AT, WAITING_FOR_RESERVATION),
        *("waiting_for_jobs", "array_limit"),
    }
)
"""Reasons for waiting that would apply even if all slots were free."""


class Ends:
    """Jobs that end in the same transaction. Their events, and the effects of their ends on other
    jobs, are stored together."""

    def __init__(self) -> None:
        self._jobs: list[tuple[JobRow, JobState]] = []
        self._events: list[Mapping[str, Any]] = []

    def add(self, job: JobRow, before: JobState, event: Mapping[str, Any]) -> None:
        """Record a job that has just ended, and its previous state `before`."""
        self._jobs.append((job, before))
        self._events.append(event)

    def settle(self, session: Session, now: datetime) -> None:
        if not self._jobs:
            return
        events_repository.add_events(session, self._events)
        moves.note(session, self._events)
        ids = [job.id for job, _ in self._jobs]
        message = "the job ended before training continued"
        faults_repository.fail_drills(session, ids, message, now)
        dependencies_repository.withdraw(
            session, [job.id for job, before in self._jobs if before is JobState.QUEUED]
        )
        ended = [
            dependencies.Ended(
                *(job.id, job.array_id, job.array_index, job.state),
                is_stopped_early=job.reason_code == STOPPED_EARLY,
            )
            for job, _ in self._jobs
        ]
        dependencies.resolve(session, ended, now)
        for job, _ in self._jobs:
            moves.ended(session, [job], job.state, now)
            if job.state is JobState.FAILED:
                dependencies.trial_failed(session, job, now)
        self._jobs, self._events = [], []


def move(
    session: Session,
    job: JobRow,
    trigger: Trigger,
    *,
    code: str,
    message: str,
    now: datetime,
    values: Mapping[str, Any] | None = None,
    data: Mapping[str, Any] | None = None,
    ends: Ends | None = None,
) -> bool:
    """Move the job, unless its state or attempt has changed since `job` was read.

    `values` are other columns to change. Returns False, and changes nothing, if the job has been
    changed concurrently. Raises IllegalTransition if the table has no such move or reason. `job` is
    updated with the new values. If the job ends and `ends` is given, the job is added to it, so
    that the caller can call `settle` once for several jobs.
    """
    before = job.state
    after = transition(before, trigger, code)
    if not _is_still(session, job, before, job.attempt):
        return False
    changes = {**changes_of(job, after, code, message, now), **(values or {})}
    event = state_event(job, changes, now, data)
    change(job, **changes)
    if after.is_terminal:
        settled = ends or Ends()
        settled.add(job, before, event)
        if ends is None:
            settled.settle(session, now)
    else:
        events_repository.add_events(session, [event])
        moves.note(session, [event])
    announce(session, job)
    return True


def _is_still(session: Session, job: JobRow, state: JobState, attempt: int) -> bool:
    """Whether the job is in this state and attempt, and remains so until this transaction ends."""
    if repository.is_locked(session, job.id):
        return True
    locked = repository.lock(session, job.id)
    return locked is not None and (locked.state, locked.attempt) == (state, attempt)


def changes_of(
    job: JobRow | Row[Any], after: JobState, code: str, message: str, now: datetime
) -> dict[str, Any]:
    """Return the changed columns of a job that enters another state."""
    changes: dict[str, Any] = {
        "state": after,
        "event_seq": job.event_seq + 1,
        "reason_code": code,
        "reason_message": message,
        "position": None,
        "blocked_by": [],
        "held_by": None,
        **_not_kept_back(job, now),
    }
    if after.is_terminal:
        changes["finished_at"] = now
        if job.started_at is not None:
            changes["ran_s"] = max(0.0, (now - job.started_at).total_seconds())
    elif after is JobState.QUEUED:
        changes["eligible_at"] = now
    return changes


def state_event(
    job: JobRow | Row[Any],
    changes: Mapping[str, Any],
    now: datetime,
    data: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the event for a state transition. `job` is the job before the transition."""
    return {
        "job_id": job.id,
        "seq": changes["event_seq"],
        "time": now,
        "type": "state",
        "from_state": job.state,
        "to_state": changes["state"],
        "attempt": changes.get("attempt", job.attempt),
        "code": changes["reason_code"],
        "message": changes["reason_message"],
        "data": dict(data or {}),
    }


def announce(session: Session, job: JobRow | Row[Any]) -> None:
    """Wake all subscribers that wait for a change of this job."""
    notify(session, job.id, events_of(job.id), QUEUE)
    if job.state is JobState.CANCELLING:
        notify(session, ATTEMPTS)
    if job.array_id is not None:
        notify(session, events_of(job.array_id))


def remark(
    session: Session,
    job: JobRow,
    *,
    type_: str,
    code: str,
    message: str,
    now: datetime,
    data: Mapping[str, Any] | None = None,
    events: list[Mapping[str, Any]] | None = None,
) -> None:
    """Add an event that does not change the state. If `events` is given, the event is added to this
    list, so that the caller can store the events of several jobs together."""
    event = {
        "job_id": job.id,
        "seq": events_repository.count_event(session, job),
        "time": now,
        "type": type_,
        "from_state": None,
        "to_state": None,
        "attempt": job.attempt,
        "code": code,
        "message": message,
        "data": dict(data or {}),
    }
    if events is None:
        events_repository.add_events(session, [event])
    else:
        events.append(event)
    notify(session, job.id, events_of(job.id))


def runtime_left_s(job: JobRow | Row[Any]) -> float | None:
    return None if job.max_runtime_s is None else job.max_runtime_s - job.runtime_used_s


def waits_with_news(session: Session, waits: Sequence[policy.Wait]) -> list[policy.Wait]:
    """Return the elements of `waits` that `note_waiting` would store, so that a long queue need not
    be read in a write transaction."""
    queued = planned_jobs.waiting_notes(session)
    return [wait for wait in waits if _is_news(queued.get(wait.job_id), wait)]


def _is_news(row: Row[Any] | None, wait: policy.Wait) -> bool:
    # If the job has been held or released since the plan read it, the stored reason is newer than
    # the plan's.
    if row is None or (row.held_by is None) == (wait.reason.code == HELD):
        return False
    shown = (row.reason_code, row.reason_message, row.position, tuple(row.blocked_by))
    new = (wait.reason.code, wait.reason.message, wait.position, wait.blocked_by)
    is_kept_back = wait.reason.code in KEPT_BACK
    return shown != new or is_kept_back != (row.kept_back_since is not None)


def note_waiting(session: Session, waits: Sequence[policy.Wait], now: datetime) -> int:
    """Store the reason and the position of each waiting job; return the number of changed jobs.

    Because plans are made often, an event is added only for an exhausted budget, which blocks jobs
    for a long time. Unchanged rows are not written.
    """
    stopped: dict[str, str] = {}
    queued = planned_jobs.waiting_notes_of(session, [wait.job_id for wait in waits])
    notes: list[dict[str, Any]] = []
    for wait in waits:
        row = queued.get(wait.job_id)
        if row is None or not _is_news(row, wait):
            continue
        is_kept_back = wait.reason.code in KEPT_BACK
        kept_back = _kept_back(row, now) if is_kept_back else _not_kept_back(row, now)
        if wait.reason.code == BUDGET_USED_UP != row.reason_code:
            stopped[wait.job_id] = wait.reason.message
        note = {
            "reason_code": wait.reason.code,
            "reason_message": wait.reason.message,
            "position": wait.position,
            "blocked_by": list(wait.blocked_by),
            **kept_back,
        }
        new = {f"new_{name}": value for name, value in note.items()}
        notes.append({"job_id": wait.job_id, **new})
    planned_jobs.note_waiting(session, notes)
    _add_stopped_events(session, stopped, now)
    touch(session, *(note["job_id"] for note in notes))
    return len(notes)


def _add_stopped_events(session: Session, messages: Mapping[str, str], now: datetime) -> None:
    """Add an event to each of these waiting jobs, because the budget of its queue is used up."""
    event = {
        "time": now,
        "type": "budget",
        "from_state": None,
        "to_state": None,
        "code": BUDGET_USED_UP,
        "data": {},
    }
    changed = planned_jobs.count_events_of_waiting(session, list(messages), BUDGET_USED_UP)
    rows = [
        {
            **event,
            "job_id": row.id,
            "seq": row.event_seq,
            "attempt": row.attempt,
            "message": messages[row.id],
        }
        for row in changed
    ]
    events_repository.add_events(session, rows)
    notify(session, *(topic for row in changed for topic in (row.id, events_of(row.id))))


def _kept_back(job: JobRow | Row[Any], now: datetime) -> dict[str, Any]:
    """Return the columns to set for a job that could not start now even if all slots were free."""
    return {
        "kept_back_s": job.kept_back_s,
        "kept_back_since": job.kept_back_since or now,
        "eligible_at": job.eligible_at,
    }


def _not_kept_back(job: JobRow | Row[Any], now: datetime) -> dict[str, Any]:
    """Return the columns to set for a job that could start now if all slots were free."""
    since = job.kept_back_since
    more_s = 0.0 if since is None else max(0.0, (now - since).total_seconds())
    return {
        "kept_back_s": job.kept_back_s + more_s,
        "kept_back_since": None,
        "eligible_at": job.eligible_at if since is None else now,
    }


def fail_impossible(
    session: Session,
    job_id: str,
    reason: policy.Reason,
    now: datetime,
) -> bool:
    """Fail a waiting job that the cluster can never run; return False if it is no longer
    waiting."""
    job = repository.lock(session, job_id)
    if job is None or job.state != JobState.QUEUED:
        return False
    return move(session, job, Trigger.IMPOSSIBLE, code=reason.code, message=reason.message, now=now)
