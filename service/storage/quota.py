"""Measures storage use, and refuses jobs when the storage is full."""

from __future__ import annotations

import logging
import shutil
from datetime import datetime
from pathlib import Path

from sqlalchemy.orm import Session

from ray_workers.shared.folders.disk_space import why_full
from service.config.settings import Settings
from service.db.models import StorageStateRow
from service.db.notifications import QUEUE
from service.db.repositories import storage as repository
from service.db.repositories import surroundings
from service.db.session import Database, notify, touch
from service.domain.errors import QuotaExceeded
from service.storage.storage import Storage, in_storage_thread

logger = logging.getLogger(__name__)
HINT = (
    "delete finished jobs (`dray delete`), or ask the operator for more space "
    "(DRAY_STORAGE_QUOTA_BYTES, DRAY_MIN_FREE_BYTES)"
)


class StorageWatch:
    """Measure how full the storage is, and store the result in SQL for all processes."""

    def __init__(self, database: Database, storage: Storage, settings: Settings) -> None:
        self._database = database
        self._quota = settings.storage_quota_bytes
        self._min_free = settings.min_free_bytes
        self._folders = [path for path in (storage.folder, _folder_of(database)) if path]

    @property
    def is_limited(self) -> bool:
        """Whether the operator has set a limit."""
        return self._quota is not None or self._min_free is not None

    async def look(self, now: datetime) -> str | None:
        """Measure and store how full the storage is, and wake the scheduler if the problem changed.
        Return the reason why no job is accepted, or None."""
        free = None if self._min_free is None else await in_storage_thread(self._free_bytes)
        used = None
        if self._quota is not None:
            used = await self._database.read(repository.used_bytes)
        problem = why_no_space(used=used, free=free, quota=self._quota, min_free=self._min_free)

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
            logger.warning("no job is accepted or started: %s", problem)
        elif changed:
            logger.info("the storage has free space again: jobs are accepted and started")
        return problem

    async def full_folders(self) -> str | None:
        """Describe the service's folders that can't store a file, regardless of limits. Return None
        if every folder can."""
        found = [await in_storage_thread(why_full, folder) for folder in self._folders]
        return "; ".join(why for why in found if why) or None

    def _free_bytes(self) -> int | None:
        return min((shutil.disk_usage(folder).free for folder in self._folders), default=None)


def refuse_if_full(session: Session) -> None:
    """Raise QuotaExceeded if the storage was full at the last measurement."""
    problem = surroundings.seen(session).storage_problem
    if problem is not None:
        raise QuotaExceeded(f"no jobs are accepted at the moment: {problem}", hint=HINT)


def _folder_of(database: Database) -> Path | None:
    """Return the folder of a SQLite database, because the database needs disk space too."""
    if not database.is_sqlite or database.url.database is None:
        return None
    return Path(database.url.database).absolute().parent


def why_no_space(
    *, used: int | None, free: int | None, quota: int | None, min_free: int | None
) -> str | None:
    """Return the reason why no job should be accepted or started; None while there is space. Sizes
    are in bytes.

    A limit is ignored if the size is unknown (None). The limits don't affect running jobs.
    """
    if quota is not None and used is not None and used >= quota:
        return f"the storage holds {size(used)}, and its quota is {size(quota)}"
    if min_free is not None and free is not None and free < min_free:
        return f"the disk has {size(free)} of free space, but {size(min_free)} must stay free"
    return None


def size(amount: int) -> str:
    value = float(amount)
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.4g} {unit}"
        value /= 1024
    return f"{value:.4g} TiB"
