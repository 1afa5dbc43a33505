"""Retention: deletes jobs according to the operator's rules, measures the storage, and retries
storing parts of logs that the storage refused."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from datetime import datetime, timedelta

from sqlalchemy.orm import Session

from service.config.settings import Settings
from service.db.repositories import storage as repository
from service.db.repositories.scheduling import accounting as accounting_repository
from service.db.repositories.scheduling import node_checks as node_checks_repository
from service.db.repositories.scheduling import usage as usage_repository
from service.db.repositories.scheduling import withheld as withheld_repository
from service.db.repositories.submission import tuning_requests as tuning_repository
from service.db.repositories.telemetry import chunks as chunks_repository
from service.db.session import Database
from service.domain.costs.usage import quarter_of
from service.domain.errors import CheckpointInUse, FolderSpoilt, NotFound, StorageUnavailable
from service.domain.scheduling.rules.shares import REMEMBERED_S
from service.jobs.service import Jobs
from service.jobs.tuning_requests import MAX_BETWEEN_TRIES
from service.loops.shared.timings import LoopTimings
from service.storage.quota import StorageWatch
from service.storage.staged_files import StagedFiles, with_files
from service.storage.storage import Storage
from service.telemetry import refused_logs

logger = logging.getLogger(__name__)

MOST_SHARE = 0.02
"""Maximum share of the time that is spent measuring the storage, because a measurement can read
many rows."""
KEPT_TESTS = timedelta(days=7)
"""Time for which the results of self-tests of nodes that have left the cluster are stored."""
KEPT_FAULTS = timedelta(days=30)
"""Time for which the faults of hosts that have left the cluster are stored. It is long, because a
host that returns from a repair before this time still has to be released."""
KEPT_USAGE = timedelta(days=800)
"""Time for which the usage over time is stored."""
BATCH = 100
"""Maximum number of jobs that one rule deletes in one round."""


class Retention:
    """The retention loop."""

    def __init__(
        self,
        database: Database,
        storage: Storage,
        watch: StorageWatch,
        jobs: Jobs,
        settings: Settings,
        timings: LoopTimings,
        *,
        clock: Callable[[], datetime] | None = None,
    ) -> None:
        self._database = database
        self._storage = storage
        self._watch = watch
        self._jobs = jobs
        self._days = settings.retention_days
        self._accounting_days = settings.accounting_days
        self._count = settings.retention_jobs
        self._timings = timings
        self._clock = clock
        self._expiry_at = self._measure_at = 0.0
        self._tried_log_of = ""
        """The last job for which storing the refused log was tried again."""

    async def run(self) -> None:
        """Run until cancelled."""
        while True:
            try:
                await self.run_once()
            except Exception:
                logger.exception("a round of the retention loop failed; the loop continues")
            await asyncio.sleep(self._timings.retention_period_s)

    async def run_once(self) -> int:
        """Run one round. Returns the number of deleted jobs."""
        deleted = 0
        loop = asyncio.get_running_loop()
        if loop.time() >= self._expiry_at:
            before = await self._now() - self._timings.deletion_grace
            await self._jobs.deletions.finish(before)
            deleted = await self.delete_expired()
            await self._jobs.code.sweep(await self._now())
            await self._jobs.files.remove_left()
            await self._jobs.files.remove_expired()
            if self._accounting_days:
                days = timedelta(days=self._accounting_days)
                forgotten = await self._now() - max(days, timedelta(seconds=REMEMBERED_S))
                await self._database.write(lambda s: accounting_repository.forget(s, forgotten))
            now = await self._now()
            await self._database.write(lambda s: withheld_repository.forget(s, now, KEPT_FAULTS))
            quarter = quarter_of(now - KEPT_USAGE)
            await self._database.write(lambda s: usage_repository.forget(s, quarter))
            tried = now - MAX_BETWEEN_TRIES
            await self._database.write(lambda s: tuning_repository.forget_keys(s, tried))
            tested = now - KEPT_TESTS
            await self._database.write(lambda s: node_checks_repository.forget(s, tested))
            await self._store_refused_logs()
            pause_s = 0.0 if deleted else self._timings.expiry_period_s
            self._expiry_at = loop.time() + pause_s
        if self._watch.is_limited and loop.time() >= self._measure_at:
            began = loop.time()
            try:
                await self._watch.look(await self._now())
            finally:
                pause_s = (loop.time() - began) / MOST_SHARE
                most_s = self._timings.most_between_measurements_s
                self._measure_at = began + min(pause_s, most_s)
        return deleted

    async def _now(self) -> datetime:
        return self._clock() if self._clock else await self._database.read(self._database.time)

    async def _store_refused_logs(self) -> None:
        """Move the refused logs of up to BATCH jobs to the storage, until the storage refuses a log
        again. Each call continues after the last job of the previous call."""
        after = self._tried_log_of
        found = await self._database.read(
            lambda s: chunks_repository.jobs_with_refused_chunks(s, after, BATCH)
        )
        for job_id in found:
            try:
                while await self._store_refused_log(job_id):
                    continue
            except FolderSpoilt:  # only this job's folder is affected
                continue
            except StorageUnavailable as error:
                logger.info(
                    "parts of logs that the storage refused are still in the database: %s", error
                )
                return
        self._tried_log_of = found[-1] if len(found) == BATCH else ""

    async def _store_refused_log(self, job_id: str) -> int:
        async def store(files: StagedFiles) -> int:
            return await self._database.write(lambda s: refused_logs.store(s, files, job_id))

        return await with_files(self._storage, store)

    async def delete_expired(self) -> int:
        """Delete finished jobs that are too old, and jobs that exceed the maximum number, up to
        BATCH jobs for each rule.

        A job is never deleted while an unfinished job starts from one of its checkpoints.
        """
        now = await self._now()
        deleted = 0
        if self._days:
            before = now - timedelta(days=self._days)
            old = await self._database.read(lambda s: repository.finished_before(s, before, BATCH))
            deleted += await self._delete(old, f"the job ended more than {self._days:g} days ago")
        if self._count:
            keep = self._count
            many = await self._database.read(lambda s: _surplus(s, keep))
            deleted += await self._delete(many, f"the project has {keep} newer finished jobs")
        return deleted

    async def _delete(self, found: list[tuple[str, str]], why: str) -> int:
        deleted = 0
        for job_id, project in found:
            # In the meantime, a user might have deleted the job, or submitted a job that starts
            # from its checkpoint.
            with contextlib.suppress(NotFound, CheckpointInUse):
                try:
                    await self._jobs.delete(job_id, actor="the retention")
                except StorageUnavailable as error:
                    logger.warning("%s", error)
                deleted += 1
                logger.info("deleted the job %s of the project %s: %s", job_id, project, why)
        return deleted


def _surplus(session: Session, keep: int) -> list[tuple[str, str]]:
    return [
        pair
        for project in list(repository.projects(session))
        for pair in repository.finished_beyond(session, project, keep, BATCH)
    ]
