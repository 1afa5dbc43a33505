"""Tasks waiting for events of a job are woken by events, but not by each training step."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

import pytest

from service.db import notifications
from service.db.notifications import (
    ATTEMPTS,
    QUEUE,
    PostgresAnnouncer,
    PostgresListener,
    Signals,
    events_of,
)
from tests.unit.service.helpers import Service, log, metrics

WITHIN_S = 20.0


async def test_metrics_and_lines_wake_who_waits_for_anything_but_not_who_waits_for_events(
    sqlite_service: Service,
) -> None:
    service = sqlite_service
    job_id = await service.running()
    signals = service.database.signals
    with signals.subscribe(job_id) as anything, signals.subscribe(events_of(job_id)) as events:
        frames = [metrics(1, {"loss": 1.0}), log(0, "a line")]
        await asyncio.to_thread(service.report, job_id, 1, frames)
        assert await anything.wait(WITHIN_S)
        assert not await events.wait(0)
        refused = [metrics(2, {"loss": "low"})]  # this adds an event
        await asyncio.to_thread(service.report, job_id, 1, refused)
        assert await events.wait(WITHIN_S)
        await asyncio.to_thread(service.end, job_id, 1)
        assert await events.wait(WITHIN_S)


async def test_the_reconciler_wakes_for_what_is_asked_of_attempts_and_not_for_their_ends(
    sqlite_service: Service,
) -> None:
    service = sqlite_service
    ending, asked = await service.running(), await service.running()
    signals = service.database.signals
    with signals.subscribe(ATTEMPTS) as attempts, signals.subscribe(QUEUE) as queue:
        await asyncio.to_thread(service.end, ending, 1)
        assert await queue.wait(WITHIN_S)
        assert not await attempts.wait(0)
        await service.jobs.cancel(asked)
        assert await attempts.wait(WITHIN_S)


async def test_a_task_that_is_woken_already_is_not_woken_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loop, signals = asyncio.get_running_loop(), Signals()
    calls: list[Callable[[], object]] = []
    with signals.subscribe("job") as woken:
        monkeypatch.setattr(loop, "call_soon_threadsafe", calls.append)
        for _ in range(3):
            signals.publish("job")
        assert len(calls) == 1
        calls[0]()
        assert await woken.wait(60)
        signals.publish("job")
        assert len(calls) == 2
        calls[1]()
        assert await woken.wait(60)


def test_a_database_that_accepts_and_never_answers_does_not_keep_the_service_from_its_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(notifications, "LAST_WORDS_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"postgresql://nobody@127.0.0.1:{silent.getsockname()[1]}/none"
        listener = PostgresListener(url, Signals(), own=PostgresAnnouncer(url))
        listener.start()
        connection, _ = silent.accept()
        with connection:
            listener.stop()
            assert listener._thread.is_alive()
    listener._thread.join(WITHIN_S)
    assert not listener._thread.is_alive()
