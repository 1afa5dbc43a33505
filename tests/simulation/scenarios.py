"""Short scenarios in which a fault is injected at every step in turn."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from sqlalchemy import Engine, text

from dray.schedule_requests import ScheduleChangeRequest, ScheduleRequest
from dray.views import JobState
from service.domain import ids
from service.domain.callers import Caller
from service.domain.errors import ScheduleExists
from service.runtime import Runtime
from service.schedules.service import Schedules
from tests.simulation import clock
from tests.simulation.attempt import Plan
from tests.simulation.process import Process
from tests.simulation.promises import Broken
from tests.simulation.world import SLOTS, World

KEEPER_S = 1.0
"""Time until a dead service is restarted."""
STOPPED_S = 30.0
"""Well beyond the lease and the time for which a launch is awaited."""
SOON_S = 3.0
"""Shorter than the lease."""
BACKING_OFF_S = 4.0
"""Time after which a preempted job is running again."""
ENDED = (JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED)

Story = Callable[[World], Awaitable[None]]
Injection = Callable[[Process], None]


class Numbers:
    """Generates the same IDs in every run."""

    def __init__(self) -> None:
        self._last = 0

    def next(self, milliseconds: int) -> int:
        self._last += 1
        return self._last


@dataclass
class Told:
    """The record of a story."""

    trace: list[str] = field(default_factory=list)
    fault_points: range = range(0)
    """Numbers of the steps at which a fault may be injected."""


def tell(
    story: Story, engine: Engine, folder: Path, at: int = 0, inject: Injection | None = None
) -> Told:
    """Run the story, inject the fault at the given step (from 1), and continue until everything is
    at rest.

    Raises Broken, with the trace, if a promise is broken.
    """
    told = Told()

    async def main() -> None:
        world = World(engine, folder, random.Random(1))
        told.trace = world.trace
        if inject is not None:
            world.ambushes[at] = inject
        try:
            await story(world)
            told.fault_points = world.fault_points or range(1, world.num_points + 1)
            await world.come_to_rest()
        finally:
            await world.close()

    before, ids._sequence = ids._sequence, Numbers()  # type: ignore[assignment]
    try:
        clock.run(main())
    except Broken as broken:
        raise Broken("\n".join([f"at step {at}: {broken}", *told.trace])) from broken
    finally:
        ids._sequence = before
    return told


def kill(process: Process) -> None:
    process.kill()


def stop_for_long(process: Process) -> None:
    process.stop()
    process.world.loop.call_later(STOPPED_S, process.go_on)


async def _keep_one(world: World) -> None:
    """Restart the service whenever it is gone."""
    while True:
        if not world.processes:
            world.start_process()
        await asyncio.sleep(KEEPER_S)


async def _comes_to(world: World, job_id: str | None, *states: JobState) -> None:
    """Wait until the job is in one of the states, or has ended."""
    assert job_id is not None
    deadline = world.loop.time() + 600.0
    while world.states().get(job_id) not in (*states, *ENDED):
        if world.loop.time() > deadline:
            raise Broken(f"I1: {job_id} stays {world.states().get(job_id)}")
        await asyncio.sleep(0.5)
    world.check()


async def all_that_happens_to_jobs(world: World) -> None:
    """Submit, run, fail, retry, cancel, preempt and delete jobs with one service, restarted as
    needed."""
    world.cluster.add_slots(SLOTS)
    keeper = world.loop.create_task(_keep_one(world))
    good = await world.submit(Plan(3), 2)
    failing = await world.submit(Plan(4, "user_error", 2, 1), 1, max_retries=1)
    bad = await world.submit(Plan(2, "bad_data", 1, 9), 1)
    endless = await world.submit(Plan(0), 2)
    await _comes_to(world, endless, JobState.RUNNING)
    world.preempt()
    await _comes_to(world, good)
    await _comes_to(world, bad)
    await asyncio.sleep(BACKING_OFF_S)
    await _comes_to(world, endless, JobState.RUNNING)
    assert endless is not None
    assert good is not None
    await world.cancel(endless)
    await world.delete(good)
    await _comes_to(world, failing)
    await _comes_to(world, endless)
    keeper.cancel()


async def a_schedule_submits_each_minute(world: World) -> None:
    """Each minute of a schedule gets one job, from one service that is restarted as needed."""
    world.cluster.add_slots(SLOTS)
    keeper = world.loop.create_task(_keep_one(world))
    job = {"name": Plan(1).name, "recipe": "image_classification"}
    wanted = ScheduleRequest.model_validate(
        {"name": "each", "cron": "* * * * *", "job": job, "overlap": "queue", "missed": "all"}
    )
    caller = Caller("ann", is_admin=False)

    async def create(runtime: Runtime) -> None:
        with contextlib.suppress(ScheduleExists):  # the response to the first try was lost
            await _schedules(runtime).create(wanted, owner=caller.name)

    async def pause(runtime: Runtime) -> None:
        paused = ScheduleChangeRequest(paused=True)
        await _schedules(runtime).change(wanted.name, paused, caller)

    await world.ask(create)
    began = world.num_points
    await asyncio.sleep(75.0)
    world.fault_points = range(began + 1, world.num_points + 1)
    await asyncio.sleep(60.0)
    await world.ask(pause)
    keeper.cancel()
    query = text("SELECT scheduled_at FROM jobs WHERE schedule_id IS NOT NULL ORDER BY number")
    with world.engine.connect() as connection:
        times = [datetime.fromisoformat(at) for at in connection.execute(query).scalars()]
    minutes = [round((time - times[0]).total_seconds() / 60) for time in times]
    if len(times) < 2 or minutes != list(range(len(times))):
        raise Broken(f"the runs are not one for each minute: {times}")


def _schedules(runtime: Runtime) -> Schedules:
    return Schedules(runtime.database, runtime.jobs, runtime.settings)


async def one_takes_over(world: World) -> None:
    """One of two services is stopped beyond its lease while a more urgent job arrives. When it
    continues, its old plan is no longer valid.
    """
    world.cluster.add_slots(SLOTS)
    world.start_process()
    first = await world.submit(Plan(1), SLOTS)
    await _comes_to(world, first, JobState.RUNNING)
    world.start_process()
    begin = world.num_points
    later = await world.submit(Plan(5), SLOTS, priority=10)
    await _comes_to(world, first)
    await asyncio.sleep(SOON_S)
    world.fault_points = range(begin + 1, world.num_points + 1)
    urgent = await world.submit(Plan(0), 1, priority=90)
    await asyncio.sleep(STOPPED_S + SOON_S)
    world.check()
    assert urgent is not None
    await world.cancel(urgent)
    await _comes_to(world, later)


async def one_launches_late(world: World) -> None:
    """One of two services is stopped just before a launch, until the other gives the launch up."""
    world.cluster.add_slots(SLOTS)
    world.start_process()
    await asyncio.sleep(SOON_S)
    world.start_process()
    begin = world.num_points
    job_id = await world.submit(Plan(40), SLOTS // 2)
    await asyncio.sleep(SOON_S)
    world.fault_points = range(begin + 1, world.num_points + 1)
    await asyncio.sleep(STOPPED_S + SOON_S)
    world.check()
    await _comes_to(world, job_id)


async def a_group_shrinks_and_grows(world: World) -> None:
    """An elastic group loses a node, then others while it is being granted replacement slots, then
    so many that it has to wait. Meanwhile another job waits for slots."""
    for _ in range(2):
        world.cluster.add_slots(SLOTS)
    keeper = world.loop.create_task(_keep_one(world))
    elastic = {"min_workers": SLOTS - 1}
    job_id = await world.submit(Plan(0), 2 * SLOTS, elastic=elastic)
    await _comes_to(world, job_id, JobState.RUNNING)
    (group,) = world.cluster.of_this_session()
    begin = world.num_points
    world.cluster.lose_node(group.held[0].node_id)
    await asyncio.sleep(SOON_S)
    world.cluster.add_slots(SLOTS)
    for _ in range(3):
        await asyncio.sleep(0.7)
        group.lose_worker()
        world.check()
    while group.alive and group.num_held >= SLOTS - 1:
        group.lose_worker()
    other = await world.submit(Plan(1), 1)
    await asyncio.sleep(2 * SOON_S)
    world.check()
    world.fault_points = range(begin + 1, world.num_points + 1)
    await _comes_to(world, other)
    assert job_id is not None
    await world.cancel(job_id)
    await _comes_to(world, job_id)
    keeper.cancel()
