"""A service as a simulated process, with its connections to the database and the cluster."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from ray_workers.shared.commands import Command
from ray_workers.shared.contracts import AttemptSpec, PollReply
from ray_workers.shared.self_tests import NodeTest
from service.cluster.port import AttemptRef, ClusterSnapshot, ClusterUnavailable
from service.costs.prices_file import PricesFile
from service.domain.errors import DatabaseUnavailable
from service.loops.shared.timings import LoopTimings
from service.runtime import Runtime
from tests.simulation.books import SimDatabase

if TYPE_CHECKING:
    from tests.simulation.world import World

T = TypeVar("T")
# The rests depend on CPU time, which would make storms irreproducible.
TIMINGS = LoopTimings(
    launch_grace_s=8.0,
    refresh_s=60.0,
    forecast_rest=0.0,
    record_rest=0.0,
    record_period_s=0.0,
    webhook_period_s=600.0,
    schedule_period_s=600.0,
)
"""Simulations cover a few minutes, so fewer timers should fire than in a real service."""


class Weather:
    """Decides which calls fail. In this base class none do."""

    def latency_s(self) -> float:
        return 0.0

    def fails_before(self, call: str) -> bool:
        """Whether the call is lost before it arrives."""
        return False

    def fails_after(self, call: str) -> bool:
        """Whether the call arrives but its answer is lost."""
        return False

    def repeats_commit(self) -> bool:
        return False


class Process:
    """A service: the API's use cases and the loops. It can be stopped, continued and killed."""

    def __init__(self, world: World, number: int, clock_error: timedelta) -> None:
        self.world = world
        self.name = f"service {number}"
        self.dead = False
        self._going = asyncio.Event()
        self._going.set()
        self._calls: dict[asyncio.Task[Any], None] = {}
        database = SimDatabase(world.engine, self, world.now, lambda: world.now() + clock_error)
        prices = PricesFile(None)
        self.runtime = Runtime(world.settings, database, world.storage, None, TIMINGS, prices)
        self._begin(self._open())

    async def _open(self) -> None:
        while True:
            try:
                await self.runtime.jobs.deletions.finish()
                await self.runtime.start_loops(Network(self), alone=False)
                return
            except DatabaseUnavailable:
                await asyncio.sleep(1.0)  # as if a supervisor restarted it

    def _begin(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.get_running_loop().create_task(work)
        self._calls[task] = None
        task.add_done_callback(lambda done: self._calls.pop(done, None))
        return task

    async def call(self, use: Callable[[Runtime], Coroutine[Any, Any, T]]) -> T:
        """Answer a request. Raises ConnectionError if the process is killed first."""
        task = self._begin(use(self.runtime))
        await asyncio.wait([task])
        if task.cancelled():
            raise ConnectionError
        return task.result()

    @property
    def stopped(self) -> bool:
        return not self._going.is_set()

    def stop(self) -> None:
        """Stop it like SIGSTOP: it does nothing and doesn't notice."""
        self._going.clear()

    def go_on(self) -> None:
        self._going.set()

    def kill(self) -> None:
        self.dead = True
        self._going.set()
        leading = self.runtime._leading
        for task in [*self._calls, *([leading] if leading else [])]:
            task.cancel()
        self.world.processes.remove(self)
        self.world.note(f"{self.name} is killed")

    # The gate for its database.

    async def before(self, call: str) -> None:
        self.world.count_point(self, f"before {call}")
        await self._pass()
        if self.world.weather.fails_before(call):
            raise DatabaseUnavailable("the database is away")

    async def after(self, call: str) -> None:
        self.world.count_point(self, f"after {call}")
        await self._pass()
        if self.world.weather.fails_after(call):
            raise DatabaseUnavailable("the answer was lost")

    def loses_commit(self) -> bool:
        return self.world.weather.repeats_commit()

    def publish(self, topics: tuple[str, ...]) -> None:
        self.world.num_commits += 1
        for process in self.world.processes:
            for topic in topics:
                process.runtime.signals.publish(topic)

    async def _pass(self) -> None:
        self._live_on()
        delay_s = self.world.weather.latency_s()
        if delay_s:
            await asyncio.sleep(delay_s)
        while not self._going.is_set():
            await self._going.wait()
        self._live_on()

    def _live_on(self) -> None:
        """Raise if the process is dead, so that it does nothing more."""
        if self.dead:
            raise asyncio.CancelledError


class Network:
    """The cluster as seen by one process."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._world = process.world
        self._cluster = process.world.cluster

    async def _reach(self, call: str, answer: Callable[[], Awaitable[T]]) -> T:
        process, weather = self._process, self._world.weather
        self._world.count_point(process, f"before {call}")
        await process._pass()
        if weather.fails_before(call):
            raise ClusterUnavailable("the call was lost")
        got = await answer()
        self._world.count_point(process, f"after {call}")
        await process._pass()
        if weather.fails_after(call):
            raise ClusterUnavailable("the answer was lost")
        return got

    async def start(self) -> None:
        """Nothing to do."""

    async def stop(self) -> None:
        """Nothing to do."""

    async def snapshot(self) -> ClusterSnapshot:
        return await self._reach("snapshot", self._cluster.snapshot)

    async def launch(self, spec: AttemptSpec) -> None:
        self._world.note(f"{self._process.name} launches {spec.job_id} {spec.attempt}")
        await self._reach("launch", lambda: self._cluster.launch(spec))

    async def give_up(self, ref: AttemptRef) -> None:
        await self._reach("give_up", lambda: self._cluster.give_up(ref))

    async def poll(
        self, ref: AttemptRef, cursor: Mapping[str, int], wait_s: float, max_bytes: int
    ) -> PollReply:
        return await self._reach("poll", lambda: self._cluster.poll(ref, cursor, wait_s, max_bytes))

    async def send(self, ref: AttemptRef, command: Command) -> None:
        call = f"send {type(command).__name__}"
        await self._reach(call, lambda: self._cluster.send(ref, command))

    async def request_nodes(
        self, bundles: Sequence[tuple[Mapping[str, float], int]], released: Sequence[str]
    ) -> None:
        await self._reach("request_nodes", lambda: self._cluster.request_nodes(bundles, released))

    async def acknowledge(self, ref: AttemptRef) -> None:
        await self._reach("acknowledge", lambda: self._cluster.acknowledge(ref))

    async def attempts(self) -> list[AttemptRef]:
        return await self._reach("attempts", self._cluster.attempts)

    async def check(self, node_id: str, check_id: str, num_held: int) -> NodeTest:
        return await self._reach("check", lambda: self._cluster.check(node_id, check_id, num_held))

    async def kept_jobs(self) -> list[str]:
        return await self._reach("kept_jobs", self._cluster.kept_jobs)

    async def drop_jobs(self, job_ids: Sequence[str]) -> None:
        await self._reach("drop_jobs", lambda: self._cluster.drop_jobs(job_ids))
