"""What users ask of running jobs reaches the cluster, also over a restart of the service."""

from __future__ import annotations

import pytest

from dray import views
from dray.requests import DrillRequest
from dray.views import DrillState, JobState
from ray_workers.contracts import CheckpointRef, FrameKind, attempt_prefix
from service.cluster.fake_attempt import FakeRank
from service.runtime import Runtime
from tests.unit.loops.world import (
    STEPS,
    World,
    causes,
    charges,
    comes_to,
    eventually,
    keeps_its_promises,
    reports_step,
    steps_of,
    waits,
)
from tests.unit.service.helpers import SHA

pytestmark = pytest.mark.anyio


async def leaves(rank: FakeRank) -> None:
    """Saves step 1 and hangs on in its first attempt; goes on from there in the next."""
    if rank.attempt == 1:
        rank.emit(FrameKind.RESUMED, {"step": 0, "url": ""})
        where = attempt_prefix(rank.job_id, rank.attempt)
        body = {
            "step": 1,
            "url": f"{rank.spec.storage_url}/{where}/checkpoints/step-1",
            "size_bytes": 1,
            "manifest_sha256": SHA,
        }
        rank.emit(FrameKind.CHECKPOINT, body)
        await waits(rank)
    resume = rank.spec.resume_from
    assert resume, "there was a checkpoint to resume from"
    rank.emit(FrameKind.RESUMED, {"step": resume[0].step, "url": resume[0].url})
    for step in range(resume[0].step + 1, STEPS + 1):
        rank.report(step, train_loss=1.0 / step)


@pytest.fixture(autouse=True)
def _plays(world: World) -> None:
    world.plays["leaves"] = leaves


async def started(world: World, runtime: Runtime, **fields: object) -> str:
    job_id = await world.submit(runtime, "leaves", **fields)
    await comes_to(runtime, job_id, JobState.RUNNING)
    await reports_step(runtime, job_id, 1)
    return job_id


async def test_a_preempted_job_leaves_and_resumes_uncharged(world: World) -> None:
    runtime = await world.open(infra_retries=0)
    job_id = await started(world, runtime, max_retries=0)
    await runtime.faults.preempt(job_id)
    await comes_to(runtime, job_id, JobState.SUCCEEDED)
    assert await causes(runtime, job_id) == ["preempted", "succeeded"]
    assert await charges(runtime, job_id) == ["free"]
    resumed = (await world.fake.launched(job_id, 2)).resume_from
    assert [type(ref) for ref in resumed] == [CheckpointRef]
    assert await steps_of(runtime, job_id) == list(range(1, STEPS + 1))
    await keeps_its_promises(world, runtime, job_id)


async def test_a_preemption_outlives_the_service_that_was_asked(world: World) -> None:
    runtime = await world.open()
    job_id = await started(world, runtime)
    world.fake.be_unavailable("nobody may tell it yet")
    await runtime.faults.preempt(job_id)
    await world.drop(runtime)
    world.fake.be_unavailable(None)
    again = await world.open()
    await comes_to(again, job_id, JobState.SUCCEEDED)
    assert await causes(again, job_id) == ["preempted", "succeeded"]
    await keeps_its_promises(world, again, job_id)


async def test_a_cancel_during_a_preemption_ends_it(world: World) -> None:
    runtime = await world.open()
    job_id = await started(world, runtime)
    world.fake.be_unavailable("nobody may tell it yet")
    await runtime.faults.preempt(job_id)
    await runtime.jobs.cancel(job_id)
    world.fake.be_unavailable(None)
    job = await comes_to(runtime, job_id, JobState.CANCELLED)
    assert job.attempt == 1
    await keeps_its_promises(world, runtime, job_id)


async def over(runtime: Runtime, job_id: str, drill_id: str) -> views.Drill:
    async def ended() -> views.Drill | None:
        drill = await runtime.faults.get_drill(job_id, drill_id)
        return drill if drill.state.is_over else None

    drill = await eventually(ended, "the drill never ended")
    assert drill is not None
    return drill


def asking(kind: str, **more: object) -> DrillRequest:
    return DrillRequest.model_validate({"kind": kind, **more})


async def test_a_preemption_drill_passes_and_says_how_it_went(world: World) -> None:
    runtime = await world.open()
    job_id = await started(world, runtime)
    asked = await runtime.faults.drill(job_id, asking("preempt"))
    drill = await over(runtime, job_id, asked.id)
    assert (drill.state, drill.steps_lost) == (DrillState.PASSED, 0)
    assert drill.recovery_s is not None
    assert drill.recovery_s > 0
    await comes_to(runtime, job_id, JobState.SUCCEEDED)
    assert await charges(runtime, job_id) == ["free"]


async def test_a_drill_outlives_the_service_that_was_asked_and_charges_nobody(
    world: World,
) -> None:
    """This cluster mends nothing in place, so the drill has failed, and the job goes on."""
    runtime = await world.open(infra_retries=0)
    job_id = await started(world, runtime, workers=2, max_retries=0)
    world.fake.be_unavailable("nobody may tell it yet")
    asked = await runtime.faults.drill(job_id, asking("kill", rank=1))
    await world.drop(runtime)
    world.fake.be_unavailable(None)
    again = await world.open()
    drill = await over(again, job_id, asked.id)
    assert drill.state is DrillState.FAILED
    assert "not mended in place" in drill.message
    await comes_to(again, job_id, JobState.SUCCEEDED)
    assert await causes(again, job_id) == ["worker_lost", "succeeded"]
    assert await charges(again, job_id) == ["free"]
    await keeps_its_promises(world, again, job_id)


async def test_what_a_supervisor_tells_comes_to_the_job(world: World) -> None:
    runtime = await world.open()
    job_id = await started(world, runtime)
    lost = {"generation": 1, "ranks": [0], "code": "killed", "message": "rank 0 was killed"}
    world.fake.tell(job_id, FrameKind.REGROUPING, lost)
    await comes_to(runtime, job_id, JobState.RECOVERING)
    mended = {**lost, "step": 1, "steps_lost": 0, "recovery_s": 0.1, "world_size": 1}
    world.fake.tell(job_id, FrameKind.REGROUPED, mended)
    assert (await comes_to(runtime, job_id, JobState.RUNNING)).recoveries == 1
    used = {"slot_seconds": {"useful": 3.0, "recovering": 1.0}}
    world.fake.tell(job_id, FrameKind.LEDGER, used)

    async def booked() -> bool:
        return (await runtime.jobs.get(job_id)).goodput is not None

    await eventually(booked, "the ledger never came")
    await runtime.jobs.cancel(job_id)
    await comes_to(runtime, job_id, JobState.CANCELLED)
    assert (await runtime.faults.slot_seconds())["useful"] == 3.0
