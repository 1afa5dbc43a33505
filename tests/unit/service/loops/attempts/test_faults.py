"""Jobs that lose ranks, supervisors, nodes, or the whole cluster."""

from __future__ import annotations

import asyncio

import pytest

from dray.filters import JobFilter
from dray.train.checkpoints import CheckpointRef
from dray.views import JobState
from ray_workers.shared.contracts import AttemptSpec, FrameKind, Phase
from ray_workers.shared.names import attempt_prefix
from tests.fakes.attempt import Exited, FakeRank
from tests.fakes.cluster import LostLaunch
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
    reports_step,
    steps_of,
    trains,
    waits,
)

pytestmark = ON_SQLITE


async def waits_once(rank: FakeRank) -> None:
    """Hangs after one step in the first attempt, and trains in the next."""
    await (waits if rank.attempt == 1 else trains)(rank)


@pytest.fixture(autouse=True)
def _plays(world: World) -> None:
    world.plays["waits_once"] = waits_once


async def test_a_launch_whose_answer_was_lost_is_not_repeated(world: World) -> None:
    world.fake.lost_launches.append(LostLaunch(arrives=True))
    runtime = await world.open()
    job_id = await world.submit(runtime)
    await comes_to(runtime, job_id, JobState.SUCCEEDED)
    assert await causes(runtime, job_id) == ["succeeded"]
    assert len(world.fake.launches) == 1


async def test_a_launch_that_never_arrived_ends_its_attempt_and_another_follows(
    world: World,
) -> None:
    world.fake.lost_launches.append(LostLaunch(arrives=False))
    runtime = await world.open()
    job_id = await world.submit(runtime)
    await comes_to(runtime, job_id, JobState.SUCCEEDED)
    assert await causes(runtime, job_id) == ["supervisor_lost", "succeeded"]
    assert await charges(runtime, job_id) == ["infra"]
    assert [spec.attempt for spec in world.fake.launches] == [2]


