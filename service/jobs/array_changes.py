"""Changes the jobs of an array together: holds, releases, moves or preempts them, or changes their
priority or the number of jobs that run at the same time."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import cache, partial
from typing import Any, TypeVar

from sqlalchemy.orm import Session

from dray import views
from dray.requests import ArrayChangeRequest
from service.config.settings import Settings
from service.db.models import JobRow
from service.db.notifications import QUEUE, events_of
from service.db.repositories import events as events_repository
from service.db.repositories import jobs as jobs_repository
from service.db.repositories.scheduling import queues as queues_repository
from service.db.repositories.submission import arrays as repository
from service.db.session import Database, notify
from service.domain.errors import DomainError, JobFinished, JobNotRunning, JobNotWaiting
from service.domain.events import ANONYMOUS
from service.domain.scheduling.rules.queues import Queue
from service.jobs import arrays
from service.jobs.changes import JobChange, check_rules, refuse_state
from service.jobs.faults import preempt_row
from service.lifecycle import resizing
from service.lifecycle.preemption import HOLDING

logger = logging.getLogger(__name__)

R = TypeVar("R")


class ArrayChanges:
    """Changes arrays. Each change is one transaction, and raises ArrayNotFound if the array does
    not exist. Jobs to which the change does not apply are skipped: jobs that have ended, running
    jobs that would be held or moved, and waiting jobs that would be preempted."""

    def __init__(
        self,
        database: Database,
        settings: Settings,
        *,
        clock: Callable[[], datetime] | None = None,
    ) -> None:
        self._database = database
        self._settings = settings
        self._clock = clock or database.clock

    async def change(
        self,
        array_id: str,
        wanted: ArrayChangeRequest,
        *,
        actor: str = ANONYMOUS,
        is_admin: bool = False,
    ) -> views.ArrayChange:
        """Change all jobs of the array, or none of them if the rules of a queue do not allow the
        change for one of them. Raises the errors of `JobChanges.change`, except for skipped
        jobs."""
        now = self._clock()

        def work(session: Session) -> views.ArrayChange:
            array = arrays.view(session, array_id)
            limits = "max_running" in wanted.model_fields_set
            is_limited = limits and wanted.max_running != array.max_running
            rows: list[Any] = list(repository.lock_unfinished(session, array_id))
            skipped = Counter({JobFinished.code: sum(array.counts.values()) - len(rows)})
            rows.sort(key=lambda row: row.array_index)
            queue = None
            if wanted.changes_jobs:
                rows = _that(partial(refuse_state, session, wanted=wanted), rows, skipped)
                queue = _check_rules(session, rows, wanted, now, is_admin=is_admin)
            if is_limited:
                repository.set_max_running(session, array_id, wanted.max_running)
            first = cache(partial(queues_repository.first_rank, session, but=array_id))
            events: list[Mapping[str, Any]] = []
            changed = []
            for row in rows:
                change = JobChange(session, row, actor, now, first_rank=first, events=events)
                change.move(wanted, queue)
                change.hold(wanted.held)
                if is_limited:
                    change.limit_array(wanted.max_running)
                if change.is_any:
                    changed.append(row)
            repository.store_changes(session, changed)
            events_repository.add_events(session, events)
            if changed:
                notify(session, QUEUE, events_of(array_id))
            return _answer(session, array_id, len(rows), len(changed), skipped)

        changed = await self._database.write(work)
        logger.info("%d jobs of the array %s were changed by %s", changed.changed, array_id, actor)
        return changed

    async def preempt(
        self,
        array_id: str,
        grace_s: float | None = None,
        *,
        held: bool = False,
        actor: str = ANONYMOUS,
    ) -> views.ArrayChange:
        """Ask the array's running jobs to save checkpoints, release their slots and wait again, on
        hold if `held` is set."""
        now = self._clock()
        grace = self._settings.preempt_grace_s if grace_s is None else grace_s

        def work(session: Session) -> views.ArrayChange:
            array = arrays.view(session, array_id)
            ids = repository.in_states(session, array_id, HOLDING)
            rows = jobs_repository.lock_all(session, ids)
            asked: list[bool] = []

            def ask(row: JobRow) -> None:
                asked.append(preempt_row(session, row, grace, held=held, actor=actor, now=now))

            by_index = sorted(rows.values(), key=lambda row: row.array_index or 0)
            holding = _that(ask, by_index, Counter())
            num_ended = sum(n for state, n in array.counts.items() if state.is_terminal)
            num_waiting = sum(array.counts.values()) - num_ended - len(holding)
            skipped = Counter({JobFinished.code: num_ended, JobNotRunning.code: num_waiting})
            return _answer(session, array_id, len(holding), sum(asked), skipped)

        return await self._database.write(work)


def _that(apply: Callable[[Any], object], rows: Sequence[R], skipped: Counter[str]) -> list[R]:
    """Return the rows for which `apply` does not raise. Counts the other rows by the problem that
    `apply` raises."""
    kept = []
    for row in rows:
        try:
            apply(row)
        except (JobFinished, JobNotWaiting, JobNotRunning) as problem:
            skipped[problem.code] += 1
        else:
            kept.append(row)
    return kept


def _check_rules(
    session: Session,
    rows: Sequence[Any],
    wanted: ArrayChangeRequest,
    now: datetime,
    *,
    is_admin: bool,
) -> Queue | None:
    """Refuse a change that the queues do not allow for one of the jobs. Jobs that are equal in
    everything on which the rules depend are checked together. Returns the queue to which jobs are
    moved."""
    queue = None
    coming: Counter[str | None] = Counter(
        row.queue for row in rows if wanted.queue not in (None, row.queue)
    )
    of_each_kind: dict[object, Any] = {}
    for row in rows:
        runtime = row.max_runtime_s, row.is_runtime_of_queue, row.runtime_used_s
        request = repr(resizing.request_of(row))
        kind = row.queue, row.owner, row.priority, row.reservation, runtime, request
        of_each_kind.setdefault(kind, row)
    for row in of_each_kind.values():
        try:
            found = check_rules(session, row, wanted, now, is_admin=is_admin, coming=coming)
            if found is not None and wanted.queue not in (None, row.queue):
                coming.clear()  # the queue has admitted all of the jobs
            queue = found if wanted.queue is not None and found is not None else queue
        except DomainError as problem:
            named = f"no job was changed: {row.id} (index {row.array_index}): {problem.message}"
            raise type(problem)(named, pointer=problem.pointer, hint=problem.hint) from None
    return queue


def _answer(
    session: Session, array_id: str, num_jobs: int, num_changed: int, skipped: Counter[str]
) -> views.ArrayChange:
    session.flush()
    session.expire_all()  # rows in memory lack the changes
    return views.ArrayChange(
        array=arrays.view(session, array_id),
        changed=num_changed,
        unchanged=num_jobs - num_changed,
        skipped=dict(+skipped),
    )
