"""Users' commands to running jobs reach the cluster, even if the service restarts."""

from __future__ import annotations

import asyncio
import math
import time
from typing import Any

import pytest

from dray import views
from dray.requests import DrillRequest
from dray.train.checkpoints import CheckpointRef
from dray.views import DrillState, JobState
from ray_workers.shared.contracts import FrameKind
from ray_workers.shared.names import attempt_prefix
from service.runtime import Runtime
from tests.fakes.attempt import FakeRank
from tests.marks import RULES
from tests.unit.service.helpers import SHA
from tests.unit.service.loops.world import (
    PATIENCE_S,
    STEPS,
    World,
    causes,
    charges,
    comes_to,
    eventually,
    keeps_its_promises,
    reports_step,
    says,
    steps_of,
    waits,
)

pytestmark = RULES


async def leaves(rank: FakeRank) -> None:
    """Saves step 1 and hangs in the first attempt, and continues from there in the next."""
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


async def started(world: World, runtime: Runtime, **fields: Any) -> str:
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
    world.fake.be_unavailable("no command may reach it yet")
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
    world.fake.be_unavailable("no command may reach it yet")
    await runtime.faults.preempt(job_id)
    await runtime.jobs.cancel(job_id)
    world.fake.be_unavailable(None)
    job = await comes_to(runtime, job_id, JobState.CANCELLED)
    assert job.attempt == 1
    await keeps_its_promises(world, runtime, job_id)


async def test_what_is_on_a_drained_node_leaves_in_time_and_resumes_on_another(
    world: World,
) -> None:
    runtime = await world.open(infra_retries=0, preempt_grace_s=600.0)
    job_id = await started(world, runtime, max_retries=0)
    world.fake.add_node("node-b", {"CPU": 4.0})
    world.fake.drain_node("node-a", by=time.time() + 60.0)
    await comes_to(runtime, job_id, JobState.SUCCEEDED)
    assert await causes(runtime, job_id) == ["preempted", "succeeded"]
    assert await charges(runtime, job_id) == ["free"]
    assert [p.node_id for p in (await world.fake.launched(job_id, 2)).slices] == ["node-b"]
    (asked,) = await preemptions(runtime, job_id)
    assert asked.code == "node_drained"
    assert "node-a.fake is being drained" in asked.message
    assert 30.0 < asked.data["grace_s"] < 60.0, "before the node goes, not when the grace is over"
    await keeps_its_promises(world, runtime, job_id)


async def test_a_node_is_drained_without_a_time_and_the_grace_is_the_setting(world: World) -> None:
    runtime = await world.open(preempt_grace_s=7.0)
    job_id = await started(world, runtime)
    world.fake.add_node("node-b", {"CPU": 4.0})
    world.fake.drain_node("node-a", by=math.inf)
    await comes_to(runtime, job_id, JobState.SUCCEEDED)
    assert [event.data["grace_s"] for event in await preemptions(runtime, job_id)] == [7.0]


async def test_jobs_save_before_a_stop_that_takes_the_cluster_along(world: World) -> None:
    runtime = await world.open(ray_address="local", infra_retries=0)
    job_id = await started(world, runtime, max_retries=0)
    waiting = await world.submit(runtime, "trains", workers=4)
    told: list[str] = []
    await runtime.clear_cluster(asyncio.Event(), told.append)
    assert len(told) == 1
    job = await runtime.jobs.get(job_id)
    assert (job.state, job.reason.code) == (JobState.QUEUED, "preempted")
    assert (await runtime.jobs.get(waiting)).state is JobState.QUEUED, (
        "its slots are for no other job"
    )
    await world.drop(runtime)
    again = await world.open(ray_address="local")
    await comes_to(again, job_id, JobState.SUCCEEDED)
    assert await charges(again, job_id) == ["free"]
    await keeps_its_promises(world, again, job_id)