async def test_a_launch_that_fails_takes_no_other_along(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch = world.fake.launch

    async def launched(spec: AttemptSpec) -> None:
        if spec.attempt == 1:
            if spec.array_index == 0:
                raise RuntimeError("a launch of one job breaks")
            await world.gate.wait()
        await launch(spec)

    monkeypatch.setattr(world.fake, "launch", launched)
    runtime = await world.open()
    bad = await world.submit(runtime, array={"size": 2})
    array_id = (await runtime.jobs.get(bad)).array_id
    (other,) = (await runtime.jobs.list(JobFilter(array=array_id, array_index=1))).items

    async def has_ended() -> bool:
        return any(await causes(runtime, bad))

    await eventually(has_ended, "the launch that failed was never noticed")
    world.gate.set()
    for job_id in (bad, other.id):
        await comes_to(runtime, job_id, JobState.SUCCEEDED)
    assert await causes(runtime, bad) == ["supervisor_lost", "succeeded"]
    assert await causes(runtime, other.id) == ["succeeded"]


async def test_the_next_attempt_starts_only_when_the_last_is_seen_gone(world: World) -> None:
    async def lingers_once(rank: FakeRank) -> None:
        try:
            await waits_once(rank)
        except asyncio.CancelledError:
            await world.gate.wait()

    world.plays["lingers_once"] = lingers_once
    runtime = await world.open()
    job_id = await world.submit(runtime, "lingers_once", workers=2)
    await comes_to(runtime, job_id, JobState.RUNNING)
    asked = world.fake.num_polls
    world.fake.lose_supervisor(job_id)
    await world.fake.until(lambda: world.fake.num_polls > asked + 5)
    assert (await runtime.jobs.get(job_id)).state is JobState.RUNNING
    assert len(world.fake.launches) == 1
    world.gate.set()
    await comes_to(runtime, job_id, JobState.SUCCEEDED)
    assert await causes(runtime, job_id) == ["supervisor_lost", "succeeded"]
    await keeps_its_promises(world, runtime, job_id)


async def test_what_the_ranks_of_a_lost_supervisor_left_is_still_delivered(world: World) -> None:
    async def trains_and_waits(rank: FakeRank) -> None:
        await trains(rank)
        if rank.attempt == 1:
            world.fake.be_unavailable("no reply may be read yet")
            rank.print("last words")
            await waits(rank)

    world.plays["trains_and_waits"] = trains_and_waits
    runtime = await world.open()
    job_id = await world.submit(runtime, "trains_and_waits")
    await world.fake.until(lambda: world.fake.unavailable)
    world.fake.lose_supervisor(job_id)
    world.fake.be_unavailable(None)
    await comes_to(runtime, job_id, JobState.SUCCEEDED)
    *_, words, note = await log_of(runtime, job_id)
    assert words == "last words"
    assert "lines of this log may be missing" in note
    assert await charges(runtime, job_id) == ["infra"]
    await keeps_its_promises(world, runtime, job_id)


async def test_lost_supervisors_are_paid_for_until_that_budget_is_spent(world: World) -> None:
    runtime = await world.open(infra_retries=1)
    job_id = await world.submit(runtime, "waits", max_retries=0)
    for attempt in (1, 2):
        await world.fake.reached(job_id, Phase.RUNNING, attempt)
        world.fake.lose_supervisor(job_id, attempt)
    job = await comes_to(runtime, job_id, JobState.FAILED)
    assert job.reason.code == "supervisor_lost"
    assert "1 retries for faults of the cluster are used up" in job.reason.message
    await keeps_its_promises(world, runtime, job_id)


async def test_a_killed_rank_ends_its_group_and_the_job_is_tried_again(world: World) -> None:
    runtime = await world.open()
    job_id = await world.submit(runtime, "waits_once", workers=2, max_retries=0)
    await comes_to(runtime, job_id, JobState.RUNNING)
    world.fake.kill_rank(job_id, rank=1)
    await comes_to(runtime, job_id, JobState.SUCCEEDED)
    assert await causes(runtime, job_id) == ["worker_lost", "succeeded"]
    assert await charges(runtime, job_id) == ["infra"]
    events = (await runtime.queries.events(job_id)).items
    (lost,) = [event for event in events if event.code == "worker_lost"]
    assert (lost.data["rank"], lost.data["exit_code"]) == (1, -9)


async def test_a_job_whose_node_is_lost_goes_on_elsewhere(world: World) -> None:
    runtime = await world.open()
    job_id = await world.submit(runtime, "waits_once", workers=4, max_retries=0)
    await comes_to(runtime, job_id, JobState.RUNNING)
    world.fake.add_node("node-b", {"CPU": 4.0})
    world.fake.lose_node("node-a")
    await comes_to(runtime, job_id, JobState.SUCCEEDED)
    first, *between, last = await causes(runtime, job_id)
    assert (first, last) == ("worker_lost", "succeeded")
    # The view of the cluster can lag behind, so the lost node may be tried again.
    assert set(between) <= {"node_lost"}
    assert world.fake.launches[-1].slices[0].node_id == "node-b"
    await keeps_its_promises(world, runtime, job_id)


async def test_a_job_whose_cluster_is_lost_is_tried_again_at_no_cost(world: World) -> None:
    runtime = await world.open(infra_retries=0)
    job_id = await world.submit(runtime, "waits_once", max_retries=0)
    await comes_to(runtime, job_id, JobState.RUNNING)
    world.fake.restart()
    await comes_to(runtime, job_id, JobState.SUCCEEDED)
    *before, last = await causes(runtime, job_id)
    assert (set(before), last) == ({"node_lost"}, "succeeded")
    assert set(await charges(runtime, job_id)) == {"free"}
    await keeps_its_promises(world, runtime, job_id)


async def test_a_cluster_that_does_not_answer_for_a_while_costs_nothing(world: World) -> None:
    async def trains_by_halves(rank: FakeRank) -> None:
        rank.report(1, train_loss=1.0)
        await world.gate.wait()
        for step in range(2, STEPS + 1):
            rank.report(step, train_loss=1.0 / step)

    world.plays["trains_by_halves"] = trains_by_halves
    runtime = await world.open()
    job_id = await world.submit(runtime, "trains_by_halves", workers=2)
    await reports_step(runtime, job_id, 1)
    world.fake.be_unavailable("the gateway is gone")
    world.gate.set()
    await world.fake.reached(job_id, Phase.ENDED)
    assert (await runtime.jobs.get(job_id)).state is JobState.RUNNING
    world.fake.be_unavailable(None)
    await comes_to(runtime, job_id, JobState.SUCCEEDED)
    assert await causes(runtime, job_id) == ["succeeded"]
    for rank in range(2):
        assert await steps_of(runtime, job_id, rank) == list(range(1, STEPS + 1))


async def test_a_failing_job_uses_its_own_retries_and_then_fails(world: World) -> None:
    runtime = await world.open(infra_retries=0)
    job_id = await world.submit(runtime, "fails", max_retries=2)
    job = await comes_to(runtime, job_id, JobState.FAILED)
    assert (job.reason.code, job.attempt) == ("user_error", 3)
    assert "the sky is red" in job.reason.message
    assert "max_retries is 2" in job.reason.message
    assert await charges(runtime, job_id) == ["user", "user"]
    await keeps_its_promises(world, runtime, job_id)


async def test_a_rank_that_exits_without_a_word_is_the_users_error(world: World) -> None:
    async def exits(rank: FakeRank) -> None:
        raise Exited(3)

    world.plays["exits"] = exits
    runtime = await world.open()
    job_id = await world.submit(runtime, "exits", max_retries=0)
    job = await comes_to(runtime, job_id, JobState.FAILED)
    assert (job.reason.code, job.attempt) == ("user_error", 1)
    assert "rank 0 exited with code 3" in job.reason.message


async def test_bad_data_is_not_tried_again(world: World) -> None:
    runtime = await world.open()
    job_id = await world.submit(runtime, "lacks_data", max_retries=5)
    job = await comes_to(runtime, job_id, JobState.FAILED)
    assert (job.reason.code, job.attempt) == ("bad_data", 1)


async def test_a_retry_resumes_from_the_newest_checkpoint_and_each_step_counts_once(
    world: World,
) -> None:
    """I5 across attempts: steps after the checkpoint come from the second attempt."""

    def url(rank: FakeRank, step: int) -> str:
        prefix = attempt_prefix(rank.job_id, rank.attempt)
        return f"{rank.spec.storage_url}/{prefix}/checkpoints/{step}"

    async def checkpoints(rank: FakeRank) -> None:
        begin = rank.spec.resume_from[0].step if rank.spec.resume_from else 0
        rank.emit(FrameKind.RESUMED, {"step": begin, "url": ""})
        for step in range(begin + 1, STEPS + 1):
            rank.report(step, train_loss=float(rank.attempt))
            if step % 2 == 0:
                body = {"step": step, "url": url(rank, step), "size_bytes": 1}
                rank.emit(FrameKind.CHECKPOINT, body | {"manifest_sha256": "0" * 64})
            if step == 3 and rank.attempt == 1:
                raise RuntimeError("the loss is not finite")

    world.plays["checkpoints"] = checkpoints
    runtime = await world.open()
    job_id = await world.submit(runtime, "checkpoints")
    await comes_to(runtime, job_id, JobState.SUCCEEDED)
    first, second = world.fake.launches
    prefix = f"{first.storage_url}/{attempt_prefix(job_id, 1)}"
    assert first.resume_from == ()
    assert second.resume_from == (CheckpointRef(f"{prefix}/checkpoints/2", 2, "0" * 64),)
    series = (await runtime.queries.metrics(job_id)).series["train/loss"]
    assert series.steps == list(range(1, STEPS + 1))
    assert series.values == [1.0, 1.0, 2.0, 2.0, 2.0]
    assert [a.resume_step for a in (await runtime.queries.attempts(job_id)).items] == [0, 2]


async def test_two_jobs_fail_and_succeed_apart(world: World) -> None:
    runtime = await world.open()
    bad = await world.submit(runtime, "fails", max_retries=0)
    good = await world.submit(runtime, workers=3)
    await comes_to(runtime, bad, JobState.FAILED)
    await comes_to(runtime, good, JobState.SUCCEEDED)
    for job_id in (bad, good):
        await world.fake.forgotten(job_id)
    assert (await world.fake.snapshot()).nodes[0].available == {"CPU": 4.0}
