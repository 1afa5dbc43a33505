"""Changes a waiting job: holds or releases it, moves it to another queue or to the front, or
changes its document. Also changes the priority of any job that has not ended."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import datetime
from functools import partial
from types import MappingProxyType
from typing import Any

from sqlalchemy.orm import Session

from dray import views
from dray.requests import JobChangeRequest, PositionChange
from dray.views import JobState
from service.config import node_policies
from service.config.settings import Settings
from service.db.models import JobRow
from service.db.notifications import QUEUE
from service.db.repositories.scheduling import queues as queues_repository
from service.db.repositories.submission import dependencies as dependencies_repository
from service.db.session import Database, notify
from service.domain.errors import DomainError, JobFinished, JobNotWaiting
from service.domain.events import ACTOR, ANONYMOUS
from service.domain.scheduling.rules.limits import HELD, held_message
from service.domain.scheduling.rules.queues import Queue
from service.jobs import document_changes, serializers
from service.jobs.document_changes import NewDocument
from service.jobs.service import found
from service.lifecycle import preemption, resizing
from service.lifecycle.preemption import HOLDING
from service.lifecycle.transitions import remark
from service.planning.service import Plans
from service.queues import admission, reservations
from service.queues.admission import Coming

NOTHING: Mapping[str, object] = MappingProxyType({})
NEXT_LOOK = "waits for the scheduler's next round"


class JobChanges:
    """Changes jobs. Each change is one transaction."""

    def __init__(
        self,
        database: Database,
        settings: Settings,
        *,
        clock: Callable[[], datetime] | None = None,
    ) -> None:
        self._database = database
        self._settings = settings
        self._plans = Plans(database, partial(node_policies.data_policy, settings))
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
        RuntimeTooLong and, except for admins, PriorityTooHigh. For a change of the document, also
        raises InvalidDocument and the errors of dependencies.
        """

        def seen(session: Session) -> dict[str, Any]:
            row = found(session, job_id)
            refuse_state(session, row, wanted)
            _refuse_document(row, wanted)
            return document_changes.current(row)

        patch = {} if wanted.document is None else wanted.document.patch
        if patch:
            patch |= wanted.model_dump(include={"queue", "priority"}, exclude_none=True)
        while True:
            new = None
            if patch:
                before = await self._database.read(seen)
                new = await document_changes.merge(self._plans, before, patch)
            work = partial(
                self._changed,
                job_id=job_id,
                wanted=wanted,
                new=new,
                actor=actor,
                is_admin=is_admin,
            )
            changed = await self._database.write(work)
            if changed is not None:
                return changed

    def _changed(
        self,
        session: Session,
        *,
        job_id: str,
        wanted: JobChangeRequest,
        new: NewDocument | None,
        actor: str,
        is_admin: bool,
    ) -> views.Job | None:
        """Change the job. Returns None if its document is no longer the document in `new`."""
        if new is not None and {"after", "name"} & new.patch.keys():
            dependencies_repository.lock_changes(session)
        row = found(session, job_id, lock=True)
        refuse_state(session, row, wanted)
        _refuse_document(row, wanted)
        now = self._clock()
        change = JobChange(session, row, actor, now)
        queue = None
        if new is None:
            queue = check_rules(session, row, wanted, now, is_admin=is_admin)
        elif new.before != document_changes.current(row):
            return None
        else:
            try:
                if row.state in HOLDING:
                    fields = document_changes.limit_running(
                        session, row, new, now, is_admin=is_admin
                    )
                else:
                    fields, queue = document_changes.apply(
                        session, row, new, self._settings, now, is_admin=is_admin
                    )
            except DomainError as error:
                error.pointer = _in_body(error.pointer, wanted)
                raise
            change.document(fields)
            wanted = wanted.model_copy(
                update={"queue": new.spec.queue, "priority": new.spec.priority}
            )
        change.position(wanted, queue)
        return serializers.job(session, row)


def change_row(
    session: Session,
    row: JobRow,
    wanted: PositionChange,
    *,
    actor: str,
    is_admin: bool,
    now: datetime,
    events: list[Mapping[str, Any]],
) -> bool:
    """Change the position of a locked job, and return whether anything was changed. The events of
    the change are added to `events`. Raises the errors of `JobChanges.change`."""
    refuse_state(session, row, wanted)
    queue = check_rules(session, row, wanted, now, is_admin=is_admin)
    change = JobChange(session, row, actor, now, events=events)
    change.position(wanted, queue)
    return change.is_any


