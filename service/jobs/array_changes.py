"""Changes the jobs of an array together: holds, releases, moves or preempts them, or changes their
priority or the number of jobs that run at the same time."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import cache, partial

from sqlalchemy.orm import Session

from dray import views
from dray.requests import ArrayChangeRequest
from service.config.settings import Settings
from service.db.models import JobRow
from service.db.notifications import QUEUE
from service.db.repositories import jobs as jobs_repository
from service.db.repositories.scheduling import queues as queues_repository
from service.db.repositories.submission import arrays as repository
from service.db.session import Database, notify
from service.domain.errors import DomainError, JobFinished, JobNotRunning, JobNotWaiting
from service.domain.events import ANONYMOUS
from service.jobs import arrays
from service.jobs.changes import JobChange, check_rules, refuse_state
from service.jobs.faults import preempt_row
from service.lifecycle import resizing

logger = logging.getLogger(__name__)


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
        """Change all jobs of the array or, if the rules of a queue do not allow it for one of them,
        none. Raises the errors of `JobChanges.change` except those of skipped jobs."""
        now = self._clock()

        def work(session: Session) -> views.ArrayChange:
            before = arrays.view(session, array_id)
            limits = "max_running" in wanted.model_fields_set
            is_limited = limits and wanted.max_running != before.max_running
            rows, skipped = _locked(session, array_id)
            if wanted.changes_jobs:
                rows = _that(partial(refuse_state, wanted=wanted), rows, skipped)
                _check_rules(session, rows, wanted, is_admin=is_admin)
            if is_limited:
                repository.set_max_running(session, array_id, wanted.max_running)
            first = cache(partial(queues_repository.first_rank, session, but=array_id))
            num_changed = 0
            for row in rows:
                change = JobChange(session, row, actor, now, first_rank=first)
                change.move(wanted)
                change.hold(wanted.held)
                if is_limited:
                    change.limit_array(wanted.max_running)
                num_changed += change.is_any
            if num_changed:
                notify(session, QUEUE)
            return _answer(session, array_id, rows, num_changed, skipped)

        changed = await self._database.write(work)
        logger.info("%d jobs of the array %s were changed by %s", changed.changed, array_id, actor)
        return changed

    async def preempt(
        self, array_id: str, grace_s: float | None = None, *, actor: str = ANONYMOUS
    ) -> views.ArrayChange:
        """Ask the array's running jobs to save checkpoints, release their slots and wait again."""
        now = self._clock()
        grace = self._settings.preempt_grace_s if grace_s is None else grace_s

        def work(session: Session) -> views.ArrayChange:
            rows, skipped = _locked(session, array_id)
            asked: list[bool] = []

            def ask(row: JobRow) -> None:
                asked.append(preempt_row(session, row, grace, actor=actor, now=now))

            rows = _that(ask, rows, skipped)
            return _answer(session, array_id, rows, sum(asked), skipped)

        return await self._database.write(work)


def _locked(session: Session, array_id: str) -> tuple[list[JobRow], Counter[str]]:
    """Lock the unfinished jobs of the array, and return them in the order of their indices. Counts
    the other jobs as skipped."""
    counts = arrays.view(session, array_id).counts
    found = jobs_repository.lock_all(session, repository.unfinished(session, array_id))
    rows = [row for row in found.values() if not row.state.is_terminal and row.deleted_at is None]
    num_ended = sum(counts.values()) - len(rows)
    skipped = Counter({JobFinished.code: num_ended} if num_ended else {})
    return sorted(rows, key=lambda row: row.array_index or 0), skipped


def _that(
    apply: Callable[[JobRow], None], rows: Sequence[JobRow], skipped: Counter[str]
) -> list[JobRow]:
    """Return the rows for which `apply` does not raise. Counts the others by their problems."""
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
    session: Session, rows: Sequence[JobRow], wanted: ArrayChangeRequest, *, is_admin: bool
) -> None:
    """Refuse a change that the queues do not allow for one of the jobs. Jobs that differ in nothing
    that the rules depend on are checked together."""
    num_moved = sum(wanted.queue not in (None, row.queue) for row in rows)
    of_each_kind: dict[object, JobRow] = {}
    for row in rows:
        kind = (row.queue, row.owner, row.priority, repr(resizing.request_of(row)))
        of_each_kind.setdefault(kind, row)
    for row in of_each_kind.values():
        try:
            check_rules(session, row, wanted, is_admin=is_admin, num_jobs=num_moved)
        except DomainError as problem:
            named = f"no job was changed: {row.id} (index {row.array_index}): {problem.message}"
            raise type(problem)(named, pointer=problem.pointer, hint=problem.hint) from None


def _answer(
    session: Session,
    array_id: str,
    rows: Sequence[JobRow],
    num_changed: int,
    skipped: Mapping[str, int],
) -> views.ArrayChange:
    session.flush()
    session.expire_all()  # the limit of running jobs was changed without the rows in memory
    return views.ArrayChange(
        array=arrays.view(session, array_id),
        changed=num_changed,
        unchanged=len(rows) - num_changed,
        skipped=dict(skipped),
    )
