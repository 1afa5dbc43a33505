"""Jobs on a working cluster: when jobs start, and the data that they leave behind."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime

import pytest

from dray.requests import JobChangeRequest
from dray.spec import JobSpec
from dray.views import JobState
from ray_workers.shared.commands import Command
from ray_workers.shared.contracts import Phase
from ray_workers.shared.quarantine import Quarantined
from ray_workers.shared.self_tests import NodeTest, TestPhase
from service.cluster.port import AttemptRef
from service.db.models import LogChunkRow
from service.jobs.changes import JobChanges
from service.nodes.checks import NodeChecks
from service.nodes.withheld import WithheldNodes
from tests.fakes.attempt import FakeRank
from tests.marks import ON_SQLITE
from tests.unit.service.loops.world import (
    STEPS,
    World,
    causes,
    charges,
    comes_to,
    eventually,
    keeps_its_promises,
    log_of,
    says,
    steps_of,
    withhold,
)


async def test_a_submitted_job_is_launched_and_leaves_all_it_reported(world: World) -> None:
    runtime = await world.open()
    job_id = await world.submit(runtime, workers=2)
    job = await comes_to(runtime, job_id, JobState.SUCCEEDED)
    assert (job.attempt, job.world_size, job.reason.code) == (1, 2, "succeeded")
    assert job.summary["train/loss"] == 1.0 / STEPS
    assert job.started_at is not None
    assert job.first_step_at is not None
    for rank in range(2):
        assert await steps_of(runtime, job_id, rank) == list(range(1, STEPS + 1))
    lines = (await runtime.queries.logs(job_id, rank=1)).items
    assert [line.text for line in lines] == [f"rank 1 is at {n}" for n in range(1, STEPS + 1)]
    assert await causes(runtime, job_id) == ["succeeded"]
    assert len(world.fake.launches) == 1
    await keeps_its_promises(world, runtime, job_id)


async def test_a_gang_goes_into_one_domain_of_the_levels_that_the_operator_names(
    world: World,
) -> None:
    for name, rack in {"node-b": "r2", "node-c": "r1", "node-d": "r2", "node-e": "r1"}.items():
        world.fake.add_node(name, {"CPU": 2.0 if rack == "r1" else 3.0, f"label:rack={rack}": 1.0})
    runtime = await world.open(topology=("rack",))
    wants = {"num_workers": 6, "required_topology": "rack"}
    document = {"name": "waits", "recipe": "image_classification", "resources": wants}
    first, _ = await runtime.jobs.submit(JobSpec.model_validate(document))
    await comes_to(runtime, first.id, JobState.RUNNING)
    (launch,) = world.fake.launches
    assert {part.node_id for part in launch.slices} == {"node-b", "node-d"}
    assert launch.bundle == {"CPU": 1.0}
    second, _ = await runtime.jobs.submit(JobSpec.model_validate(document))
    told = (await says(runtime, second.id, "waiting_for_domain")).reason.message
    assert told.startswith("needs 6 workers of 1 CPU within one rack; 8 are free, but only 4")


async def test_slots_in_quarantine_are_given_to_nobody(world: World) -> None:
    kept = Quarantined("job-of-before", 1, 1, {"CPU": 1.0}, "pid 7 is there", 0.0)
    world.fake.nodes["node-a"].quarantined = [kept]
    runtime = await world.open()
    job_id = await world.submit(runtime, workers=4)
    await says(runtime, job_id, "waiting_for_slots")
    await comes_to(runtime, await world.submit(runtime, workers=3, priority=90), JobState.SUCCEEDED)
    assert (await runtime.jobs.get(job_id)).state is JobState.QUEUED
    world.fake.nodes["node-a"].quarantined = []
    await comes_to(runtime, job_id, JobState.SUCCEEDED)


async def test_slots_in_quarantine_of_an_attempt_that_lives_are_counted_once(world: World) -> None:
    runtime = await world.open()
    holds = await world.submit(runtime, "waits", workers=2)
    await comes_to(runtime, holds, JobState.RUNNING)
    kept = Quarantined(holds, 1, 2, {"CPU": 2.0}, "pid 7 is there", 0.0)
    world.fake.nodes["node-a"].quarantined = [kept]

    async def is_seen() -> bool:
        latest = runtime.watch and runtime.watch.latest
        return bool(latest and latest.nodes[0].quarantined)

    await eventually(is_seen, "the quarantine was never seen")
    await comes_to(runtime, await world.submit(runtime, workers=2), JobState.SUCCEEDED)


async def test_the_service_is_ready_and_shows_its_cluster(world: World) -> None:
    runtime = await world.open()

    async def ready() -> bool:
        return (await runtime.ready()).ok and (await runtime.queries.cluster()).connected

    await eventually(ready, "the service never became ready")
    cluster = await runtime.queries.cluster()
    (node,) = cluster.nodes
    assert (node.node_id, node.resources, node.accepted) == ("node-a", {"CPU": 4.0}, True)


async def test_a_gang_starts_whole_or_waits_and_says_for_whom(world: World) -> None:
    runtime = await world.open()
    first = await world.submit(runtime, "waits", workers=3)
    await comes_to(runtime, first, JobState.RUNNING)
    second = await world.submit(runtime, workers=2)
    waiting = await says(runtime, second, "waiting_for_slots")
    assert (waiting.position, waiting.blocked_by) == (1, [first])
    assert "needs 2 workers" in waiting.reason.message
    await runtime.jobs.cancel(first)
    await comes_to(runtime, second, JobState.SUCCEEDED)
    assert [spec.job_id for spec in world.fake.launches] == [first, second]


async def test_of_waiting_jobs_the_higher_priority_starts_first(world: World) -> None:
    runtime = await world.open()
    holder = await world.submit(runtime, "waits", workers=4)
    await comes_to(runtime, holder, JobState.RUNNING)
    low, middle, high = [
        await world.submit(runtime, workers=4, priority=priority) for priority in (10, 50, 90)
    ]
    await says(runtime, low, "waiting_for_slots")
    await runtime.jobs.cancel(holder)
    for job_id in (low, middle, high):
        await comes_to(runtime, job_id, JobState.SUCCEEDED)
    assert [spec.job_id for spec in world.fake.launches] == [holder, high, middle, low]


async def test_many_gangs_share_the_slots_and_none_is_launched_in_vain(world: World) -> None:
    """I1 to I3: every gang got its slots at its first launch, so no slot was assigned twice."""
    runtime = await world.open(start_timeout_s=0.05)
    jobs = [await world.submit(runtime, workers=1 + n % 4) for n in range(12)]
    for job_id in jobs:
        await comes_to(runtime, job_id, JobState.SUCCEEDED)
        await keeps_its_promises(world, runtime, job_id)
    assert len(world.fake.launches) == len(jobs)


async def test_slots_pass_on_only_when_the_processes_that_held_them_are_gone(
    world: World,
) -> None:
    async def lingers(rank: FakeRank) -> None:
        rank.report(1, train_loss=1.0)
        try:
            await asyncio.get_running_loop().create_future()
        except asyncio.CancelledError:
            await world.gate.wait()

    world.plays["lingers"] = lingers
    runtime = await world.open(start_timeout_s=0.05)
    first = await world.submit(runtime, "lingers", workers=4)
    await comes_to(runtime, first, JobState.RUNNING)
    second = await world.submit(runtime, workers=1)
    await runtime.jobs.cancel(first)
    await world.fake.reached(first, Phase.STOPPING)
    assert (await says(runtime, second, "room_is_made")).blocked_by == [first]
    assert len(world.fake.launches) == 1
    world.gate.set()
    await comes_to(runtime, second, JobState.SUCCEEDED)
    assert await causes(runtime, second) == ["succeeded"]


async def test_slots_that_others_hold_cost_the_job_nothing(world: World) -> None:
    world.fake.use_elsewhere("node-a", {"CPU": 4.0})
    runtime = await world.open(start_timeout_s=0.05)
    job_id = await world.submit(runtime)
    await world.fake.launched(job_id, attempt=2)
    world.fake.use_elsewhere("node-a", {})
    await comes_to(runtime, job_id, JobState.SUCCEEDED)
    *before, last = await causes(runtime, job_id)
    assert set(before) == {"slots_unavailable"}
    assert last == "succeeded"
    assert set(await charges(runtime, job_id)) == {"free"}


async def test_on_a_shared_cluster_only_free_slots_are_planned_with(world: World) -> None:
    world.fake.shared = True
    world.fake.use_elsewhere("node-a", {"CPU": 3.0})
    runtime = await world.open()
    job_id = await world.submit(runtime, workers=2)
    waiting = await says(runtime, job_id, "waiting_for_slots")
    assert "other programs use the rest" in waiting.reason.message
    assert not world.fake.launches
    world.fake.use_elsewhere("node-a", {})
    await comes_to(runtime, job_id, JobState.SUCCEEDED)


async def test_a_job_too_large_for_the_cluster_waits_a_while_for_a_node(world: World) -> None:
    world.fake.be_unavailable("it is starting")
    runtime = await world.open()
    job_id = await world.submit(runtime, workers=6)
    world.fake.be_unavailable(None)
    waiting = await says(runtime, job_id, "unsatisfiable")
    assert (waiting.state, waiting.position) == (JobState.QUEUED, 1)
    world.fake.add_node("node-b", {"CPU": 2.0})
    await comes_to(runtime, job_id, JobState.SUCCEEDED)
    assert sorted((part.node_id, part.num_workers) for part in world.fake.launches[0].slices) == [
        ("node-a", 4),
        ("node-b", 2),
    ]


async def test_a_job_too_large_for_the_cluster_fails_after_the_grace(world: World) -> None:
    world.set_timings(impossible_grace_s=0.2)
    world.fake.be_unavailable("it is starting")
    runtime = await world.open()
    job_id = await world.submit(runtime, workers=6)
    world.fake.be_unavailable(None)
    job = await comes_to(runtime, job_id, JobState.FAILED)
    assert job.reason.code == "unsatisfiable"
    assert "room for 4" in job.reason.message
    await keeps_its_promises(world, runtime, job_id)


async def test_a_refused_node_carries_nothing(world: World) -> None:
    world.fake.nodes["node-a"].problem = "it runs dray 0.0.1"
    runtime = await world.open()
    job_id = await world.submit(runtime)
    await says(runtime, job_id, "no_nodes")
    assert not world.fake.launches
    world.fake.nodes["node-a"].problem = None
    await comes_to(runtime, job_id, JobState.SUCCEEDED)


async def test_readiness_names_a_node_that_gets_no_work_and_the_service_stays_ready(
    world: World,
) -> None:
    runtime = await world.open()
    await comes_to(runtime, await world.submit(runtime), JobState.SUCCEEDED)
    assert (await runtime.ready()).checks["nodes"] == "ok"
    why = "the node agent has not responded since 2026-01-01 12:00:00 UTC"
    world.fake.nodes["node-a"].problem = why

    async def said() -> bool:
        return (await runtime.ready()).checks["nodes"] == f"node-a.fake: {why}"

    await eventually(said, "the node was never named")
    assert (await runtime.ready()).ok


async def test_the_full_disk_of_a_node_is_named_and_the_node_still_carries_jobs(
    world: World,
) -> None:
    world.fake.nodes["node-a"].full = "the disk of /tmp is full: 1 MiB free"
    runtime = await world.open()
    job_id = await world.submit(runtime)
    await comes_to(runtime, job_id, JobState.SUCCEEDED)
    checks = (await runtime.ready()).checks
    assert checks["storage"] == "full: node-a.fake: the disk of /tmp is full: 1 MiB free"
    assert checks["nodes"] == "ok"
    shown = {node.node_id: node for node in (await runtime.queries.cluster()).nodes}
    assert shown["node-a"].accepted
    assert shown["node-a"].reason == "the disk of /tmp is full: 1 MiB free"


async def test_while_the_cluster_is_away_jobs_wait_and_say_so(world: World) -> None:
    world.fake.be_unavailable("Ray can't be reached")
    runtime = await world.open()
    job_id = await world.submit(runtime)
    await says(runtime, job_id, "cluster_unavailable")
    readiness = await runtime.ready()
    assert (readiness.ok, readiness.checks["cluster"]) == (False, "Ray can't be reached")
    assert readiness.checks["loops"] == "ok"
    world.fake.be_unavailable(None)
    await comes_to(runtime, job_id, JobState.SUCCEEDED)


async def test_a_job_that_is_cancelled_while_it_waits_never_starts(world: World) -> None:
    runtime = await world.open()
    holder = await world.submit(runtime, "waits", workers=4)
    await comes_to(runtime, holder, JobState.RUNNING)
    job_id = await world.submit(runtime)
    await says(runtime, job_id, "waiting_for_slots")
    assert (await runtime.jobs.cancel(job_id)).state is JobState.CANCELLED
    await runtime.jobs.cancel(holder)
    await comes_to(runtime, holder, JobState.CANCELLED)
    last = await world.submit(runtime)
    await comes_to(runtime, last, JobState.SUCCEEDED)
    assert [spec.job_id for spec in world.fake.launches] == [holder, last]


async def test_a_job_that_is_cancelled_while_it_gets_its_slots_ends(world: World) -> None:
    world.fake.use_elsewhere("node-a", {"CPU": 4.0})
    runtime = await world.open()
    job_id = await world.submit(runtime)
    await world.fake.launched(job_id)
    assert (await runtime.jobs.cancel(job_id)).state is JobState.CANCELLING
    job = await comes_to(runtime, job_id, JobState.CANCELLED)
    assert job.reason.code == "cancelled_by_user"
    assert await causes(runtime, job_id) == ["stopped"]
    await keeps_its_promises(world, runtime, job_id)


async def test_a_running_job_that_is_cancelled_is_stopped_and_frees_its_slots(
    world: World,
) -> None:
    runtime = await world.open()
    job_id = await world.submit(runtime, "waits", workers=4)
    await comes_to(runtime, job_id, JobState.RUNNING)
    await runtime.jobs.cancel(job_id)
    await comes_to(runtime, job_id, JobState.CANCELLED)
    await keeps_its_promises(world, runtime, job_id)
    assert await log_of(runtime, job_id) == []
    assert (await world.fake.snapshot()).nodes[0].available == {"CPU": 4.0}


async def test_a_cancel_that_races_with_a_good_end_leaves_the_end(world: World) -> None:
    async def ends_when_told(rank: FakeRank) -> None:
        rank.report(1, train_loss=1.0)
        await world.gate.wait()

    world.plays["ends_when_told"] = ends_when_told
    runtime = await world.open()
    job_id = await world.submit(runtime, "ends_when_told")
    await comes_to(runtime, job_id, JobState.RUNNING)
    world.fake.be_unavailable("the gateway is gone")
    world.gate.set()
    await world.fake.reached(job_id, Phase.ENDED)
    assert (await runtime.jobs.cancel(job_id)).state is JobState.CANCELLING
    world.fake.be_unavailable(None)
    job = await comes_to(runtime, job_id, JobState.SUCCEEDED)
    assert job.reason.code == "succeeded"
    await keeps_its_promises(world, runtime, job_id)


async def test_a_cancel_reaches_a_cluster_that_was_away(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    send, tried = world.fake.send, asyncio.Event()

    async def noted(ref: AttemptRef, command: Command) -> None:
        tried.set()
        await send(ref, command)

    monkeypatch.setattr(world.fake, "send", noted)
    runtime = await world.open()
    job_id = await world.submit(runtime, "waits")
    await comes_to(runtime, job_id, JobState.RUNNING)
    world.fake.be_unavailable("the gateway is gone")
    await runtime.jobs.cancel(job_id)
    await tried.wait()
    world.fake.be_unavailable(None)
    await comes_to(runtime, job_id, JobState.CANCELLED)


async def test_a_job_past_its_running_time_fails(world: World) -> None:
    runtime = await world.open()
    job_id = await world.submit(runtime, "waits", max_runtime_s=1, max_retries=5)
    job = await comes_to(runtime, job_id, JobState.FAILED)
    assert (job.reason.code, job.attempt) == ("runtime_exceeded", 1)


async def test_the_running_time_of_a_running_job_is_lowered(world: World) -> None:
    runtime = await world.open()
    job_id = await world.submit(runtime, "waits", max_runtime_s=600)
    await comes_to(runtime, job_id, JobState.RUNNING)
    changes = JobChanges(runtime.database, runtime.settings)
    wanted = JobChangeRequest.model_validate({"document": {"max_runtime_s": 2}})
    await changes.change(job_id, wanted)
    job = await comes_to(runtime, job_id, JobState.FAILED)
    assert job.reason.code == "runtime_exceeded"


async def test_while_the_storage_is_full_waiting_jobs_wait_and_running_ones_go_on(
    world: World,
) -> None:
    runtime = await world.open(storage_quota_bytes=1)
    running = await world.submit(runtime, "waits")
    await comes_to(runtime, running, JobState.RUNNING)
    waiting = await world.submit(runtime, "trains", workers=4)
    row = LogChunkRow(
        job_id=running,
        attempt=9,
        rank=0,
        first_line=0,
        num_lines=1,
        size_bytes=10,
        incarnation=0,
        next_number=1,
        text="",
    )
    await runtime.database.write(lambda s: s.add(row))
    await runtime.jobs.storage_watch.look(datetime.now(UTC))
    explanation = await says(runtime, waiting, "storage_full")
    assert "its quota is 1 bytes" in explanation.reason.message
    readiness = await runtime.ready()
    assert readiness.ok
    assert readiness.checks["storage"].startswith("full: the storage holds")
    assert (await runtime.jobs.get(running)).state is JobState.RUNNING
    await runtime.jobs.cancel(running)
    await comes_to(runtime, running, JobState.CANCELLED)
    await runtime.jobs.delete(running)
    await comes_to(runtime, waiting, JobState.SUCCEEDED)


@ON_SQLITE
@pytest.mark.parametrize(("setting", "told"), [(60.0, 60.0), (0.0, None)])
async def test_an_attempt_knows_how_often_system_metrics_are_sampled(
    world: World, setting: float, told: float | None
) -> None:
    runtime = await world.open(system_metrics_s=setting)
    job_id = await world.submit(runtime, "trains")
    assert (await world.fake.launched(job_id)).system_metrics_s == told


async def test_a_waiting_job_names_the_withheld_nodes_that_it_could_use(world: World) -> None:
    runtime = await world.open()
    holds = await world.submit(runtime, "waits", workers=2)
    await comes_to(runtime, holds, JobState.RUNNING)
    await withhold(runtime, "node-a.fake")
    job_id = await world.submit(runtime, workers=1)

    async def message() -> str:
        return (await runtime.jobs.get(job_id)).reason.message

    async def is_told() -> bool:
        return "node node-a.fake gets no new work" in await message()

    await eventually(is_told, "the withheld node is not named")
    assert await message() == (
        f"needs 1 worker of 1 CPU; 0 are free, and job {holds} holds 2 slots on suitable nodes; "
        "node node-a.fake gets no new work because of a fault until an admin releases it (see "
        "`dray cluster`)"
    )
    await runtime.jobs.cancel(holds)
    await eventually(is_told, "the withheld node is not named")
    await WithheldNodes(runtime.database).release("node-a.fake")
    await comes_to(runtime, job_id, JobState.SUCCEEDED)


async def test_a_waiting_job_names_the_tested_nodes_that_it_could_use(world: World) -> None:
    runtime = await world.open()
    holds = await world.submit(runtime, "waits", workers=2)
    await comes_to(runtime, holds, JobState.RUNNING)
    world.fake.tests["node-a"] = NodeTest(TestPhase.RUNNING)
    await NodeChecks(runtime.database).check("node-a.fake")
    job_id = await world.submit(runtime, workers=1)

    async def is_told() -> bool:
        message = (await runtime.jobs.get(job_id)).reason.message
        return message.endswith("; node node-a.fake gets no new work until its self-test is done")

    await eventually(is_told, "the tested node is not named")
