"""Short stories in which a fault is injected at one step after the other."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

from sqlalchemy import Engine

from dray.views import JobState
from service.domain import ids
from tests.simulation import clock
from tests.simulation.attempt import Plan
from tests.simulation.process import Process
from tests.simulation.promises import Broken
from tests.simulation.world import SLOTS, World

KEEPER_S = 1.0
"""After its end a service is started again."""
STOPPED_S = 30.0
"""Well past the lease, and past the time that a launch is waited for."""
SOON_S = 3.0
"""Within the lease."""
BACKING_OFF_S = 4.0
"""A job that left its slots is running again after that."""
ENDED = (JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED)

Story = Callable[[World], Awaitable[None]]
Injection = Callable[[Process], None]


class Numbers:
    """Makes ids that are the same in each run."""

    def __init__(self) -> None:
        self._last = 0

    def next(self, milliseconds: int) -> int:
        self._last += 1
        return self._last


@dataclass
class Told:
    """How a story went."""

    trace: list[str] = field(default_factory=list)
    fault_points: range = range(0)
    """Numbers of the steps at which a fault may be injected."""


def tell(
    story: Story, engine: Engine, folder: Path, at: int = 0, inject: Injection | None = None
) -> Told:
    """Run the story, striking at that step (from 1), and then until all is at rest.

    Broken, with what happened, if a promise does not hold.
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
    """Somebody starts the service again whenever it is gone."""
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
    """Submit, run, fail, retry, cancel, preempt, delete: with one service, begun again at need."""
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


async def one_takes_over(world: World) -> None:
    """Of two services one is stopped past its lease, and something more urgent comes meanwhile.

    Its plan of before is no longer true when it is continued.
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
    """Of two services one is stopped on its way to a launch, until the other has given it up."""
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
    """Of an elastic group a node goes, and others while slots of the next one come to it; then so
    many that it stands by. Something else waits for slots meanwhile."""
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
