"""Changes a waiting job: holds or releases it, or moves it to another queue or to the front. Also
changes the priority of any job that has not ended."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import datetime
from functools import partial
from types import MappingProxyType
from typing import Any

from sqlalchemy.orm import Session

from dray import views
from dray.requests import JobChangeRequest
from dray.views import JobState
from service.db.models import JobRow
from service.db.notifications import QUEUE
from service.db.repositories.scheduling import queues as queues_repository
from service.db.session import Database, notify
from service.domain.errors import JobFinished, JobNotWaiting
from service.domain.events import ACTOR, ANONYMOUS
from service.domain.scheduling.rules.limits import HELD, held_message
from service.jobs import serializers
from service.jobs.service import found
from service.lifecycle import resizing
from service.lifecycle.transitions import remark
from service.queues import admission

NOTHING: Mapping[str, object] = MappingProxyType({})
NEXT_LOOK = "waits for the scheduler's next round"


class JobChanges:
    """Changes jobs. Each change is one transaction."""

    def __init__(self, database: Database, *, clock: Callable[[], datetime] | None = None) -> None:
        self._database = database
        self._clock = clock or database.clock

    async def change(
        self,
        job_id: str,
        wanted: JobChangeRequest,
        *,
        actor: str = ANONYMOUS,
        is_admin: bool = False,
    ) -> views.Job:
        """Change the job on behalf of `actor`, adding an event for each change. Idempotent.

        Raises JobFinished if the job has ended, and JobNotWaiting if the change would hold or move
        a job that is not waiting. Like a submission, raises UnknownQueue, QueueFull, Unsatisfiable,
        and, except for admins, PriorityTooHigh.
        """
        now = self._clock()

        def work(session: Session) -> views.Job:
            row = found(session, job_id, lock=True)
            change_row(session, row, wanted, actor=actor, is_admin=is_admin, now=now)
            return serializers.job(session, row)

        return await self._database.write(work)


def change_row(
    session: Session,
    row: JobRow,
    wanted: JobChangeRequest,
    *,
    actor: str,
    is_admin: bool,
    now: datetime,
) -> bool:
    """Change a locked job, and return whether anything differs. Raises the errors of
    `JobChanges.change`."""
    refuse_state(row, wanted)
    check_rules(session, row, wanted, is_admin=is_admin)
    change = JobChange(session, row, actor, now)
    change.move(wanted)
    change.hold(wanted.held)
    if change.is_any:
        notify(session, QUEUE)
    return change.is_any


def refuse_state(row: JobRow, wanted: JobChangeRequest) -> None:
    if row.state.is_terminal:
        raise JobFinished(f"the job {row.id} is {row.state}: it has ended")
    if row.state is JobState.CANCELLING:
        raise JobNotWaiting(f"the job {row.id} is being cancelled")
    moves = wanted.queue is not None or wanted.first or wanted.held is not None
    if moves and row.state is not JobState.QUEUED:
        raise JobNotWaiting(
            f"the job {row.id} is {row.state}: only a waiting job can be held, released or moved",
            hint=f"`dray preempt {row.id}` makes the job release its slots and wait again",
        )


def check_rules(
    session: Session,
    row: JobRow,
    wanted: JobChangeRequest,
    *,
    is_admin: bool,
    num_jobs: int = 1,
) -> None:
    """Refuse a priority or a move that the queue does not allow. `num_jobs` is the number of jobs
    that move together."""
    moves = wanted.queue is not None and wanted.queue != row.queue
    if not moves and wanted.priority is None:
        return
    name = wanted.queue or row.queue
    if moves:
        queue = admission.admit(session, name, row.owner, resizing.request_of(row), num_jobs)
    else:
        queue = admission.locked(session, name)
    if not is_admin:
        admission.refuse_priority(
            queue, row.priority if wanted.priority is None else wanted.priority
        )


class JobChange:
    """Applies the changes to one locked job."""

    def __init__(
        self,
        session: Session,
        row: JobRow,
        actor: str,
        now: datetime,
        *,
        first_rank: Callable[[str, int], int | None] | None = None,
        events: list[Mapping[str, Any]] | None = None,
    ) -> None:
        """`first_rank` returns the lowest rank in a queue with a priority; by default, among all
        jobs except this one. `events` is passed to `remark`."""
        self._session = session
        self._row = row
        self._actor = actor
        self._now = now
        self._first_rank = first_rank or partial(queues_repository.first_rank, session, but=row.id)
        self._events = events
        self.is_any = False

    def move(self, wanted: JobChangeRequest) -> None:
        row = self._row
        if wanted.queue is not None and wanted.queue != row.queue:
            data = {"from": row.queue, "to": wanted.queue}
            row.queue, row.rank = wanted.queue, 0
            message = f"moved to the queue {row.queue!r}"
            if row.held_by is None:  # the previous queue may have kept the job back
                row.position, row.blocked_by = None, []
                self._explain("moved", NEXT_LOOK, message, data)
            else:
                self._add_event("moved", message, data)
        if wanted.priority is not None and wanted.priority != row.priority:
            steps = {"from": row.priority, "to": wanted.priority}
            row.priority, row.rank = wanted.priority, 0
            self._add_event("priority", f"now has priority {row.priority}", steps)
        if wanted.first:
            self._move_first()

    def _move_first(self) -> None:
        row = self._row
        # The new rank must be lower than all others, because jobs with the same rank are ordered by
        # their remaining work as well as by submission.
        first = self._first_rank(row.queue, row.priority)
        if first is not None and first <= row.rank:
            row.rank = first - 1
            where = f"of priority {row.priority} in the queue {row.queue!r}"
            self._add_event("moved_first", f"moved ahead of all other jobs {where}")

    def hold(self, held: bool | None) -> None:
        row = self._row
        if held is True and row.held_by is None:
            row.held_by, row.position, row.blocked_by = self._actor, None, []
            self._explain(HELD, held_message(self._actor, row.id), "is held until it is released")
        elif held is False and row.held_by is not None:
            row.held_by = None
            self._explain("released", NEXT_LOOK, "was released")

    def limit_array(self, max_running: int | None) -> None:
        """Add the event of a changed `max_running`, which is stored for all jobs of the array."""
        message = f"its array now runs at most {max_running} jobs at the same time"
        if max_running is None:
            message = "its array can now run any number of jobs at the same time"
        self._add_event("array_limit", message, {"max_running": max_running})

    def _explain(
        self, code: str, reason: str, message: str, data: Mapping[str, object] = NOTHING
    ) -> None:
        self._row.reason_code, self._row.reason_message = code, reason
        self._add_event(code, message, data)

    def _add_event(self, code: str, message: str, data: Mapping[str, object] = NOTHING) -> None:
        self.is_any = True
        remark(
            self._session,
            self._row,
            type_="queue",
            code=code,
            message=message,
            now=self._now,
            data={ACTOR: self._actor, **data},
            events=self._events,
        )
