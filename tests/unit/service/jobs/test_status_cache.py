"""Cached responses are never stale."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy.orm import Session

from service.cluster.port import ClusterSnapshot
from service.db.session import Database
from service.domain.errors import NotFound
from service.domain.scheduling import policy
from service.jobs import serializers, status_cache
from service.jobs.status_cache import StatusCache
from service.lifecycle import transitions
from service.nodes import node_table
from tests.unit.service.helpers import Service, metrics


@pytest.fixture
def cache(service: Service) -> StatusCache:
    return StatusCache(service.database)


async def shown(cache: StatusCache, job_id: str) -> bytes:
    """Return the response of the API."""
    return cache.peek(job_id) or await cache.read(job_id)


def see_cluster(service: Service) -> None:
    picture = ClusterSnapshot(
        session="s", address="head:6379", dashboard_url="http://dash", nodes=(), shared=False
    )
    service.database.write_sync(lambda s: node_table.store(s, picture, None, service.now))


def wait(service: Service, job_id: str) -> None:
    found = policy.Wait(job_id, policy.Reason("waiting_for_slots", "needs more"), 3)
    service.database.write_sync(lambda s: transitions.note_waiting(s, [found], service.now))


async def test_every_change_of_a_job_shows_at_once(service: Service, cache: StatusCache) -> None:
    job_id = await service.submit()
    other = await service.submit()
    steps: list[Callable[[], Any]] = [
        lambda: wait(service, job_id),
        lambda: see_cluster(service),
        lambda: service.claim(job_id),
        lambda: service.report(job_id, 1, [metrics(1, {"loss": 1.0}, total_steps=9)]),
        lambda: service.report(job_id, 1, [metrics(2, {"loss": 0.5})]),
        lambda: service.claim(other),
        lambda: service.end(job_id, 1),
    ]
    answers = set()
    for step in steps:
        answers.add(await shown(cache, job_id))
        await asyncio.to_thread(step)
        direct = await service.jobs.get(job_id)
        assert await shown(cache, job_id) == direct.model_dump_json().encode()
    assert len(answers) == len(steps) - 1, "the claim of another job changes nothing here"
    await service.jobs.delete(job_id)
    assert cache.peek(job_id) is None
    with pytest.raises(NotFound):
        await cache.read(job_id)


async def test_what_another_job_does_leaves_an_answer_kept(sqlite_service: Service) -> None:
    service, cache = sqlite_service, StatusCache(sqlite_service.database)
    job_id, other, waits = [await service.submit() for _ in range(3)]
    service.claim(other)
    await cache.read(job_id)
    service.report(other, 1, [metrics(1, {"loss": 1.0})])
    wait(service, waits)
    assert cache.peek(job_id) is not None
    see_cluster(service)
    assert cache.peek(job_id) is None, "a commit that names no job may have changed any"


async def test_an_answer_that_was_overtaken_is_not_kept(
    sqlite_service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    service, cache = sqlite_service, StatusCache(sqlite_service.database)
    job_id = await service.submit()
    queries, changed = threading.Event(), threading.Event()
    present = serializers.status

    def slowly(session: Session, row: Any) -> Any:
        view = present(session, row)
        queries.set()
        assert changed.wait(60)
        return view

    monkeypatch.setattr(serializers, "status", slowly)
    answer = asyncio.create_task(asyncio.to_thread(lambda: asyncio.run(cache.read(job_id))))
    assert await asyncio.to_thread(queries.wait, 60)
    assert await asyncio.to_thread(service.claim, job_id) is not None
    changed.set()
    assert b"QUEUED" in await answer
    assert cache.peek(job_id) is None
    assert b"STARTING" in await cache.read(job_id)


async def test_on_postgresql_others_write_too_and_nothing_is_kept(postgres_url: str) -> None:
    database = Database(postgres_url)
    try:
        cache = StatusCache(database)
        with pytest.raises(NotFound):
            await cache.read("job-none")
        assert cache.peek("job-none") is None
    finally:
        database.close()


async def test_only_so_many_answers_are_kept(
    sqlite_service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(status_cache, "MAX_ANSWERS", 2)
    service, cache = sqlite_service, StatusCache(sqlite_service.database)
    ids = [await service.submit() for _ in range(3)]
    for job_id in ids:
        await cache.read(job_id)
    assert [cache.peek(job_id) is not None for job_id in ids] == [False, True, True]
