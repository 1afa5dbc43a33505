"""Queue rules and holds while the loops run: they take effect immediately, without a restart."""

from __future__ import annotations

import pytest

from dray.queue_requests import QueueRequest
from dray.requests import JobChangeRequest
from dray.views import JobState
from service.domain.errors import UnknownQueue
from service.domain.scheduling.rules import shares
from service.jobs.changes import JobChanges
from service.queues.service import Queues
from service.runtime import Runtime
from tests.unit.service.loops.world import World, comes_to, eventually, says


async def _set(runtime: Runtime, name: str, **rules: object) -> None:
    queues = Queues(runtime.database, runtime.prices)
    await queues.put(name, QueueRequest.model_validate(rules))


async def _change(runtime: Runtime, job_id: str, **changes: object) -> None:
    wanted = JobChangeRequest.model_validate(changes)
    await JobChanges(runtime.database, runtime.settings).change(job_id, wanted, actor="ann")


async def test_a_limit_that_is_raised_lets_the_next_job_start(world: World) -> None:
    runtime = await world.open(scheduler_tick_s=60.0)
    with pytest.raises(UnknownQueue):
        await world.submit(runtime, "waits", queue="night")
    await _set(runtime, "night", limit={"CPU": 2})
    first = await world.submit(runtime, "waits", workers=2, queue="night")
    await comes_to(runtime, first, JobState.RUNNING)
    second = await world.submit(runtime, "waits", queue="night")
    told = await says(runtime, second, "queue_limit")
    assert told.reason.message == (
        "needs 1 worker of 1 CPU; the queue 'night' holds 2 CPU, and its limit is 2 CPU"
    )
    assert told.blocked_by == [first]
    elsewhere = await world.submit(runtime, workers=2)
    await comes_to(runtime, elsewhere, JobState.SUCCEEDED)
    await _set(runtime, "night", limit={"CPU": 3})
    await comes_to(runtime, second, JobState.RUNNING)


async def test_a_weight_that_is_changed_moves_the_jobs_of_its_user(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    for slack in ("QUEUE_SLACK_S", "USER_SLACK_S", "LEAST_USER_SLACK_S"):
        monkeypatch.setattr(shares, slack, 1e-3)
    runtime = await world.open(scheduler_tick_s=60.0)
    running = await world.submit(runtime, "waits", owner="ann", workers=4)
    await comes_to(runtime, running, JobState.RUNNING)
    waiting = {name: await world.submit(runtime, owner=name, workers=4) for name in ("ann", "bob")}

    async def are_placed(ann: int, bob: int) -> bool:
        jobs = {name: await runtime.jobs.get(job) for name, job in waiting.items()}
        return {name: job.position for name, job in jobs.items()} == {"ann": ann, "bob": bob}

    await eventually(lambda: are_placed(ann=2, bob=1), "bob has used nothing")
    await _set(runtime, "default", user_weights={"ann": 1e6})
    await eventually(lambda: are_placed(ann=1, bob=2), "nearly all of the queue is ann's now")


async def test_a_released_job_starts_and_a_held_one_does_not(world: World) -> None:
    runtime = await world.open(scheduler_tick_s=60.0)
    running = await world.submit(runtime, "waits", workers=4)
    await comes_to(runtime, running, JobState.RUNNING)
    held, other = [await world.submit(runtime, workers=4) for _ in range(2)]
    await says(runtime, held, "waiting_for_slots")
    await _change(runtime, held, held=True)
    await runtime.jobs.cancel(running)
    await comes_to(runtime, other, JobState.SUCCEEDED)
    job = await runtime.jobs.get(held)
    assert (job.state, job.reason.code, job.held_by) == (JobState.QUEUED, "held", "ann")
    await _change(runtime, held, held=False)
    assert (await comes_to(runtime, held, JobState.SUCCEEDED)).held_by is None
