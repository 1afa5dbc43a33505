"""Upkeep: looking at how full the storage is, and deleting what the operator does not want kept."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from datetime import datetime, timedelta

from sqlalchemy.orm import Session

from service.config.settings import Settings
from service.db.repositories import storage as repository
from service.db.session import Database
from service.domain.errors import CheckpointInUse, NotFound
from service.jobs.service import Jobs
from service.storage.quota import StorageWatch

logger = logging.getLogger(__name__)

PERIOD_S = 10.0
RETENTION_PERIOD_S = 60.0
MOST_SHARE = 0.02
"""Of the time, what looking at the storage may take: it adds up rows, and there may be many."""
MOST_BETWEEN_LOOKS_S = 300.0
"""However long one took: it may have been the database that was away."""
DELETION_GRACE = timedelta(minutes=1)
"""A deletion that began before that was cut off: the process that was at it is gone."""
BATCH = 100
"""Jobs deleted by one rule in one round."""


class Retention:
    """A loop beside the scheduler and the reconciler."""

    def __init__(
        self,
        database: Database,
        watch: StorageWatch,
        jobs: Jobs,
        settings: Settings,
        *,
        clock: Callable[[], datetime] | None = None,
    ) -> None:
        self._database = database
        self._watch = watch
        self._jobs = jobs
        self._days = settings.retention_days
        self._count = settings.retention_jobs
        self._clock = clock
        self._retention_at = self._look_at = 0.0

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            try:
                await self.run_once()
            except Exception:
                logger.exception("the upkeep failed a round; it goes on")
            await asyncio.sleep(PERIOD_S)

    async def run_once(self) -> int:
        """One round; answers how many jobs were deleted."""
        deleted = 0
        loop = asyncio.get_running_loop()
        if loop.time() >= self._retention_at:
            await self._jobs.finish_deletions(before=await self._now() - DELETION_GRACE)
            deleted = await self.delete_expired()
            self._retention_at = loop.time() + (0.0 if deleted else RETENTION_PERIOD_S)
        if self._watch.is_limited and loop.time() >= self._look_at:
            began = loop.time()
            try:
                await self._watch.look(await self._now())
            finally:
                took_s = loop.time() - began
                self._look_at = began + min(took_s / MOST_SHARE, MOST_BETWEEN_LOOKS_S)
        return deleted

    async def _now(self) -> datetime:
        return self._clock() if self._clock else await self._database.read(self._database.time)

    async def delete_expired(self) -> int:
        """Delete finished jobs that are too old or too many, up to a batch of each kind.

        Never one from which a live job starts.
        """
        now = await self._now()
        deleted = 0
        if self._days:
            before = now - timedelta(days=self._days)
            old = await self._database.read(lambda s: repository.finished_before(s, before, BATCH))
            deleted += await self._delete(old, f"it ended more than {self._days:g} days ago")
        if self._count:
            keep = self._count
            many = await self._database.read(lambda s: _surplus(s, keep))
            deleted += await self._delete(many, f"its project has {keep} newer finished ones")
        return deleted

    async def _delete(self, found: list[tuple[str, str]], why: str) -> int:
        deleted = 0
        for job_id, project in found:
            # Somebody may have deleted it meanwhile, or begun a job from its checkpoint.
            with contextlib.suppress(NotFound, CheckpointInUse):
                await self._jobs.delete(job_id, actor="the upkeep")
                deleted += 1
                logger.info("deleted the job %s of the project %s: %s", job_id, project, why)
        return deleted


def _surplus(session: Session, keep: int) -> list[tuple[str, str]]:
    return [
        pair
        for project in list(repository.projects(session))
        for pair in repository.finished_beyond(session, project, keep, BATCH)
    ]
