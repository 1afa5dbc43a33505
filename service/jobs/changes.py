"""Changes a waiting job: holds or releases it, moves it to another queue or to the front, or
changes its document. Also changes the priority of any job that has not ended."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from datetime import datetime
from types import MappingProxyType
from typing import Any

from sqlalchemy.orm import Session

from dray import views
from dray.requests import JobChangeRequest
from dray.views import JobState
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
from service.queues import admission

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
        self._plans = Plans(database)
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
            _refuse_state(session, row, wanted)
            return document_changes.current(row)

        patch = {} if wanted.document is None else wanted.document.patch
        if patch:
            patch |= wanted.model_dump(include={"queue", "priority"}, exclude_none=True)
        while True:
            new = None
            if patch:
                before = await self._database.read(seen)
                new = await document_changes.merge(self._plans, before, patch)
            work = functools.partial(
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
        """Change the job. Returns None if its document is no longer the one in `new`."""
        if new is not None and "after" in new.patch:
            dependencies_repository.lock_changes(session)
        row = found(session, job_id, lock=True)
        _refuse_state(session, row, wanted)
        now = self._clock()
        change = _JobChange(session, row, actor, now)
        queue = None
        if new is None:
            queue = _check_rules(session, row, wanted, is_admin=is_admin)
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
        change.move(wanted, queue)
        change.hold(wanted.held)
        if change.is_any:
            notify(session, QUEUE)
        return serializers.job(session, row)


def _refuse_state(session: Session, row: JobRow, wanted: JobChangeRequest) -> None:
    if row.state.is_terminal:
        raise JobFinished(f"the job {row.id} is {row.state}: it has ended")
    if row.state is JobState.CANCELLING:
        raise JobNotWaiting(f"the job {row.id} is being cancelled")
    withdraws = wanted.held is False and preemption.to_be_held(session, row) is not None
    holds = wanted.held is not None and not withdraws
    moves = wanted.queue is not None or wanted.first or holds
    if row.state in HOLDING and not moves and _is_limit(wanted):
        return
    if (moves or wanted.document is not None) and row.state is not JobState.QUEUED:
        what = "held, released or moved" if moves else "changed"
        raise JobNotWaiting(
            f"the job {row.id} is {row.state}: only a waiting job can be {what}",
            hint=f"`dray preempt {row.id}` makes the job release its slots and wait again",
        )


def _is_limit(wanted: JobChangeRequest) -> bool:
    """Whether `max_runtime_s` is the only field of the document to change."""
    if wanted.document is None or wanted.priority is not None:
        return False
    return wanted.document.patch.keys() == {"max_runtime_s"}


def _in_body(pointer: str | None, wanted: JobChangeRequest) -> str | None:
    """Return the pointer into the request's body for a pointer into the job's document."""
    if pointer is None or pointer.startswith("/document"):
        return pointer
    field = pointer.removeprefix("/")
    return pointer if getattr(wanted, field, None) is not None else f"/document{pointer}"


def _check_rules(
    session: Session, row: JobRow, wanted: JobChangeRequest, *, is_admin: bool
) -> Queue | None:
    """Refuse a priority or a move that the queue does not allow. Returns the queue, if the job is
    moved or its priority is changed."""
    moves = wanted.queue is not None and wanted.queue != row.queue
    if not moves and wanted.priority is None:
        return None
    name = wanted.queue or row.queue
    if moves:
        queue = admission.admit(session, name, row.owner, resizing.request_of(row))
    else:
        queue = admission.locked(session, name)
    if not is_admin:
        admission.refuse_priority(
            queue, row.priority if wanted.priority is None else wanted.priority
        )
    return queue


class _JobChange:
    """Applies the changes to one locked job."""

    def __init__(self, session: Session, row: JobRow, actor: str, now: datetime) -> None:
        self._session = session
        self._row = row
        self._actor = actor
        self._now = now
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

    def move(self, wanted: JobChangeRequest, queue: Queue | None) -> None:
        """`queue` is the queue of the changed job."""
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
        first = queues_repository.first_rank(self._session, row.queue, row.priority, but=row.id)
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
        )
