"""Applies an action to all jobs that a filter selects.

Jobs are changed by the function that changes a single job, `TOGETHER` jobs in one transaction, so
that other writes, such as the scheduler's, don't wait for all jobs. The events of the changes, and
their effects on other jobs, are stored with a few statements per transaction. A dry run does the
same, and rolls each transaction back.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, Protocol

from sqlalchemy.orm import Session

from dray import views
from dray.bulk_requests import BulkAction, BulkRequest
from dray.filters import JobFilter
from dray.requests import AnnotationRequest
from service.config.settings import Settings
from service.db.models import JobRow
from service.db.repositories import events as events_repository
from service.db.repositories import jobs as jobs_repository
from service.db.repositories.bulk import in_chunks
from service.db.repositories.catalog import listing as listing_repository
from service.db.session import Database
from service.domain.errors import DomainError, NotConfirmed, Unavailable
from service.domain.events import ANONYMOUS
from service.jobs import deletions, listing
from service.jobs.changes import change_row
from service.jobs.deletions import not_found
from service.jobs.faults import preempt_row
from service.jobs.service import Jobs, cancel_row
from service.lifecycle.transitions import Ends

logger = logging.getLogger(__name__)

MAX_JOBS = 100_000
"""Maximum number of jobs that a filter can select."""
NUM_COMPARED = 1000
"""Number of the newest jobs of which a filter must exclude at least one, unless the number of
selected jobs is confirmed."""
MAX_NAMED = 20
"""Maximum number of ids in each list of a result."""
TOGETHER = 50
"""Number of jobs in each transaction. Other writes wait for the transaction."""


class _Together:
    """The events of the changes in one transaction, and the jobs that these changes end."""

    def __init__(self) -> None:
        self.events: list[Mapping[str, Any]] = []
        self.ends = Ends()

    def store(self, session: Session, now: datetime) -> None:
        events_repository.add_events(session, self.events)
        self.ends.settle(session, now)


RowChange = Callable[[Session, JobRow, datetime, _Together], bool]
"""Changes a locked job, and returns whether anything differs. Errors are raised before anything is
changed."""


class Annotate(Protocol):
    """Changes the tags of a locked job, and returns whether anything was changed."""

    def __call__(
        self,
        session: Session,
        row: JobRow,
        wanted: AnnotationRequest,
        *,
        actor: str,
        now: datetime,
    ) -> bool: ...


class _OnlyTried(Exception):
    """Rolls back the transaction of a dry run."""

    def __init__(self, results: list[bool | BaseException]) -> None:
        super().__init__("a dry run stores nothing")
        self.results = results


class BulkChanges:
    """Actions on many jobs."""

    def __init__(
        self,
        database: Database,
        jobs: Jobs,
        settings: Settings,
        annotate: Annotate,
        *,
        clock: Callable[[], datetime] | None = None,
    ) -> None:
        self._database = database
        self._jobs = jobs
        self._settings = settings
        self._annotate = annotate
        self._clock = clock or database.clock

    async def run(
        self,
        wanted: BulkRequest,
        *,
        caller: str,
        actor: str = ANONYMOUS,
        is_admin: bool = False,
        is_stopping: Callable[[], bool] = lambda: False,
    ) -> views.BulkChange:
        """Apply the action on behalf of `actor` to the selected jobs of `caller` or, if the filter
        names an owner, of this owner.

        Raises InvalidSearch, and raises NotConfirmed if more jobs are selected than `wanted.max`,
        or if the filter matches all jobs and `wanted.max` is not given. Jobs that can't be changed
        don't stop the action. If `is_stopping` returns true, the remaining jobs are not changed.
        """
        matched, queues = await self._database.read(
            lambda session: (
                _confirmed(session, wanted, caller),
                listing_repository.queues_of(session, wanted.filter),
            )
        )
        whose = wanted.filter.owner or caller
        own = [job_id for job_id, owner in matched.items() if owner == whose]
        if not wanted.dry_run:
            _refuse_more(len(own), wanted.max)
        outcome = _Outcome()
        for some in in_chunks(own, TOGETHER):
            if is_stopping():
                problem = Unavailable("the server was stopped before it reached the job")
                outcome.add(some, [problem] * len(some))
                continue
            if wanted.action is BulkAction.DELETE:
                done = await self._deleted(some, actor, dry_run=wanted.dry_run)
            else:
                of_row = self._of_row(wanted, queues, actor, is_admin)
                done = await self._changed(some, wanted, of_row)
            outcome.add(some, done)
        if not wanted.dry_run:
            logger.info("%d jobs: %s by %s", outcome.num_changed, wanted.action, actor)
        return outcome.view(wanted, num_matched=len(matched), num_own=len(own))

    async def _deleted(
        self, some: Sequence[str], actor: str, *, dry_run: bool
    ) -> list[bool | BaseException]:
        """Delete each of these jobs. Return True, or the error."""

        def refused(session: Session) -> dict[str, DomainError]:
            return deletions.refusals(session, some, jobs_repository.several(session, some))

        if dry_run:
            problems = await self._database.read(refused)
        else:
            problems = await self._jobs.delete_all(some, actor=actor)
        return [problems.get(job_id, True) for job_id in some]

    async def _changed(
        self, some: Sequence[str], wanted: BulkRequest, of_row: RowChange
    ) -> list[bool | BaseException]:
        """Change each of these jobs in one transaction, which a dry run rolls back. Return, for
        each job, whether it was changed, or the error."""

        def attempt(
            session: Session, job_id: str, row: JobRow | None, together: _Together
        ) -> bool | BaseException:
            if row is None or row.deleted_at is not None:
                return not_found(job_id)
            try:
                return of_row(session, row, self._clock(), together)
            except DomainError as error:
                return error

        def work(session: Session) -> list[bool | BaseException]:
            rows = jobs_repository.lock_all(session, some)
            together = _Together()
            results = [attempt(session, job_id, rows.get(job_id), together) for job_id in some]
            if wanted.dry_run:
                raise _OnlyTried(results)
            together.store(session, self._clock())
            return results

        try:
            return await self._database.write(work)
        except _OnlyTried as tried:
            return tried.results
        except DomainError as error:
            return [error] * len(some)

    def _of_row(
        self, wanted: BulkRequest, queues: Sequence[str], actor: str, is_admin: bool
    ) -> RowChange:
        """Return the function that applies the action to a job, unless the job has left the states
        or the queues of the filter."""
        states = wanted.filter.state
        apply = self._action(wanted, actor, is_admin)

        def of_row(session: Session, row: JobRow, now: datetime, together: _Together) -> bool:
            is_still = (not states or row.state in states) and (not queues or row.queue in queues)
            return is_still and apply(session, row, now, together)

        return of_row

    def _action(self, wanted: BulkRequest, actor: str, is_admin: bool) -> RowChange:
        given = wanted.parameters
        change = wanted.job_change
        if change is not None:
            return lambda session, row, now, together: change_row(
                *(session, row, change),
                actor=actor,
                is_admin=is_admin,
                now=now,
                events=together.events,
            )
        if wanted.action is BulkAction.CANCEL:
            return lambda session, row, now, together: cancel_row(
                session, row, actor=actor, now=now, ends=together.ends
            )
        if wanted.action is BulkAction.PREEMPT:
            grace_s = self._settings.preempt_grace_s if given.grace_s is None else given.grace_s
            return lambda session, row, now, _: preempt_row(
                session, row, grace_s, held=bool(given.held), actor=actor, now=now
            )
        assert wanted.action is BulkAction.TAG
        tags = AnnotationRequest(add_tags=given.add_tags, remove_tags=given.remove_tags)
        return lambda session, row, now, _: self._annotate(session, row, tags, actor=actor, now=now)


def _confirmed(session: Session, wanted: BulkRequest, caller: str) -> dict[str, str]:
    """Return the owners of the selected jobs by id. Raises NotConfirmed if the filter matches all
    jobs, unless the number of jobs was confirmed."""
    matched = listing.owners(session, wanted.filter, limit=MAX_JOBS + 1)
    if len(matched) > MAX_JOBS:
        raise NotConfirmed(
            f"more than {MAX_JOBS:,} jobs match",
            pointer="/filter",
            hint="narrow the filter, and repeat the request for each part",
        )
    whose = wanted.filter.owner or caller
    own = sum(owner == whose for owner in matched.values())
    if wanted.max is None and not wanted.dry_run and own > 1 and _excludes_none(session, wanted):
        raise NotConfirmed(
            f"the filter matches all jobs, so the number of jobs to change, {own:,}, must be "
            "confirmed",
            pointer="/max",
            hint=f"if you want to change all of these jobs, repeat the request with max: {own}",
        )
    return matched


def _excludes_none(session: Session, wanted: BulkRequest) -> bool:
    """Whether the filter, apart from its states and owner, matches each of the newest jobs."""
    every = listing.owners(session, JobFilter(), limit=NUM_COMPARED)
    criteria = wanted.filter.model_copy(update={"state": (), "owner": None})
    return every == listing.owners(session, criteria, limit=NUM_COMPARED)


def _refuse_more(number: int, most: int | None) -> None:
    if most is not None and number > most:
        raise NotConfirmed(
            f"{number:,} jobs match, but at most {most:,} were expected",
            pointer="/max",
            hint="check the filter with a dry run",
        )


class _Outcome:
    """Counts the jobs by the result of the action."""

    def __init__(self) -> None:
        self._changed: list[str] = []
        self._problems: dict[str, tuple[str, list[str]]] = {}
        """The message of the first job, and the ids of all jobs, by the code of the problem."""

    @property
    def num_changed(self) -> int:
        return len(self._changed)

    def add(self, job_ids: Sequence[str], done: Sequence[bool | BaseException]) -> None:
        """Record whether each of these jobs was changed, or the problem that prevented the
        change."""
        for job_id, result in zip(job_ids, done, strict=True):
            if isinstance(result, DomainError):
                _, of_code = self._problems.setdefault(result.code, (result.message, []))
                of_code.append(job_id)
            elif isinstance(result, BaseException):
                raise result
            elif result:
                self._changed.append(job_id)

    def view(self, wanted: BulkRequest, *, num_matched: int, num_own: int) -> views.BulkChange:
        problems = [
            views.BulkProblem(
                code=code, count=len(job_ids), message=message, jobs=job_ids[:MAX_NAMED]
            )
            for code, (message, job_ids) in sorted(self._problems.items())
        ]
        refused = sum(problem.count for problem in problems)
        return views.BulkChange(
            dry_run=wanted.dry_run,
            matched=num_matched,
            other_owners=num_matched - num_own,
            changed=self.num_changed,
            unchanged=num_own - self.num_changed - refused,
            refused=refused,
            problems=problems,
            jobs=self._changed[:MAX_NAMED],
        )
