"""Shares and factors, in a service that runs its loops."""

from __future__ import annotations

import pytest

from dray import views
from dray.requests import JobChangeRequest
from dray.views import JobState
from service.jobs.changes import JobChanges
from tests.unit.service.loops.world import World, comes_to, eventually


@pytest.fixture(autouse=True)
def quick_forecasts(world: World) -> None:
    world.set_timings(forecast_pause_s=0.01, forecast_period_s=0.05)


async def test_usage_is_reported_while_no_job_waits(world: World) -> None:
    runtime = await world.open()
    ended = await world.submit(runtime, owner="bob")
    await comes_to(runtime, ended, JobState.SUCCEEDED)
    running = await world.submit(runtime, "waits", workers=2, owner="ann")
    await comes_to(runtime, running, JobState.RUNNING)

    async def used() -> views.QueueShare | None:
        report = await runtime.queries.shares()
        found = report.queues[0] if report.queues else None
        is_seen = found is not None and [u.owner for u in found.users if u.share] == ["ann"]
        return found if is_seen and found is not None and found.used_s > 1.0 else None

    queue = await eventually(used, "the usage of the running job was never reported")
    assert queue is not None
    assert (queue.tier, queue.share) == ("share", 1.0)
    report = await runtime.queries.shares(owner="bob")
    assert report.cluster == {"CPU": 4.0}
    assert [user.owner for user in report.queues[0].users] in ([], ["bob"])


async def test_the_factors_give_the_position_that_the_plan_stored(world: World) -> None:
    runtime = await world.open()
    first = await world.submit(runtime, "waits", workers=4)
    await comes_to(runtime, first, JobState.RUNNING)
    jobs = [await world.submit(runtime, priority=priority) for priority in (40, 60, 50, 60)]
    change = JobChangeRequest(first=True)
    await JobChanges(runtime.database, runtime.settings).change(jobs[3], change, is_admin=True)

    async def is_planned() -> bool:
        found = [(await runtime.queries.explain(job)).position for job in jobs]
        return found == [4, 2, 3, 1]

    await eventually(is_planned, "the jobs never got their positions")
    told = [await runtime.queries.factors(job) for job in jobs]
    assert [each.position for each in told] == [4, 2, 3, 1]
    assert [(each.job.id, each.decided_by) for each in told[0].ahead] == [
        (jobs[3], "priority"),
        (jobs[1], "priority"),
        (jobs[2], "priority"),
    ]
    assert [(each.job.id, each.decided_by) for each in told[1].ahead] == [(jobs[3], "front")]
    running = await runtime.queries.factors(first)
    assert running.reason is not None
    assert running.reason.code == "not_waiting"
