"""The loop that submits the jobs of schedules at their times.

The loop sleeps until the earliest next time of all schedules. In each round, the loop looks at a
limited number of schedules, and at one schedule of each owner before it looks at a second schedule
of any owner. A job is stored in the transaction that advances its schedule, so that each time gets
one job even if the service stops between two transactions.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Container, Iterable
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import Row
from sqlalchemy.orm import Session

from dray.views import RunOutcome
from service.config.settings import Settings
from service.config.tokens_file import TokensFile
from service.db.notifications import SCHEDULES, Signals
from service.db.repositories.bulk import CHUNK, in_chunks
from service.db.repositories.submission import schedules as repository
from service.db.session import touch
from service.domain.errors import DatabaseUnavailable, DomainError, OwnerUnknown, StorageUnavailable
from service.domain.events import ANONYMOUS
from service.domain.ids import new_job_id
from service.jobs.service import Jobs, NewJob
from service.loops.shared.fencing import LoopDatabase
from service.loops.shared.timings import LoopTimings, rest_after
from service.schedules import runs
from service.schedules.runs import Due
from service.schedules.service import PROJECT, read

logger = logging.getLogger(__name__)

BATCH = 256
"""Maximum number of schedules that one round looks at."""
MAX_AT_ONCE = 8
"""Maximum number of runs that are submitted concurrently."""


class RunFailed(DomainError, code="internal_error"):
    """A bug in dray prevented the submission of a run."""


class ScheduleRunner:
    """Wakes up when a time has come, and when a schedule was created or changed."""

    def __init__(
        self,
        database: LoopDatabase,
        signals: Signals,
        jobs: Jobs,
        settings: Settings,
        timings: LoopTimings,
    ) -> None:
        self._database = database
        self._signals = signals
        self._jobs = jobs
        tokens_file = settings.tokens_file
        self._tokens = None if tokens_file is None else TokensFile(tokens_file)
        self._timings = timings

    async def run(self) -> None:
        """Run until cancelled."""
        is_refreshed = False
        with self._signals.subscribe(SCHEDULES) as woken:
            while True:
                began = asyncio.get_running_loop().time()
                wait_s = self._timings.schedule_period_s
                try:
                    if not is_refreshed:
                        await self.refresh()
                        is_refreshed = True
                    wait_s = min(wait_s, await self.run_once())
                except Exception:
                    logger.exception("a round of the schedules failed; the loop continues")
                await rest_after(began)
                await woken.wait(wait_s)

    async def refresh(self) -> None:
        """Compute the next times of all schedules again. The data of time zones, which a process
        loads only once, can have changed since the next times were computed."""
        after = ""
        while True:
            found = await self._database.read(
                lambda s, now: repository.active(s, after, CHUNK)  # noqa: B023
            )
            moved = await asyncio.to_thread(_moved, found)
            if moved:
                await self._database.write(lambda s, now: _move(s, moved))  # noqa: B023
            if len(found) < CHUNK:
                return
            after = found[-1].id

    async def run_once(self) -> float:
        """Look at schedules whose next time has come. Returns the seconds until the next time."""
        owners: Container[str] | None = None
        if self._tokens is not None:
            try:
                owners = self._tokens.tokens()
            except OSError as error:
                logger.error("no run is submitted: DRAY_TOKENS_FILE can't be read: %s", error)
                return self._timings.schedule_period_s
        found, first, now = await self._database.read(
            lambda s, now: (repository.due(s, now, BATCH), repository.first_due(s), now)
        )
        for some in in_chunks(found, MAX_AT_ONCE):
            await asyncio.gather(*(self._look(schedule_id, owners) for schedule_id in some))
        if found:
            return 0.0
        return self._timings.schedule_period_s if first is None else (first - now).total_seconds()

    async def _look(self, schedule_id: str, owners: Container[str] | None) -> None:
        """Decide about the first due time of a schedule. An error in one schedule does not affect
        the others."""

        def look(session: Session, now: datetime) -> Due | None:
            touch(session)
            return runs.look(session, schedule_id, now)

        due = await self._database.write(look)
        if due is None:
            return
        try:
            if owners is not None and due.owner not in owners:
                raise OwnerUnknown(due.owner)
            await self._submit(due)
        except DatabaseUnavailable:
            raise
        except StorageUnavailable as error:
            logger.warning("retrying a run of the schedule %s: %s", schedule_id, error)
            await self._database.write(lambda s, now: self._try_again(s, due, now))
        except DomainError as error:
            await self._refuse(due, error)
        except Exception:
            logger.exception("the schedule %s could not submit a run", schedule_id)
            problem = "the service failed to submit this run: see the error in the server's log"
            await self._refuse(due, RunFailed(problem))

    async def _submit(self, due: Due) -> None:
        prepared = await self._jobs.prepare(await read(due.document), due.owner)

        def work(session: Session, now: datetime) -> None:
            touch(session)
            row = runs.still(session, due)
            if row is None:
                return
            actor = ANONYMOUS if self._tokens is None else due.owner
            new = NewJob(new_job_id(now), prepared, due.owner, PROJECT, actor, now)
            runs.submit(session, self._jobs, row, new, due.at)
            runs.advance(row, due.at)

        await self._database.write(work)

    async def _refuse(self, due: Due, problem: DomainError) -> None:
        def work(session: Session, now: datetime) -> None:
            touch(session)
            row = runs.still(session, due)
            if row is not None:
                runs.record(session, row, due.at, now, RunOutcome.REFUSED, problem=problem)
                runs.advance(row, due.at)

        await self._database.write(work)

    def _try_again(self, session: Session, due: Due, now: datetime) -> None:
        touch(session)
        row = runs.still(session, due)
        if row is not None:
            row.next_at = now + timedelta(seconds=self._timings.schedule_retry_s)


def _moved(rows: Iterable[Row[Any]]) -> list[tuple[str, datetime, datetime]]:
    """Return (id, next time, correct next time) of the schedules whose next time has changed."""
    moved = []
    for row in rows:
        try:
            next_at = runs.cron_of(row.cron, row.time_zone).next_after(row.decided_until)
        except ValueError:
            next_at = row.decided_until  # the next round pauses the schedule
        if next_at is not None and next_at != row.next_at:
            moved.append((row.id, row.next_at, next_at))
    return moved


def _move(session: Session, moved: list[tuple[str, datetime, datetime]]) -> None:
    touch(session)
    for schedule_id, seen, at in moved:
        repository.wake_at(session, schedule_id, seen, at)
