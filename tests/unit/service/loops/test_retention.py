"""Jobs deleted by the service itself, and full storage."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import shutil
import tempfile
from collections.abc import Awaitable, Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from dray.filters import AccountingFilter
from dray.views import JobState
from ray_workers.shared.names import attempt_prefix
from service.db.repositories import attempts
from service.db.repositories import jobs as repository
from service.db.repositories.submission import data_files
from service.db.session import Database
from service.domain.errors import NotFound, QuotaExceeded, StorageUnavailable
from service.domain.scheduling.rules.shares import REMEMBERED_S
from service.jobs.accounting import Accounting
from service.jobs.service import IdempotencyKey
from service.loops.retention import Retention
from service.loops.shared.timings import LoopTimings
from service.storage import quota
from service.storage.quota import StorageWatch
from service.storage.storage import Storage
from tests.unit.service.helpers import START, Service, spec


def raises(error: Exception) -> Callable[[str], Awaitable[None]]:
    async def raise_it(_: str) -> None:
        raise error

    return raise_it


class Kept(Service):
    """A service and its retention, on the same clock."""

    def __init__(self, database: Database, storage: Storage, home: Path, **settings: Any) -> None:
        super().__init__(database, storage, home, **settings)
        self.watch: StorageWatch = self.jobs.storage_watch
        timings = LoopTimings(retention_period_s=0.01)
        self.retention = Retention(
            *(database, storage, self.watch, self.jobs, self.settings, timings),
            clock=lambda: self.now,
        )

    async def finished(self, project: str = "vision", **fields: Any) -> str:
        job, _ = await self.jobs.submit(spec(**fields), owner="ann", project=project)
        assert self.claim(job.id) is not None
        self.report(job.id, 1, [self.checkpoint(job.id, 1, 5)])
        self.end(job.id, 1)
        return job.id

    async def ids(self) -> list[str]:
        return [job.id for job in (await self.jobs.list()).items][::-1]


def kept(service: Service, tmp_path: Path, **settings: Any) -> Kept:
    return Kept(service.database, service.storage, tmp_path, **settings)


async def test_what_an_interrupted_upload_leaves_is_removed(
    service: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = kept(service, tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(here.storage, "write_bytes", fails)
        with pytest.raises(StorageUnavailable):
            await here.jobs.files.upload("ann", "a.jsonl", b"{}")
    here.advance(timedelta(hours=2).total_seconds())
    later = here.now + timedelta(days=1)
    assert here.database.read_sync(lambda s: data_files.left(s, later, 9))
    await here.retention.run_once()
    assert not here.database.read_sync(lambda s: data_files.left(s, later, 9))


def fails(*_: object) -> None:
    raise StorageUnavailable("the disk is gone")


async def test_jobs_that_ended_long_ago_are_deleted_and_a_line_says_so(
    service: Service, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    here = kept(service, tmp_path, retention_days=2)
    old, live = await here.finished(), await here.running()
    here.advance(timedelta(days=1).total_seconds())
    young = await here.finished()
    here.advance(timedelta(days=1, seconds=1).total_seconds())
    with caplog.at_level(logging.INFO, logger="service.loops.retention"):
        assert await here.retention.run_once() == 1
    assert await here.ids() == [live, young]
    assert (
        f"deleted the job {old} of the project vision: the job ended more than 2 days"
        in caplog.text
    )
    with pytest.raises(NotFound):
        await here.jobs.get(old)


async def test_of_each_project_the_newest_finished_jobs_are_kept(
    service: Service, tmp_path: Path
) -> None:
    here = kept(service, tmp_path, retention_jobs=2)
    live = await here.running()
    vision = [await here.finished("vision") for _ in range(4)]
    text = [await here.finished("text") for _ in range(2)]
    assert await here.retention.delete_expired() == 2
    assert await here.ids() == [live, *vision[2:], *text]
    assert await here.retention.delete_expired() == 0


async def test_the_slots_of_deleted_jobs_are_known_while_their_use_counts(
    service: Service, tmp_path: Path
) -> None:
    here = kept(service, tmp_path, accounting_days=1)
    await here.jobs.delete(await here.finished())

    def known() -> int:
        since = START - timedelta(days=1)
        ended = here.database.read_sync(lambda s: attempts.ended_slots(s, since=since, limit=9))
        return len(ended)

    here.advance(REMEMBERED_S)
    await here.retention.run_once()
    assert known() == 1
    here.advance(1)
    here.retention._expiry_at = 0.0
    await here.retention.run_once()
    assert known() == 0


@pytest.mark.parametrize("settings", [{}, {"accounting_days": 0}])
async def test_accounting_keeps_deleted_jobs_by_default(
    service: Service, tmp_path: Path, settings: dict[str, int]
) -> None:
    here = kept(service, tmp_path, **settings)
    await here.jobs.delete(await here.finished())
    here.advance(10 * REMEMBERED_S)
    await here.retention.run_once()
    (row,) = (await Accounting(here.database).page(AccountingFilter(since=START), limit=9)).items
    assert row.is_deleted


@pytest.mark.parametrize("settings", [{}, {"retention_days": 0, "retention_jobs": 0}])
async def test_by_default_everything_is_kept(
    service: Service, tmp_path: Path, settings: dict[str, int]
) -> None:
    here = kept(service, tmp_path, **settings)
    job_id = await here.finished()
    here.advance(10**8)
    assert await here.retention.run_once() == 0
    assert await here.ids() == [job_id]


@pytest.mark.parametrize("settings", [{"retention_days": 1}, {"retention_jobs": 1}])
async def test_what_a_live_job_starts_from_is_not_deleted(
    service: Service, tmp_path: Path, settings: dict[str, int]
) -> None:
    here = kept(service, tmp_path, **settings)
    source = await here.finished()
    user = await here.submit(init_from={"job": source})
    here.advance(10**6)
    newer = await here.finished()
    assert await here.retention.delete_expired() == 0
    await here.jobs.cancel(user)
    here.advance(1)
    assert await here.retention.delete_expired() >= 1
    assert source not in await here.ids()
    assert newer in await here.ids() or "retention_jobs" in settings


async def test_a_full_storage_takes_no_job_and_says_what_to_do(
    service: Service, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    here = kept(service, tmp_path, storage_quota_bytes=20)
    key = IdempotencyKey("k", "hash")
    first, _ = await here.jobs.submit(spec(), idempotency=key)
    jobs = [await here.finished() for _ in range(2)]
    assert await here.retention.run_once() == 0
    assert "no job is accepted or started" in caplog.text
    with pytest.raises(QuotaExceeded, match="holds 20 bytes, and its quota is 20 bytes") as caught:
        await here.jobs.submit(spec())
    assert "dray delete" in str(caught.value.hint)
    again, created = await here.jobs.submit(spec(), idempotency=key)
    assert (again.id, created) == (first.id, False), "acknowledged jobs are still answered"
    shown = (await here.queries.cluster()).storage
    assert (shown.used_bytes, shown.quota_bytes) == (20, 20)
    assert shown.problem is not None
    await here.jobs.delete(jobs[0])
    assert (await here.queries.cluster()).storage.problem is None
    assert (await here.jobs.submit(spec()))[0].state is JobState.QUEUED


async def test_deleting_frees_the_storage(service: Service, tmp_path: Path) -> None:
    here = kept(service, tmp_path, storage_quota_bytes=10**9)
    job_id = await here.running()
    key = f"{attempt_prefix(job_id, 1)}/artifacts/model.bin"
    here.storage.write_bytes(key, b"x" * 100_000)
    here.report(job_id, 1, [here.artifact(job_id, 1, "model.bin")])
    here.end(job_id, 1)
    assert here.storage.folder is not None

    def on_disk() -> int:
        assert here.storage.folder is not None
        return sum(p.stat().st_size for p in here.storage.folder.rglob("*") if p.is_file())

    before = on_disk()
    await here.watch.look(here.now)
    assert ((await here.queries.cluster()).storage.used_bytes or 0) > 0
    await here.jobs.delete(job_id)
    assert before - on_disk() >= 100_000
    assert (await here.queries.cluster()).storage.used_bytes == 0


async def test_a_disk_that_takes_nothing_is_named_without_any_limit(
    service: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = service.jobs.storage_watch
    assert await watch.full_folders() is None
    usage = shutil.disk_usage(tmp_path)
    with monkeypatch.context() as full:
        full.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1 << 20))
        problem = await watch.full_folders()
        assert problem is not None
        assert f"{tmp_path / 'storage'} is full: 1 MiB free" in problem

    def refuse(**_: object) -> None:
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    monkeypatch.setattr(tempfile, "TemporaryFile", refuse)
    assert ": Disk quota exceeded" in str(await watch.full_folders())


async def test_too_little_free_disk_counts_as_full(service: Service, tmp_path: Path) -> None:
    here = kept(service, tmp_path, min_free_bytes=1 << 60)
    assert "must stay free" in str(await here.watch.look(here.now))
    with pytest.raises(QuotaExceeded, match="TiB must stay free"):
        await here.jobs.submit(spec())
    roomy = kept(service, tmp_path, min_free_bytes=1)
    assert await roomy.watch.look(here.now) is None
    assert ((await roomy.queries.cluster()).storage.free_bytes or 0) > 0


async def test_a_limit_that_was_lifted_is_forgotten(service: Service, tmp_path: Path) -> None:
    await kept(service, tmp_path, min_free_bytes=1 << 60).watch.look(service.now)
    here = kept(service, tmp_path)
    assert not here.watch.is_limited
    await here.watch.look(here.now)
    await here.submit()


async def test_a_deletion_that_was_cut_off_is_taken_up_after_a_while(
    service: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = kept(service, tmp_path)
    job_id = await here.finished()
    with monkeypatch.context() as patch:
        patch.setattr(here.jobs.deletions, "erase", raises(RuntimeError("the process dies")))
        with pytest.raises(RuntimeError):
            await here.jobs.delete(job_id)

    def hidden() -> list[str]:
        return here.database.read_sync(repository.marked_deleted)

    await here.retention.run_once()
    assert hidden() == [job_id], "the process that began it may still be working on it"
    timings = LoopTimings()
    then = here.database.read_sync(here.database.time) + 2 * timings.deletion_grace
    later = Retention(
        *(here.database, here.storage, here.watch, here.jobs, here.settings, timings),
        clock=lambda: then,
    )
    await later.run_once()
    assert hidden() == []


async def test_sizes_that_a_job_made_up_do_not_keep_the_storage_from_being_measured(
    service: Service, tmp_path: Path
) -> None:
    here = kept(service, tmp_path, storage_quota_bytes=100)
    job_id = await here.running()
    saved = [here.checkpoint(job_id, 1, step) for step in (1, 2, 3)]
    here.report(job_id, 1, [replace(one, body={**one.body, "size_bytes": 2**62}) for one in saved])
    assert "its quota" in (await here.watch.look(here.now) or "")


async def test_a_deletion_is_done_though_nobody_heard_that_its_commit_arrived(
    service: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = kept(service, tmp_path)
    job_id = await here.finished()
    once = here.database.write_sync

    def twice(work: Callable[..., Any]) -> Any:
        once(work)
        return once(work)

    monkeypatch.setattr(here.database, "write_sync", twice)
    await here.jobs.delete(job_id)
    assert here.database.read_sync(repository.marked_deleted) == []
    with pytest.raises(NotFound):
        await here.jobs.get(job_id)
    with pytest.raises(NotFound):
        await here.jobs.delete(job_id)


async def test_the_loop_goes_on_after_a_failed_round(
    service: Service,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    here = kept(service, tmp_path, retention_days=1)
    job_id = await here.finished()
    here.advance(10**6)
    rounds = iter([RuntimeError("the first round fails")])
    delete = here.jobs.delete

    async def fails_once(job_id: str, actor: str) -> None:
        for error in rounds:
            raise error
        await delete(job_id)

    monkeypatch.setattr(here.jobs, "delete", fails_once)
    loop = asyncio.create_task(here.retention.run())
    async with asyncio.timeout(20):
        while job_id in await here.ids():
            await asyncio.sleep(0.01)
    loop.cancel()
    assert "a round of the retention loop failed" in caplog.text


async def test_a_job_that_somebody_deleted_first_is_passed_over(
    service: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = kept(service, tmp_path, retention_days=1)
    first, second = await here.finished(), await here.finished()
    here.advance(10**6)
    delete = here.jobs.delete

    async def races(job_id: str, actor: str) -> None:
        await delete(job_id)
        if job_id == first:
            await delete(first)

    monkeypatch.setattr(here.jobs, "delete", races)
    assert await here.retention.delete_expired() == 1
    assert await here.ids() == []
    assert second


def test_an_unknown_amount_is_no_reason() -> None:
    assert quota.why_no_space(used=None, free=None, quota=1, min_free=1) is None
    assert quota.why_no_space(used=5, free=5, quota=None, min_free=None) is None
    assert quota.why_no_space(used=5, free=5, quota=6, min_free=5) is None
    assert "5 GiB" in str(quota.why_no_space(used=5 << 30, free=1, quota=1, min_free=None))
