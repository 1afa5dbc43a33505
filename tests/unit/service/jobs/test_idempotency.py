"""Idempotency keys while their first request is in progress, with one process and with two."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sqlalchemy.orm import Session

from service.db.session import Database
from service.domain.errors import IdempotencyInFlight, InitFromNotFound
from service.jobs.idempotency import IdempotencyKey
from service.storage.storage import Storage
from tests.unit.service.helpers import Service, spec


async def test_a_key_that_another_process_is_about_to_bind_is_in_flight(
    postgres_url: str, storage: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other process has written its job, but has not committed it."""
    database = Database(postgres_url)
    service, other = (Service(database, storage, tmp_path) for _ in range(2))
    written, may_commit = threading.Event(), threading.Event()
    key = IdempotencyKey("k", "f")

    async def slow(work: Callable[[Session], Any]) -> Any:
        def working(session: Session) -> Any:
            result = work(session)
            session.flush()
            written.set()
            assert may_commit.wait(20)
            return result

        return await database.write(working)

    monkeypatch.setattr(other.jobs, "_database", SimpleNamespace(write=slow))
    first = asyncio.create_task(other.jobs.submit(spec(), owner="ann", idempotency=key))
    await asyncio.to_thread(written.wait, 20)
    with pytest.raises(IdempotencyInFlight):
        await service.jobs.submit(spec(), owner="ann", idempotency=key)
    _, made_by_bob = await service.jobs.submit(spec(), owner="bob", idempotency=key)
    assert made_by_bob
    may_commit.set()
    job, created = await first
    assert created
    again, created = await service.jobs.submit(spec(), owner="ann", idempotency=key)
    assert (again.id, created) == (job.id, False)
    database.close()


async def test_in_one_process_a_key_is_in_flight_until_its_first_request_has_ended(
    service: Service,
) -> None:
    held = threading.Event()
    key = IdempotencyKey("k", "f")
    blocking = asyncio.create_task(service.database.write(lambda _: held.wait(20)))
    first = asyncio.create_task(service.jobs.submit(spec(), owner="ann", idempotency=key))
    await asyncio.sleep(0)  # the first request has begun
    try:
        with pytest.raises(IdempotencyInFlight):
            await service.jobs.submit(spec(), owner="ann", idempotency=key)
    finally:
        held.set()
    await blocking
    job, _ = await first
    again, created = await service.jobs.submit(spec(), owner="ann", idempotency=key)
    assert (again.id, created) == (job.id, False)


async def test_a_request_that_was_refused_leaves_its_key_free(service: Service) -> None:
    key = IdempotencyKey("k", "f")
    missing = {"job": "job-none"}
    with pytest.raises(InitFromNotFound):
        await service.jobs.submit(spec(init_from=missing), owner="ann", idempotency=key)
    other = IdempotencyKey("k", "another document")
    _, created = await service.jobs.submit(spec(), owner="ann", idempotency=other)
    assert created