def _refuse_document(row: JobRow, wanted: JobChangeRequest) -> None:
    """Refuse a change of the document if it comes too late."""
    if wanted.document is None or row.state is JobState.QUEUED:
        return
    is_limit = wanted.document.patch.keys() == {"max_runtime_s"} and wanted.priority is None
    if row.state not in HOLDING or not is_limit:
        raise _not_waiting(row, "changed")


def _not_waiting(row: JobRow, what: str) -> JobNotWaiting:
    return JobNotWaiting(
        f"the job {row.id} is {row.state}: only a waiting job can be {what}",
        hint=f"`dray preempt {row.id}` makes the job release its slots and wait again",
    )


def refuse_state(session: Session, row: JobRow, wanted: PositionChange) -> None:
    if row.state.is_terminal:
        raise JobFinished(f"the job {row.id} is {row.state}: it has ended")
    if row.state is JobState.CANCELLING:
        raise JobNotWaiting(f"the job {row.id} is being cancelled")
    withdraws = wanted.held is False and preemption.to_be_held(session, row) is not None
    holds = wanted.held is not None and not withdraws
    moves = wanted.queue is not None or wanted.first or holds
    if moves and row.state is not JobState.QUEUED:
        raise _not_waiting(row, "held, released or moved")


def _in_body(pointer: str | None, wanted: JobChangeRequest) -> str | None:
    """Return the pointer into the request's body for a pointer into the job's document."""
    if pointer is None or pointer.startswith("/document"):
        return pointer
    field = pointer.removeprefix("/")
    return pointer if getattr(wanted, field, None) is not None else f"/document{pointer}"


def check_rules(
    session: Session,
    row: JobRow,
    wanted: PositionChange,
    now: datetime,
    *,
    is_admin: bool,
    coming: Coming | None = None,
) -> Queue | None:
    """Refuse a priority or a move that the queue or the job's reservation does not allow. `coming`
    is given if several jobs move together. Returns the queue, if the job is moved or its priority
    is changed."""
    moves = wanted.queue is not None and wanted.queue != row.queue
    if not moves and wanted.priority is None:
        return None
    name = wanted.queue or row.queue
    if moves:
        coming = {row.queue: 1} if coming is None else coming
        queue = admission.admit(session, name, row.owner, resizing.request_of(row), coming)
        own_s = None if row.is_runtime_of_queue else row.max_runtime_s
        admission.limit_in(queue, own_s, row.runtime_used_s, pointer="/queue")
        reservations.refuse_leaving(session, row, name, now)
    else:
        queue = admission.locked(session, name)
    if not is_admin:
        admission.refuse_priority(
            queue, row.priority if wanted.priority is None else wanted.priority
        )
    return queue


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

    def document(self, fields: list[dict[str, Any]]) -> None:
        """Add an event for the changed fields of the document."""
        if not fields:
            return
        message, data = document_changes.sentence(fields), {"changes": fields}
        row = self._row
        if row.state is JobState.QUEUED and row.held_by is None:
            # The reason why the job waited may no longer apply.
            row.position, row.blocked_by = None, []
            row.reason_code, row.reason_message = document_changes.CHANGED, NEXT_LOOK
        self._add_event(document_changes.CHANGED, message, data, type_="changed")

    def position(self, wanted: PositionChange, queue: Queue | None) -> None:
        """Move and hold or release the job, and wake the scheduler if this changes anything.
        `queue` is the queue of the changed job."""
        self.move(wanted, queue)
        self.hold(wanted.held)
        if self.is_any:
            notify(self._session, QUEUE)

    def move(self, wanted: PositionChange, queue: Queue | None) -> None:
        """Move the job, or change its priority."""
        row = self._row
        if queue is not None and queue.name != row.queue:
            data = {"from": row.queue, "to": queue.name}
            row.queue, row.rank = queue.name, 0
            message = f"moved to the queue {row.queue!r}"
            own_s = None if row.is_runtime_of_queue else row.max_runtime_s
            row.max_runtime_s = admission.limit_in(
                queue, own_s, row.runtime_used_s, pointer="/queue"
            )
            row.is_runtime_of_queue = own_s is None and row.max_runtime_s is not None
            if row.is_runtime_of_queue:
                message = f"{message}, whose default for max_runtime_s is {row.max_runtime_s}"
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
        elif held is False and (attempt := preemption.to_be_held(self._session, row)) is not None:
            attempt.hold_asked_by = None
            self._add_event("released", "will not be held once it waits again")
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

    def _add_event(
        self,
        code: str,
        message: str,
        data: Mapping[str, object] = NOTHING,
        *,
        type_: str = "queue",
    ) -> None:
        self.is_any = True
        remark(
            self._session,
            self._row,
            type_=type_,
            code=code,
            message=message,
            now=self._now,
            data={ACTOR: self._actor, **data},
            events=self._events,
        )
