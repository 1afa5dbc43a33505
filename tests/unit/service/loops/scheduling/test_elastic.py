"""Elastic jobs in the loops: they start with the free slots, and grow when more slots become
free."""

from __future__ import annotations

import asyncio
from datetime import timedelta

import pytest

from dray.views import JobState
from ray_workers.shared.contracts import BATCH_SIZE, NOISE_SCALE, FrameKind
from service.domain.scheduling.elastic import resizing
from service.domain.scheduling.policy import batch_changes
from service.runtime import Runtime
from tests.fakes.attempt import FakeRank
from tests.marks import ON_SQLITE
from tests.unit.service.loops.world import (
    World,
    comes_to,
    eventually,
    keeps_its_promises,
    reports_step,
)

pytestmark = ON_SQLITE


async def has(runtime: Runtime, job_id: str, world_size: int) -> None:
    async def is_so() -> bool:
        return (await runtime.jobs.get(job_id)).world_size == world_size

    await eventually(is_so, f"{job_id} never had {world_size} workers")


async def small(world: World, runtime: Runtime) -> tuple[str, str]:
    """Return a job that holds three of the four slots, and an elastic job that trains on the last
    slot."""
    other = await world.submit(runtime, "waits", workers=3)
    await comes_to(runtime, other, JobState.RUNNING)
    fields = {"elastic": {"min_workers": 1}}
    job_id = await world.submit(runtime, "waits", workers=3, **fields)
    await comes_to(runtime, job_id, JobState.RUNNING)
    await reports_step(runtime, job_id, 1)
    return job_id, other


async def test_it_starts_small_says_why_and_grows_when_slots_are_free(world: World) -> None:
    runtime = await world.open()
    job_id, other = await small(world, runtime)
    assert (await runtime.jobs.get(job_id)).world_size == 1
    assert (await world.fake.launched(job_id)).min_workers == 1

    async def explained() -> bool:
        return (await runtime.queries.explain(job_id)).blocked_by == [other]

    await eventually(explained, "the explanation never had its reason")
    said = (await runtime.queries.explain(job_id)).reason.message
    assert said.endswith(
        "could grow by 2 workers of 1 CPU; 0 are free, "
        f"and job {other} holds 3 slots on suitable nodes"
    )
    await runtime.jobs.cancel(other)
    await has(runtime, job_id, 3)
    held = (await runtime.queries.cluster()).nodes[0].held
    assert held == {"CPU": 3.0}
    types = [e.type for e in (await runtime.queries.events(job_id)).items if e.type != "state"]
    assert types == ["growing", "resized"]
    await runtime.jobs.cancel(job_id)
    await comes_to(runtime, job_id, JobState.CANCELLED)
    await keeps_its_promises(world, runtime, job_id)


async def test_the_workers_of_a_divided_model_come_and_go_in_whole_replicas(world: World) -> None:
    """Of four slots, one is held, so one of the other three stays free."""
    runtime = await world.open(min_run_s=0)
    other = await world.submit(runtime, "waits", workers=1)
    await comes_to(runtime, other, JobState.RUNNING)
    fields = {"elastic": {"min_workers": 2}, "parallel": {"shard": 2}}
    job_id = await world.submit(runtime, "waits", workers=4, **fields)
    await comes_to(runtime, job_id, JobState.RUNNING)
    await reports_step(runtime, job_id, 1)
    assert (await runtime.jobs.get(job_id)).world_size == 2
    await runtime.jobs.cancel(other)
    await has(runtime, job_id, 4)
    coming = await world.submit(runtime, "waits", workers=1)
    await comes_to(runtime, coming, JobState.RUNNING)
    assert (await runtime.jobs.get(job_id)).world_size == 2
    for each in (coming, job_id):
        await runtime.jobs.cancel(each)
        await comes_to(runtime, each, JobState.CANCELLED)
    await keeps_its_promises(world, runtime, job_id)


async def grown(world: World, runtime: Runtime) -> str:
    """Return an elastic job that started on one slot, and has grown to three of the four."""
    job_id, other = await small(world, runtime)
    await runtime.jobs.cancel(other)
    await has(runtime, job_id, 3)
    return job_id


