"""The hand-over of attempts to shared supervisors, with supervisors that are killed or stopped and
calls to Ray that take long, at random moments in virtual time."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError

from ray_workers.node import compat_ray
from ray_workers.shared.contracts import AttemptSpec
from ray_workers.supervision import supervisor
from service.cluster.ray import launch_once, supervisors
from tests.seeds import drawn, noted
from tests.simulation import clock
from tests.wire import attempt_spec

NUM_JOBS, AT_ONCE = 60, 3
POLL_LIMIT_S = 12.0
"""After which the driver kills a supervisor that does not respond."""
ACKNOWLEDGE_LIMIT_S = 10.0
GCS_STALL_S = 20.0
Key = tuple[str, int]


class Process:
    """The process of an actor: a `Supervisor` whose calls take a moment. It can be stopped."""

    def __init__(self, world: World, spec: AttemptSpec, name: str | None) -> None:
        self._world = world
        self.name = name
        self.is_dead = False
        self.was_hit = False
        self._goes_on = asyncio.Event()
        self._goes_on.set()
        actor_class: Any = supervisor.Supervisor
        self.supervisor = actor_class.__ray_actor_class__(spec, b"", name)
        self.supervisor._leave = self._leave

    def _leave(self) -> None:
        self._world.begin(self._leave_once_it_runs())

    async def _leave_once_it_runs(self) -> None:
        await self._goes_on.wait()
        if self.supervisor._run is None:  # a timer that is due after SIGCONT
            self.supervisor._has_left = True
            await self._world.moment()
            self.kill()

    def kill(self) -> None:
        self.is_dead = True
        self._goes_on.set()

    async def stop(self, for_s: float) -> None:
        self._goes_on.clear()
        await asyncio.sleep(for_s)
        self._goes_on.set()

    def __getattr__(self, method: str) -> SimpleNamespace:
        def remote(*given: Any) -> asyncio.Future[Any]:
            # As in Ray, a caller that stops waiting does not cancel the call.
            return asyncio.shield(self._world.begin(self._call(method, given)))

        return SimpleNamespace(remote=remote)

    async def _call(self, method: str, given: tuple[Any, ...]) -> Any:
        await self._world.moment()
        await self._goes_on.wait()
        if self.is_dead:
            raise ActorDiedError
        answer = await getattr(self.supervisor, method)(*given)
        await self._world.moment()
        await self._goes_on.wait()
        if self.is_dead:
            raise ActorDiedError
        return answer


class World:
    def __init__(self, seed: int, *, strikes: bool) -> None:
        self.rng = random.Random(seed)
        self.pool: supervisors.Supervisors
        self._strikes = strikes
        self.processes: list[Process] = []
        self.runs = Counter[Key]()
        self.claimed: dict[Key, str] = {}
        """Names of the supervisors in which the attempts were launched."""
        self.lost: set[Key] = set()
        self.reported: set[Key] = set()
        """Attempts whose supervisor responded that it does not run them."""
        self.num_reused = 0
        self._tasks: set[asyncio.Task[Any]] = set()

    def claim(self, _: str, job_id: str, attempt: int, name: str) -> None:
        self.claimed[job_id, attempt] = name

    def begin(self, work: Any) -> asyncio.Task[Any]:
        self._tasks.add(task := asyncio.ensure_future(work))
        task.add_done_callback(self._tasks.discard)
        return task

    async def moment(self) -> None:
        await asyncio.sleep(self.rng.choice([0.0, 0.001, 0.05]))

    async def create(self, spec: AttemptSpec, name: str | None) -> Process:
        await self.moment()
        self.processes.append(Process(self, spec, name))
        return self.processes[-1]

    async def call_gcs(self, function: Callable[..., Any], *given: Any) -> Any:
        stall_s = self.rng.uniform(0, GCS_STALL_S) if self.rng.random() < 0.1 else 0.01
        before_s = self.rng.choice([0.0, stall_s])
        await asyncio.sleep(before_s)
        answer = function(*given)
        await asyncio.sleep(stall_s - before_s)
        return answer

    async def strike(self) -> None:
        """Kill or stop supervisors at random moments, idle ones more often than others."""
        while True:
            await asyncio.sleep(self.rng.expovariate(1.0))
            idle = [one.actor for one in self.pool._idle]
            chosen = self.rng.choice([idle, idle, self.processes])
            if alive := [one for one in chosen if not one.is_dead and not one.was_hit]:
                victim = self.rng.choice(alive)
                victim.was_hit = True
                if self.rng.random() < 0.5:
                    victim.kill()
                else:
                    self.begin(victim.stop(self.rng.choice([0.5, 4.0, 1e9, 1e9])))

    async def poll_elsewhere(self, key: Key) -> None:
        """Poll an attempt at a random moment of its launch, like the service that takes over."""
        while key not in self.claimed:
            await asyncio.sleep(0.01)
        await asyncio.sleep(self.rng.choice([0.0, 0.1, 1.0]))
        for process in self.processes:
            is_its = process.name is not None and process.name == self.claimed.get(key)
            if is_its and not process.is_dead:
                process.was_hit = True
                with contextlib.suppress(ActorDiedError, TimeoutError):
                    async with asyncio.timeout(POLL_LIMIT_S):
                        is_refused = await process.poll.remote(key, {}, 0.0, 1) is None
                    if is_refused:
                        await self.report(key)

    async def report(self, key: Key) -> None:
        """Check that an attempt that is reported as lost does not begin afterwards."""
        self.reported.add(key)
        runs_before = self.runs[key]
        await asyncio.sleep(60.0)
        assert self.runs[key] == runs_before, f"{key} began after it was lost"

    async def follow(self, number: int) -> None:
        """Launch an attempt and poll it until its end."""
        spec = attempt_spec(job_id=f"job-{number}", array_index=0, spec={"name": "digits"})
        key = (spec.job_id, spec.attempt)
        await asyncio.sleep(self.rng.choice([0.0, 0.0, 4.0]))
        num_before = len(self.processes)
        is_disturbed = self._strikes and self.rng.random() < 0.2
        elsewhere = [self.begin(self.poll_elsewhere(key))] if is_disturbed else []
        actor: Process = await (await self.pool.claim(spec, ()))
        self.num_reused += actor in self.processes[:num_before]
        try:
            async with asyncio.timeout(POLL_LIMIT_S):
                while (reply := await actor.poll.remote(key, {}, 0.0, 1)) != "over":
                    if reply is None:
                        elsewhere.append(self.begin(self.report(key)))
                        raise ActorDiedError
                    await asyncio.sleep(0.1)
        except (ActorDiedError, TimeoutError):
            assert actor.was_hit, f"{key} was lost without a cause"
            self.lost.add(key)
            if key not in self.reported:
                actor.kill()
        else:
            await self.acknowledge(actor, key)
        await asyncio.gather(*elsewhere)

    async def acknowledge(self, actor: Process, key: Key) -> None:
        try:
            async with asyncio.timeout(ACKNOWLEDGE_LIMIT_S):
                farewell = await actor.acknowledge.remote(key)
        except (ActorDiedError, TimeoutError):
            assert actor.was_hit, f"the supervisor of {key} exited before it answered"
            actor.kill()
        else:
            assert farewell is not None
            await self.pool.dismiss(actor, farewell)


def run_class(world: World) -> type:
    class Run:
        was_routine = True

        def __init__(self, spec: AttemptSpec) -> None:
            world.runs[spec.job_id, spec.attempt] += 1
            self._ends_at = asyncio.get_running_loop().time() + world.rng.uniform(0.0, 2.0)

        async def poll(self, *_: Any) -> str:
            return "over" if asyncio.get_running_loop().time() >= self._ends_at else "runs"

        async def drop(self) -> None:
            await asyncio.sleep(world.rng.choice([0.0, 0.0, 0.01, 4.0]))

    return Run


def play(seed: int, monkeypatch: pytest.MonkeyPatch, *, strikes: bool) -> World:
    world = World(seed, strikes=strikes)

    def end(actor: Process) -> None:
        actor.kill()

    async def main() -> None:
        loop = asyncio.get_running_loop()
        context = SimpleNamespace(get_node_id=lambda: "a")
        monkeypatch.setattr(supervisor.ray, "get_runtime_context", lambda: context)
        monkeypatch.setattr(compat_ray, "use_exported_class", lambda *_: None)
        monkeypatch.setattr(supervisor, "AttemptRun", run_class(world))
        monkeypatch.setattr(supervisors, "time", SimpleNamespace(monotonic=loop.time))
        monkeypatch.setattr(supervisors, "_create", world.create)
        monkeypatch.setattr(supervisors.ray, "kill", end)
        monkeypatch.setattr(supervisors, "end_actor", end)
        monkeypatch.setattr(launch_once, "claim_launch", world.claim)
        monkeypatch.setattr(asyncio, "to_thread", world.call_gcs)
        world.pool = supervisors.Supervisors("d")
        striking = world.begin(world.strike()) if strikes else None

        async def worker(first: int) -> None:
            for number in range(first, NUM_JOBS, AT_ONCE):
                await world.follow(number)

        await asyncio.gather(*map(worker, range(AT_ONCE)))
        if striking is not None:
            striking.cancel()
        await asyncio.sleep(supervisor.RESERVED_S + 2 * GCS_STALL_S)
        left = [one for one in world.processes if not one.is_dead]
        assert not left, f"{len(left)} supervisors of {len(world.processes)} are left"

    clock.run(main())
    return world


def test_no_attempt_runs_twice_or_is_lost_without_a_cause(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reused = lost = reported = 0
    for seed in noted(drawn(8)):
        with monkeypatch.context() as patches:
            world = play(seed, patches, strikes=True)
        assert max(world.runs.values()) == 1
        assert all(
            world.runs[f"job-{n}", 1] or (f"job-{n}", 1) in world.lost for n in range(NUM_JOBS)
        )
        reused += world.num_reused
        lost += len(world.lost)
        reported += len(world.reported)
    assert reused
    assert lost
    assert reported


def test_slow_calls_alone_cost_no_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    reused = 0
    for seed in noted(drawn(8)):
        with monkeypatch.context() as patches:
            world = play(seed, patches, strikes=False)
        assert not world.lost
        reused += world.num_reused
    assert reused
