"""Many running jobs on one service: the cost per job."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from dray.views import JobState
from ray_workers.shared.contracts import PollReply
from service.cluster.port import AttemptRef
from service.ingest import attempt_results
from service.loops.attempts import reconciler
from tests.unit.service.loops.world import World, comes_to, reports_step, steps_of


async def test_all_replies_together_have_a_bound(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reconciler, "MAX_REPLIES_BYTES", 3 * reconciler.MIN_REPLY_BYTES)
    asked: set[int] = set()
    poll = world.fake.poll

    async def noting(
        ref: AttemptRef, cursor: Mapping[str, int], wait_s: float, max_bytes: int
    ) -> PollReply:
        asked.add(max_bytes)
        return await poll(ref, cursor, wait_s, max_bytes)

    monkeypatch.setattr(world.fake, "poll", noting)
    runtime = await world.open()
    running = [await world.submit(runtime, "waits") for _ in range(4)]
    for job_id in running:
        await reports_step(runtime, job_id, 1)
    await world.fake.until(lambda: reconciler.MIN_REPLY_BYTES in asked)
    assert max(asked) <= 3 * reconciler.MIN_REPLY_BYTES


async def test_a_reply_that_can_not_be_stored_keeps_no_other_back(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad: list[str] = []
    record = attempt_results.record

    def fails(session: Any, storage: Any, received: Any, *more: Any, **named: Any) -> Any:
        if any(one.job_id in bad for one in received):
            raise RuntimeError("what this job reports can not be stored")
        return record(session, storage, received, *more, **named)

    monkeypatch.setattr(attempt_results, "record", fails)
    runtime = await world.open()
    bad.append(await world.submit(runtime))
    others = [await world.submit(runtime) for _ in range(3)]
    for job_id in others:
        await comes_to(runtime, job_id, JobState.SUCCEEDED)
        assert await steps_of(runtime, job_id) == [1, 2, 3, 4, 5]
    job_id = bad.pop()
    await comes_to(runtime, job_id, JobState.SUCCEEDED)
    assert await steps_of(runtime, job_id) == [1, 2, 3, 4, 5]


async def test_the_delay_of_replies_is_told(world: World) -> None:
    runtime = await world.open()
    for _ in range(2):  # the next write stores the measurements
        await comes_to(runtime, await world.submit(runtime), JobState.SUCCEEDED)
    cells = (await runtime.metering.watched()).cells
    assert cells["dray_reply_delay_seconds", "", "sum"] > 0
    assert cells["dray_scheduler_round_seconds", "", "sum"] > 0