@pytest.fixture
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A group that released slots is granted them again immediately."""
    monkeypatch.setattr(resizing, "GROWING_PAUSE", timedelta(0))


@pytest.mark.usefixtures("_at_once")
async def test_it_gives_slots_back_to_a_job_that_waits_and_goes_on(world: World) -> None:
    runtime = await world.open(min_run_s=0)
    job_id = await grown(world, runtime)
    coming = await world.submit(runtime, "waits", workers=3)
    await comes_to(runtime, coming, JobState.RUNNING)
    await has(runtime, job_id, 1)
    job = await runtime.jobs.get(job_id)
    assert (job.state, job.attempt) == (JobState.RUNNING, 1), "it went on"
    events = (await runtime.queries.events(job_id)).items
    (asked,) = [event for event in events if event.type == "shrinking"]
    assert asked.code == "makes_room"
    assert asked.message == (
        "was asked to release 2 workers: it continues with fewer workers, "
        f"so that job {coming} can start"
    )
    assert (await runtime.queries.cluster()).nodes[0].held == {"CPU": 4.0}
    await runtime.jobs.cancel(coming)
    await has(runtime, job_id, 3)
    await runtime.jobs.cancel(job_id)
    await comes_to(runtime, job_id, JobState.CANCELLED)
    await keeps_its_promises(world, runtime, job_id)


@pytest.mark.usefixtures("_at_once")
async def test_a_recall_that_the_group_was_not_told_of_outlives_the_service(world: World) -> None:
    runtime = await world.open(min_run_s=0)
    job_id = await grown(world, runtime)
    world.fake.loses_grants = True
    coming = await world.submit(runtime, "waits", workers=3)

    async def asked() -> bool:
        events = (await runtime.queries.events(job_id)).items
        return any(event.type == "shrinking" for event in events)

    await eventually(asked, "it was never asked for its slots")
    assert (await runtime.jobs.get(coming)).state is JobState.QUEUED
    await world.drop(runtime)
    world.fake.loses_grants = False
    again = await world.open(min_run_s=0)
    await comes_to(again, coming, JobState.RUNNING)
    await has(again, job_id, 1)
    for each in (job_id, coming):
        await again.jobs.cancel(each)
        await comes_to(again, each, JobState.CANCELLED)
        await keeps_its_promises(world, again, each)


@pytest.mark.usefixtures("_at_once")
async def test_a_group_that_does_not_answer_a_recall_is_asked_to_leave(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resizing, "RECALL_LIMIT", timedelta(0))
    runtime = await world.open(min_run_s=0)
    job_id = await grown(world, runtime)
    world.fake.loses_grants = True
    coming = await world.submit(runtime, "waits", workers=3, priority=60)
    await comes_to(runtime, coming, JobState.RUNNING)
    events = (await runtime.queries.events(job_id)).items
    asked = ("shrinking", "recall_unanswered", "preempting")
    assert [event.type for event in events if event.type in asked] == list(asked)
    for each in (job_id, coming):
        await runtime.jobs.cancel(each)
        await comes_to(runtime, each, JobState.CANCELLED)
        await keeps_its_promises(world, runtime, each)


async def test_a_grant_that_the_group_was_not_told_of_outlives_the_service(world: World) -> None:
    runtime = await world.open()
    job_id, other = await small(world, runtime)
    world.fake.loses_grants = True
    await runtime.jobs.cancel(other)

    async def granted() -> bool:
        events = (await runtime.queries.events(job_id)).items
        return any(event.type == "growing" for event in events)

    await eventually(granted, "it was never granted the slots")
    await world.drop(runtime)
    world.fake.loses_grants = False
    again = await world.open()
    await has(again, job_id, 3)
    await again.jobs.cancel(job_id)
    await comes_to(again, job_id, JobState.CANCELLED)
    await keeps_its_promises(world, again, job_id)


async def ranges(rank: FakeRank) -> None:
    """Runs many steps, for which a smaller batch would be less wasteful."""
    for step in range(1, 1000):
        values = {BATCH_SIZE: 64.0, NOISE_SCALE: 10.0}
        body = {"step": step, "values": values, "total_steps": 2000, "samples_per_s": 100.0}
        rank.emit(FrameKind.METRICS, body)
        await asyncio.sleep(0.02)


@pytest.mark.parametrize("elastic_sizing", [True, False])
async def test_a_batch_in_a_range_goes_with_a_grant_unless_the_operator_turns_sizes_off(
    world: World, elastic_sizing: bool
) -> None:
    world.plays["ranges"] = ranges
    runtime = await world.open(elastic_sizing=elastic_sizing)
    other = await world.submit(runtime, "waits", workers=2)
    await comes_to(runtime, other, JobState.RUNNING)
    train = {"global_batch_size": 64, "batch_range": [16, 256], "measure_noise": True}
    fields = {"elastic": {"min_workers": 1}, "train": train}
    job_id = await world.submit(runtime, "ranges", workers=4, **fields)
    await reports_step(runtime, job_id, 3)
    await runtime.jobs.cancel(other)
    await has(runtime, job_id, 4)
    assert {grant.batch_size for grant in world.fake.grants} == {32 if elastic_sizing else None}
    await runtime.jobs.cancel(job_id)
    await comes_to(runtime, job_id, JobState.CANCELLED)


async def test_a_group_at_its_full_size_gets_another_batch_while_nothing_waits(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_changes, "LASTS_S", 0.1)
    world.plays["ranges"] = ranges
    runtime = await world.open()
    train = {"global_batch_size": 64, "batch_range": [16, 256], "measure_noise": True}
    fields = {"elastic": {"min_workers": 1}, "train": train}
    job_id = await world.submit(runtime, "ranges", workers=4, **fields)

    async def is_changed() -> bool:
        return bool(world.fake.grants)

    await eventually(is_changed, "its batch was never changed")
    grant = world.fake.grants[0]
    assert (grant.slices, grant.batch_size) == ((), 32)
    assert (await runtime.jobs.get(job_id)).world_size == 4
    await runtime.jobs.cancel(job_id)
    await comes_to(runtime, job_id, JobState.CANCELLED)
