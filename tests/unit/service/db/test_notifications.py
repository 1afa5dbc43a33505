"""A task that waits for a job's events is woken by them, and not by each step of training."""

from __future__ import annotations

import asyncio

import pytest

from service.db.notifications import events_of
from tests.unit.service.helpers import Service, log, metrics

pytestmark = pytest.mark.anyio

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
        refused = [metrics(2, {"loss": "low"})]  # an event says so
        await asyncio.to_thread(service.report, job_id, 1, refused)
        assert await events.wait(WITHIN_S)
        await asyncio.to_thread(service.end, job_id, 1)
        assert await events.wait(WITHIN_S)
