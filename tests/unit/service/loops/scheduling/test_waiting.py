"""Jobs that start after others, and arrays with a limit, in a service that runs its loops."""

from __future__ import annotations

import asyncio

from dray.filters import JobFilter
from dray.requests import ArrayChangeRequest
from dray.views import JobState
from service.jobs.array_changes import ArrayChanges
from tests.fakes.attempt import FakeRank
from tests.unit.service.loops.world import World, comes_to, eventually, says


async def test_a_job_starts_when_the_one_before_it_has_succeeded(world: World) -> None:
    async def gated(rank: FakeRank) -> None:
        rank.report(1, train_loss=1.0)
        await world.gate.wait()

    world.plays["gated"] = gated
    runtime = await world.open()
    first = await world.submit(runtime, "gated")
    second = await world.submit(runtime, after=[first])
    await comes_to(runtime, first, JobState.RUNNING)
    await says(runtime, second, "waiting_for_jobs")
    world.gate.set()
    await comes_to(runtime, second, JobState.SUCCEEDED)
    first_job, second_job = await runtime.jobs.get(first), await runtime.jobs.get(second)
    assert first_job.finished_at is not None
    assert second_job.started_at is not None
    assert second_job.started_at >= first_job.finished_at


async def test_a_job_after_one_that_fails_is_never_launched(world: World) -> None:
    runtime = await world.open()
    first = await world.submit(runtime, "lacks_data")
    second = await world.submit(runtime, after=[first])
    job = await comes_to(runtime, second, JobState.CANCELLED)
    assert job.reason.code == "dependency_never_satisfied"
    assert [spec.job_id for spec in world.fake.launches] == [first]


async def test_no_more_jobs_of_an_array_run_than_may(world: World) -> None:
    running: set[int] = set()
    most = 0

    async def counted(rank: FakeRank) -> None:
        nonlocal most
        index = rank.spec.array_index
        assert index is not None
        running.add(index)
        most = max(most, len(running))
        rank.report(1, train_loss=1.0)
        await world.gate.wait()
        running.remove(index)

    world.plays["counted"] = counted
    runtime = await world.open()
    first = await world.submit(runtime, "counted", array={"size": 6, "max_running": 2})
    array_id = (await runtime.jobs.get(first)).array_id
    assert array_id is not None
    (last,) = (await runtime.jobs.list(JobFilter(array=array_id, array_index=5))).items
    await says(runtime, last.id, "array_limit")
    other = await world.submit(runtime)
    await comes_to(runtime, other, JobState.SUCCEEDED)
    world.gate.set()

    async def is_over() -> bool:
        return (await runtime.jobs.arrays.get(array_id)).is_settled()

    await eventually(is_over, "the array is not over")
    assert (await runtime.jobs.arrays.get(array_id)).counts == {JobState.SUCCEEDED: 6}
    assert most == 2


async def test_the_limit_of_an_array_is_changed_while_its_jobs_run(world: World) -> None:
    running: set[int] = set()
    gates = {index: asyncio.Event() for index in range(6)}

    async def gated(rank: FakeRank) -> None:
        index = rank.spec.array_index
        assert index is not None
        running.add(index)
        rank.report(1, train_loss=1.0)
        await gates[index].wait()
        running.remove(index)

    world.plays["gated"] = gated
    runtime = await world.open()
    first = await world.submit(runtime, "gated", array={"size": 6, "max_running": 3})
    array_id = (await runtime.jobs.get(first)).array_id
    assert array_id is not None
    changes = ArrayChanges(runtime.database, runtime.settings)

    async def limit(number: int) -> None:
        await changes.change(array_id, ArrayChangeRequest(max_running=number))

    async def run(*indices: int) -> None:
        async def are_these() -> bool:
            return running == set(indices)

        await eventually(are_these, f"{indices} do not run")

    await run(0, 1, 2)
    await limit(2)
    gates[0].set()
    await comes_to(runtime, first, JobState.SUCCEEDED)
    (last,) = (await runtime.jobs.list(JobFilter(array=array_id, array_index=5))).items
    await says(runtime, last.id, "array_limit")
    assert running == {1, 2}, "no further job starts"
    gates[1].set()
    await run(2, 3)
    await limit(4)
    await run(2, 3, 4, 5)
    for gate in gates.values():
        gate.set()
