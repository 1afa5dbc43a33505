"""Upkeep: how full the storage is, and deleting what the operator does not want kept."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from sqlalchemy.orm import Session

from service.db.models import StorageStateRow
from service.db.repositories import storage as repository
from service.db.session import Database, notify, touch
from service.domain import capacity
from service.domain.errors import CheckpointInUse, NotFound, QuotaExceeded
from service.settings import Settings
from service.signals import QUEUE
from service.storage import Storage

if TYPE_CHECKING:
    from service.jobs import Jobs

logger = logging.getLogger(__name__)

PERIOD_S = 10.0
RETENTION_PERIOD_S = 60.0
MOST_SHARE = 0.02
"""Of the time, what looking at the storage may take: it adds up rows, and there may be many."""
BATCH = 100
"""Jobs deleted by one rule in one round."""


class StorageWatch:
    """Looks at how full the storage is and keeps it in SQL, for every process to read."""

    def __init__(self, database: Database, storage: Storage, settings: Settings) -> None:
        self._database = database
        self._quota = settings.storage_quota_bytes
        self._min_free = settings.min_free_bytes
        self._folders = [path for path in (storage.folder, _folder_of(database)) if path]

    @property
    def is_limited(self) -> bool:
        """Whether the operator set any limit."""
        return self._quota is not None or self._min_free is not None

    async def look(self, now: datetime) -> str | None:
        """Store how full it is, waking the scheduler if that changes what may start.

        Answers why no job is taken, or None.
        """
        free = None if self._min_free is None else await asyncio.to_thread(self._free_bytes)
        used = None
        if self._quota is not None:
            used = await self._database.read(repository.used_bytes)
        problem = capacity.problem(used=used, free=free, quota=self._quota, min_free=self._min_free)

        def work(session: Session) -> bool:
            touch(session)
            before = repository.state(session)
            changed = (before.problem if before else None) != problem
            row = StorageStateRow(
                id=repository.THE_STORAGE,
                used_bytes=used,
                free_bytes=free,
                problem=problem,
                updated_at=now,
            )
            repository.put_state(session, row)
            if changed:
                notify(session, QUEUE)
            return changed

        changed = await self._database.write(work)
        if changed and problem is not None:
            logger.warning("no job is taken or started: %s", problem)
        elif changed:
            logger.info("the storage has room again: jobs are taken and started")
        return problem

    def _free_bytes(self) -> int | None:
        return min((shutil.disk_usage(folder).free for folder in self._folders), default=None)


def refuse_if_full(session: Session) -> None:
    """QuotaExceeded while the storage, as it was last seen, is full."""
    state = repository.state(session)
    if state is not None and state.problem is not None:
        raise QuotaExceeded(f"no job is taken now: {state.problem}", hint=capacity.HINT)


class Upkeep:
    """A loop beside the scheduler and the reconciler."""

    def __init__(
        self,
        database: Database,
        watch: StorageWatch,
        jobs: Jobs,
        settings: Settings,
        *,
        clock: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._database = database
        self._watch = watch
        self._jobs = jobs
        self._days = settings.retention_days
        self._count = settings.retention_jobs
        self._clock = clock
        self._retention_at = 0.0

    async def run(self) -> None:
        """Until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            began = loop.time()
            try:
                await self.run_once()
            except Exception:
                logger.exception("the upkeep failed a round; it goes on")
            await asyncio.sleep(max(PERIOD_S, (loop.time() - began) / MOST_SHARE))

    async def run_once(self) -> int:
        """One round; answers how many jobs were deleted."""
        deleted = 0
        loop = asyncio.get_running_loop()
        if loop.time() >= self._retention_at:
            deleted = await self.delete_expired()
            self._retention_at = loop.time() + (0.0 if deleted else RETENTION_PERIOD_S)
        if self._watch.is_limited:
            await self._watch.look(self._clock())
        return deleted

    async def delete_expired(self) -> int:
        """Delete finished jobs that are too old or too many, up to a batch of each kind.

        Never one from which a live job starts.
        """
        now = self._clock()
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
                await self._jobs.delete(job_id)
                deleted += 1
                logger.info("deleted the job %s of the project %s: %s", job_id, project, why)
        return deleted


def _surplus(session: Session, keep: int) -> list[tuple[str, str]]:
    return [
        pair
        for project in list(repository.projects(session))
        for pair in repository.finished_beyond(session, project, keep, BATCH)
    ]


def _folder_of(database: Database) -> Path | None:
    """Where a SQLite database lies, which needs room as the storage does."""
    if not database.is_sqlite or database.url.database is None:
        return None
    return Path(database.url.database).absolute().parent
