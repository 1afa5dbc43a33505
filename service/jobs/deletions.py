"""Deletes finished jobs with their files.

A deletion takes three idempotent steps: hide the jobs, delete their files, delete their rows. If
the service dies between two steps, `finish` completes the deletion.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import partial

from sqlalchemy.orm import Session

from service.checkpoints import init_from, registered
from service.db.models import JobRow
from service.db.repositories import jobs as repository
from service.db.repositories.bulk import CHUNK, in_chunks
from service.db.repositories.catalog import registry as registry_repository
from service.db.repositories.submission import arrays as arrays_repository
from service.db.session import Database
from service.db.types import storable
from service.domain.errors import (
    CheckpointInUse,
    DomainError,
    JobLive,
    NotFound,
    StorageUnavailable,
)
from service.storage.storage import Storage, in_storage_thread

logger = logging.getLogger(__name__)

AT_ONCE = 4
"""Number of threads that delete the files of several jobs."""


class Deletions:
    def __init__(self, database: Database, storage: Storage) -> None:
        self._database = database
        self._storage = storage

    async def delete(self, job_ids: Sequence[str], *, actor: str) -> dict[str, DomainError]:
        """Delete finished jobs and all their files on behalf of `actor`, whose name is logged.
        Return the errors of the jobs that are not deleted, and of the jobs whose files are not
        deleted yet."""
        hidden: set[str] = set()

        def hide(session: Session) -> dict[str, DomainError]:
            rows = repository.lock_all(session, [each for each in job_ids if storable(each)])
            # If an earlier try committed, but its answer was lost, its jobs are already hidden.
            new = [job_id for job_id in job_ids if job_id not in hidden or _exists(rows, job_id)]
            refused = refusals(session, new, rows)
            # Use the database's clock, because another process may have to finish the deletion.
            now = self._database.time(session)
            for job_id in new:
                if job_id not in refused:
                    hidden.add(job_id)
                    _hide(session, rows[job_id], now)
            return refused

        problems = await self._database.write(hide)
        for job_id in sorted(hidden):
            logger.info("the job %s was deleted by %s", job_id, actor)
        for job_id, error in (await self.erase(sorted(hidden))).items():
            problems[job_id] = files_remain(f"the job {job_id} is deleted, but its files", error)
        return problems

    async def erase(self, job_ids: Sequence[str]) -> dict[str, StorageUnavailable]:
        """Delete the files of hidden jobs, and the rows of the jobs whose files were deleted.
        Return the errors of the other jobs."""
        failed: dict[str, StorageUnavailable] = {}

        def delete_files(some: Sequence[str]) -> None:
            for job_id in some:
                try:
                    self._storage.delete_tree(f"jobs/{job_id}")
                except StorageUnavailable as error:
                    failed[job_id] = error
                except OSError as error:
                    failed[job_id] = StorageUnavailable(f"the storage failed: {error}")

        for some in in_chunks(job_ids, CHUNK):
            parts = [some[number::AT_ONCE] for number in range(min(AT_ONCE, len(some)))]
            await asyncio.gather(*(in_storage_thread(delete_files, part) for part in parts))
            done = [job_id for job_id in some if job_id not in failed]
            await self._database.write(partial(repository.erase, job_ids=done))
        return failed

    async def finish(self, before: datetime | None = None) -> int:
        """Complete interrupted deletions, and return their number.

        With `before`, only deletions that began before this time are completed, because another
        process may still be deleting. A job whose files can't be deleted now is skipped, and its
        deletion is retried later.
        """
        hidden = await self._database.read(lambda s: repository.marked_deleted(s, before))
        failed = await self.erase(hidden)
        for job_id, error in failed.items():
            logger.warning("can't delete the files of the deleted job %s yet: %s", job_id, error)
        return len(hidden) - len(failed)


def _exists(rows: Mapping[str, JobRow], job_id: str) -> bool:
    return job_id in rows and rows[job_id].deleted_at is None


def _hide(session: Session, row: JobRow, now: datetime) -> None:
    row.deleted_at = now
    if row.array_head is not None:
        arrays_repository.hand_head_on(session, row)


def refusals(
    session: Session, job_ids: Sequence[str], rows: Mapping[str, JobRow]
) -> dict[str, DomainError]:
    """Return why jobs can't be deleted: a job does not exist or is being deleted, has not ended, or
    has a checkpoint from which a live job starts, or that is a version of a model."""
    needed = repository.needed(session, list(rows))
    pinned = registry_repository.registered(session, list(rows))
    found: dict[str, DomainError] = {}
    for job_id in job_ids:
        try:
            if not _exists(rows, job_id):
                raise not_found(job_id)
            _refuse_live(rows[job_id])
            if job_id in needed:
                init_from.refuse_if_needed(session, job_id)
            if job_id in pinned:
                registered.refuse_if_registered(session, [job_id])
        except (NotFound, JobLive, CheckpointInUse) as error:
            found[job_id] = error
    return found


def _refuse_live(row: JobRow) -> None:
    if not row.state.is_terminal:
        raise JobLive(
            f"the job {row.id} is {row.state}, and only a finished job can be deleted",
            hint="cancel the job first, and wait until it has ended",
        )


def not_found(job_id: str) -> NotFound:
    return NotFound(f"there is no job {job_id}", hint="`dray ls` lists the existing jobs")


def files_remain(what: str, error: StorageUnavailable) -> StorageUnavailable:
    """Return the error for a deletion whose files could not all be deleted."""
    message = f"{what} can't be deleted yet: {error.message}"
    return StorageUnavailable(message, hint="the service tries again until the files are deleted")