async def test_a_stop_in_a_hurry_waits_for_nobody(world: World) -> None:
    runtime = await world.open(ray_address="local", preempt_grace_s=3600.0)
    job_id = await started(world, runtime)
    hurry = asyncio.Event()
    world.fake.be_unavailable("no command may reach it")
    await asyncio.wait_for(runtime.clear_cluster(hurry, lambda _: hurry.set()), PATIENCE_S)
    assert (await runtime.jobs.get(job_id)).state is JobState.RUNNING


async def test_nobody_is_asked_where_the_cluster_stays(world: World) -> None:
    runtime = await world.open()
    job_id = await started(world, runtime)
    await runtime.clear_cluster(asyncio.Event(), lambda line: pytest.fail(line))
    assert await preemptions(runtime, job_id) == []


async def test_a_job_that_has_run_waits_for_a_node_like_the_one_that_went(world: World) -> None:
    """A job that can never start fails after a while, but this one could start."""
    world.set_timings(impossible_grace_s=0.1)
    runtime = await world.open(infra_retries=0)
    job_id = await started(world, runtime, workers=4)
    world.fake.add_node("small", {"CPU": 2.0})
    world.fake.drain_node("node-a", by=time.time() + 60.0)
    await says(runtime, job_id, "unsatisfiable")
    other = await world.submit(runtime, "trains", workers=2, priority=90)
    await comes_to(runtime, other, JobState.SUCCEEDED)
    assert (await runtime.jobs.get(job_id)).state is JobState.QUEUED
    world.fake.add_node("node-b", {"CPU": 4.0})
    await comes_to(runtime, job_id, JobState.SUCCEEDED)
    assert await causes(runtime, job_id) == ["preempted", "succeeded"]


async def preemptions(runtime: Runtime, job_id: str) -> list[views.Event]:
    events = (await runtime.queries.events(job_id)).items
    return [event for event in events if event.type == "preempting"]


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
    """This cluster does not recover in place, so the drill fails, and the job continues."""
    runtime = await world.open(infra_retries=0)
    job_id = await started(world, runtime, workers=2, max_retries=0)
    world.fake.be_unavailable("no command may reach it yet")
    asked = await runtime.faults.drill(job_id, asking("kill", rank=1))
    await world.drop(runtime)
    world.fake.be_unavailable(None)
    again = await world.open()
    drill = await over(again, job_id, asked.id)
    assert drill.state is DrillState.FAILED
    assert "not recover in place" in drill.message
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


async def test_a_long_job_makes_room_for_a_new_one_and_goes_on_after_it(world: World) -> None:
    runtime = await world.open(min_run_s=0)
    long_id = await world.submit(runtime, "leaves", workers=4, max_retries=0)
    await reports_step(runtime, long_id, 1)
    new_id = await world.submit(runtime, "trains", workers=2)
    await comes_to(runtime, new_id, JobState.SUCCEEDED)
    await comes_to(runtime, long_id, JobState.SUCCEEDED)
    assert await causes(runtime, long_id) == ["preempted", "succeeded"]
    assert await charges(runtime, long_id) == ["free"]
    events = (await runtime.queries.events(long_id)).items
    (asked,) = [event for event in events if event.code == "makes_room"]
    because = "which comes first until its duration is known"
    assert asked.message.endswith(f"releases its slots for job {new_id}, {because}")
    await keeps_its_promises(world, runtime, long_id)


async def test_a_script_makes_room_only_for_a_higher_priority(world: World) -> None:
    runtime = await world.open(min_run_s=0)
    script = {"recipe": None, "script": {"entrypoint": "train.py"}}
    script_id = await world.submit(runtime, "waits", workers=4, **script)
    await comes_to(runtime, script_id, JobState.RUNNING)
    equal_id = await world.submit(runtime, "trains")
    await says(runtime, equal_id, "waiting_for_slots")
    urgent_id = await world.submit(runtime, "trains", priority=51)
    await comes_to(runtime, urgent_id, JobState.SUCCEEDED)
    assert (await causes(runtime, script_id))[0] == "preempted"
    await runtime.jobs.cancel(script_id)
