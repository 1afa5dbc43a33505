"""Services that restart, fail midway, or run twice: nothing is lost or duplicated."""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import pytest
from sqlalchemy.orm import Session

from dray.views import JobState
from ray_workers.shared.commands import Command
from ray_workers.shared.contracts import AttemptSpec, Phase, PollReply
from ray_workers.shared.slices import Slice
from service.cluster.port import AttemptRef, ClusterUnavailable
from service.ingest import attempt_results
from service.runtime import Runtime
from service.storage.storage import Storage
from tests.fakes.attempt import FakeRank
from tests.marks import ONE_SET, RULES
from tests.unit.service.ingest.test_unreported import commit
from tests.unit.service.loops.world import (
    STEPS,
    World,
    causes,
    comes_to,
    keeps_its_promises,
    log_of,
    reports_step,
    steps_of,
)
from tests.wire import attempt_spec

pytestmark = RULES

MANY = 200


async def trains_long(rank: FakeRank) -> None:
    """Runs many small steps, with pauses for other processes."""
    for step in range(1, MANY + 1):
        rank.print(f"at {step}")
        rank.report(step, train_loss=1.0 / step)
        await asyncio.sleep(0.002)


async def is_whole(runtime: Runtime, job_id: str) -> None:
    """Every step of `trains_long` is stored once."""
    for rank in range(2):
        assert await steps_of(runtime, job_id, rank) == list(range(1, MANY + 1))
        lines = (await runtime.queries.logs(job_id, rank=rank)).items
        assert [line.text for line in lines] == [f"at {step}" for step in range(1, MANY + 1)]


@pytest.fixture(autouse=True)
def _plays(request: pytest.FixtureRequest) -> None:
    for name in ("world", "postgres_world"):
        if name in request.fixturenames:
            request.getfixturevalue(name).plays["trains_long"] = trains_long


async def test_a_service_that_was_away_finds_its_job_and_all_it_reported(world: World) -> None:
    async def trains_meanwhile(rank: FakeRank) -> None:
        rank.report(1, train_loss=1.0)
        await world.gate.wait()
        for step in range(2, STEPS + 1):
            rank.print(f"at {step}")
            rank.report(step, train_loss=1.0 / step)

    world.plays["trains_meanwhile"] = trains_meanwhile
    first = await world.open()
    job_id = await world.submit(first, "trains_meanwhile", workers=2)
    await reports_step(first, job_id, 1)
    await world.drop(first)
    world.gate.set()
    await world.fake.reached(job_id, Phase.ENDED)
    second = await world.open()
    job = await comes_to(second, job_id, JobState.SUCCEEDED)
    assert job.attempt == 1
    for rank in range(2):
        assert await steps_of(second, job_id, rank) == list(range(1, STEPS + 1))
    said = [f"at {step}" for step in range(2, STEPS + 1)]
    assert sorted(await log_of(second, job_id)) == sorted(said * 2)
    await keeps_its_promises(world, second, job_id)


@ONE_SET
async def test_services_that_die_one_after_the_other_lose_and_double_nothing(
    world: World,
) -> None:
    runtime = await world.open()
    job_id = await world.submit(runtime, "trains_long", workers=2)
    for step in (1, 40, 80, 120, 160):
        await reports_step(runtime, job_id, step)
        await world.drop(runtime)
        runtime = await world.open()
    await comes_to(runtime, job_id, JobState.SUCCEEDED)
    await is_whole(runtime, job_id)
    assert len(world.fake.launches) == 1
    await keeps_its_promises(world, runtime, job_id)


