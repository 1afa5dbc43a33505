"""Loops that are woken frequently leave CPU time for others, without reacting more slowly."""

from __future__ import annotations

import asyncio
import threading

import pytest

from service.db.notifications import ATTEMPTS, QUEUE, Signals
from service.loops.shared import timings

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize(
    ("took_s", "rests_s"),
    [(0.0, 0.0), (0.01, 0.04), (10.0, timings.MAX_REST_S), (3600.0, timings.MAX_REST_S)],
)
async def test_a_loop_rests_longer_than_its_round_but_not_after_a_slow_one(
    monkeypatch: pytest.MonkeyPatch, took_s: float, rests_s: float
) -> None:
    """A round that took ten seconds was waiting for the database, and a job may have arrived during
    this time."""
    rests = []

    async def sleep(seconds: float) -> None:
        rests.append(seconds)

    loop = asyncio.get_running_loop()
    monkeypatch.setattr(loop, "time", lambda: 5.0e5)
    monkeypatch.setattr("service.loops.shared.timings.asyncio.sleep", sleep)
    await timings.rest_after(5.0e5 - took_s)
    assert rests == [pytest.approx(rests_s, abs=1e-6)]


async def test_a_job_that_is_submitted_while_a_loop_rests_is_seen_after_the_rest() -> None:
    signals = Signals()
    with signals.subscribe(QUEUE, ATTEMPTS) as woken:
        for _ in range(3):
            rests = asyncio.ensure_future(
                timings.rest_after(asyncio.get_running_loop().time() - 1.0)
            )
            await asyncio.sleep(0)
            submit = threading.Thread(target=signals.publish, args=(QUEUE,))
            submit.start()
            submit.join()
            await rests
            async with asyncio.timeout(60.0):
                assert await woken.wait(None)
        assert not await woken.wait(0.001), "a submit is seen once"
