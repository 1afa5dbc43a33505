"""Keys of requests that OpenAI's client repeats without a key."""

from __future__ import annotations

import asyncio
from datetime import timedelta

from service.jobs.tuning_requests import MAX_BETWEEN_TRIES, TuningRequests
from service.loops.retention import Retention
from service.loops.shared.timings import LoopTimings
from tests.unit.service.helpers import Service


async def test_a_key_lasts_until_the_next_try_can_no_longer_come(service: Service) -> None:
    tuning = TuningRequests(service.database, service.jobs)
    now = [service.now]
    service.database.clock = lambda: now[0]
    within = timedelta(minutes=13)

    async def key(*, repeats: bool = True, fingerprint: str = "a") -> str:
        found = await tuning.key(
            "ann", fingerprint * 64, repeats_within=within if repeats else None
        )
        return found.key

    first = await key(repeats=False)
    assert await key() == first
    assert await key(fingerprint="b") != first
    second = await key(repeats=False)
    assert second != first, "a first try is another request"
    assert await key() == second
    if service.database.is_sqlite:  # PostgreSQL has its own clock
        now[0] += within
        assert await key() == second, "each try counts from the one before"
        now[0] += within
        assert await key() == second
        now[0] += within + timedelta(seconds=1)
        third = await key()
        assert third != second


async def test_tries_at_once_have_one_key(service: Service) -> None:
    tuning = TuningRequests(service.database, service.jobs)
    within = timedelta(minutes=13)
    keys = [tuning.key("ann", "c" * 64, repeats_within=within) for _ in range(8)]
    assert len({one.key for one in await asyncio.gather(*keys)}) == 1


async def test_old_keys_are_forgotten(sqlite_service: Service) -> None:
    service = sqlite_service
    now = [service.now]
    service.database.clock = lambda: now[0]
    tuning = TuningRequests(service.database, service.jobs)
    within = timedelta(days=30)  # more than the maximum
    first = (await tuning.key("ann", "d" * 64, repeats_within=None)).key
    now[0] += MAX_BETWEEN_TRIES - timedelta(seconds=1)
    await retention(service).run_once()
    assert (await tuning.key("ann", "d" * 64, repeats_within=within)).key == first
    now[0] += MAX_BETWEEN_TRIES + timedelta(seconds=1)
    await retention(service).run_once()
    assert (await tuning.key("ann", "d" * 64, repeats_within=within)).key != first


def retention(service: Service) -> Retention:
    return Retention(
        service.database,
        service.storage,
        service.jobs.storage_watch,
        service.jobs,
        service.settings,
        LoopTimings(),
    )