async def test_a_service_that_died_between_claim_and_launch_leaves_the_job_to_the_next(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    claimed = asyncio.Event()

    async def never_answers(spec: AttemptSpec) -> None:
        claimed.set()
        await asyncio.get_running_loop().create_future()

    with monkeypatch.context() as patch:
        patch.setattr(world.fake, "launch", never_answers)
        first = await world.open()
        job_id = await world.submit(first)
        await claimed.wait()
        await world.drop(first)
    world.set_timings(launch_grace_s=0.3)
    second = await world.open()
    await comes_to(second, job_id, JobState.SUCCEEDED)
    assert await causes(second, job_id) == ["supervisor_lost", "succeeded"]
    assert [spec.attempt for spec in world.fake.launches] == [2]


async def test_a_service_that_is_told_to_stop_finishes_the_launches_that_are_under_way(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next service would have to wait for a launch with an unknown result."""
    world.set_timings(last_launches_s=60.0)
    launch, asked = world.fake.launch, asyncio.Event()

    async def comes_late(spec: AttemptSpec) -> None:
        asked.set()
        await world.gate.wait()
        await launch(spec)

    monkeypatch.setattr(world.fake, "launch", comes_late)
    first = await world.open()
    job_id = await world.submit(first)
    await asked.wait()
    waits = await world.submit(first)
    dropping = asyncio.create_task(world.drop(first))
    await asyncio.sleep(0)
    world.gate.set()
    await dropping
    second = await world.open()
    for each in (job_id, waits):
        await comes_to(second, each, JobState.SUCCEEDED)
        assert await causes(second, each) == ["succeeded"]


async def test_a_reply_that_could_not_be_stored_is_asked_for_again(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    record, failures = attempt_results.record, iter(range(3))

    def fails_at_first(*arguments: Any, **named: Any) -> list[attempt_results.Recorded]:
        recorded = record(*arguments, **named)
        if next(failures, None) is not None:
            raise RuntimeError("the disk is full")
        return recorded

    monkeypatch.setattr(attempt_results, "record", fails_at_first)
    runtime = await world.open()
    job_id = await world.submit(runtime, "trains_long", workers=2)
    await comes_to(runtime, job_id, JobState.SUCCEEDED)
    assert next(failures, None) is None
    await is_whole(runtime, job_id)
    await keeps_its_promises(world, runtime, job_id)


async def test_a_follower_that_was_overtaken_goes_on_from_what_is_stored(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    poll, overtaken = world.fake.poll, asyncio.Event()

    def stores(
        ref: AttemptRef, asked: Mapping[str, int], reply: PollReply, session: Session
    ) -> None:
        now = datetime.now(UTC)
        received = attempt_results.Received(ref.job_id, ref.attempt, reply, asked)
        attempt_results.record(session, runtime.storage, [received], now)

    async def is_overtaken(
        ref: AttemptRef, cursor: Mapping[str, int], wait_s: float, max_bytes: int
    ) -> PollReply:
        """Let another process store the first frames while a reply with more frames is in
        transit."""
        reply = await poll(ref, cursor, wait_s, max_bytes)
        if len(reply.frames) > 8 and not overtaken.is_set():
            overtaken.set()
            other = await poll(ref, cursor, 0.0, 1)
            await runtime.database.write(functools.partial(stores, ref, cursor, other))
        return reply

    monkeypatch.setattr(world.fake, "poll", is_overtaken)
    runtime = await world.open()
    job_id = await world.submit(runtime, "trains_long", workers=2)
    await comes_to(runtime, job_id, JobState.SUCCEEDED)
    assert overtaken.is_set()
    await is_whole(runtime, job_id)


async def test_an_attempt_whose_acknowledgement_was_lost_is_forgotten_later(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    acknowledge, losses = world.fake.acknowledge, iter(range(2))

    async def lost_at_first(ref: AttemptRef) -> None:
        if next(losses, None) is not None:
            raise ClusterUnavailable("the gateway is gone")
        await acknowledge(ref)

    monkeypatch.setattr(world.fake, "acknowledge", lost_at_first)
    runtime = await world.open()
    job_id = await world.submit(runtime)
    await comes_to(runtime, job_id, JobState.SUCCEEDED)
    await world.fake.forgotten(job_id)
    assert next(losses, None) is None


def stray(world: World, play: str) -> AttemptSpec:
    """Return an attempt that is not in any database."""
    document = {"name": play, "script": {"entrypoint": "stray.py"}}
    slices = (Slice("node-a", 2),)
    return attempt_spec(job_id="job-stray", attempt=3, spec=document, slices=slices)


async def test_an_attempt_that_nobody_owns_is_ended(world: World) -> None:
    await world.fake.launch(stray(world, "waits"))
    await world.fake.reached("job-stray", Phase.RUNNING, 3)
    await world.open()
    await world.fake.forgotten("job-stray", 3)
    assert (await world.fake.snapshot()).nodes[0].available == {"CPU": 4.0}


async def test_an_attempt_that_nobody_owns_is_ended_though_its_supervisor_takes_no_request(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def is_stopped(_: AttemptRef, __: Command) -> None:
        raise ClusterUnavailable("TimeoutError")

    await world.fake.launch(stray(world, "waits"))
    await world.fake.reached("job-stray", Phase.RUNNING, 3)
    monkeypatch.setattr(world.fake, "send", is_stopped)
    await world.open()
    await world.fake.forgotten("job-stray", 3)


async def test_an_attempt_that_starts_while_orphans_are_looked_for_is_none(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.set_timings(unowned_period_s=0.0)
    attempts, looking = world.fake.attempts, asyncio.Event()

    async def slow_to_list() -> list[AttemptRef]:
        looking.set()
        await world.fake.until(lambda: world.fake.launches)
        return await attempts()

    monkeypatch.setattr(world.fake, "attempts", slow_to_list)
    runtime = await world.open()
    await looking.wait()
    job_id = await world.submit(runtime, "trains_long", workers=2)
    await comes_to(runtime, job_id, JobState.SUCCEEDED)
    assert await causes(runtime, job_id) == ["succeeded"]


async def test_two_services_run_each_job_once(postgres_world: World) -> None:
    """I1, I2, and I5 with two services on one database, one of which runs the loops."""
    world = postgres_world
    one, two = await world.open(), await world.open()
    jobs = [
        await world.submit((one, two)[number % 2], workers=1 + number % 3) for number in range(10)
    ]
    long = await world.submit(one, "trains_long", workers=2, priority=90)
    for job_id in [*jobs, long]:
        await comes_to(one, job_id, JobState.SUCCEEDED)
        await keeps_its_promises(world, two, job_id)
        assert await causes(one, job_id) == ["succeeded"]
    assert len(world.fake.launches) == len(jobs) + 1
    await is_whole(two, long)


async def test_when_one_of_two_services_dies_the_other_goes_on(postgres_world: World) -> None:
    world = postgres_world
    one, two = await world.open(), await world.open()
    job_id = await world.submit(one, "trains_long", workers=2)
    await reports_step(two, job_id, 20)
    await world.drop(one)
    await reports_step(two, job_id, 100)
    three = await world.open()
    await world.drop(two)
    await comes_to(three, job_id, JobState.SUCCEEDED)
    await is_whole(three, job_id)
    assert await causes(three, job_id) == ["succeeded"]


async def test_what_nodes_keep_for_a_job_goes_when_it_is_deleted(world: World) -> None:
    """This includes files on a node that was unavailable when the job was deleted."""
    world.set_timings(deleted_period_s=0.0)
    runtime = await world.open()
    stays, goes = await world.submit(runtime), await world.submit(runtime)
    for job_id in (stays, goes):
        await comes_to(runtime, job_id, JobState.SUCCEEDED)
    node = world.fake.nodes["node-a"]
    assert node.work_dirs == {stays, goes}
    world.fake.be_unavailable("it is away")
    await runtime.jobs.delete(goes)
    world.fake.be_unavailable(None)
    await world.fake.until(lambda: goes not in node.work_dirs, "its directory is kept")
    assert node.work_dirs == {stays}


async def commits_in_silence(world: World, runtime: Runtime) -> tuple[str, asyncio.Event]:
    """Return a job whose rank commits a checkpoint while no service is running; the event is set
    afterwards."""
    committed = asyncio.Event()

    async def commits(rank: FakeRank) -> None:
        rank.report(1, train_loss=1.0)
        if rank.attempt == 1:
            await world.gate.wait()
            commit(Storage(rank.spec.storage_url), rank.job_id, 1, 40)
            committed.set()
            await asyncio.get_running_loop().create_future()

    world.plays["commits"] = commits
    job_id = await world.submit(runtime, "commits")
    await reports_step(runtime, job_id, 1)
    return job_id, committed


async def test_a_job_resumes_from_what_it_saved_while_no_service_ran_and_its_node_then_died(
    world: World,
) -> None:
    first = await world.open()
    job_id, committed = await commits_in_silence(world, first)
    await world.drop(first)
    world.gate.set()
    await committed.wait()
    world.fake.lose_node("node-a")
    world.fake.add_node("node-b", {"CPU": 4.0})
    second = await world.open()
    await comes_to(second, job_id, JobState.SUCCEEDED)
    again = await world.fake.launched(job_id, 2)
    assert [ref.step for ref in again.resume_from] == [40]


async def test_a_storage_that_hangs_delays_the_end_of_an_attempt_and_does_not_keep_it(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, answers = threading.Event(), threading.Event()

    def hangs(*_: object) -> list[str]:
        asked.set()
        answers.wait()
        return []

    monkeypatch.setattr(Storage, "names", hangs)
    world.set_timings(storage_limit_s=0.05)
    runtime = await world.open()
    job_id, _ = await commits_in_silence(world, runtime)
    world.fake.lose_node("node-a")
    world.fake.add_node("node-b", {"CPU": 4.0})
    try:
        await comes_to(runtime, job_id, JobState.SUCCEEDED)
        assert asked.is_set()
    finally:
        answers.set()
