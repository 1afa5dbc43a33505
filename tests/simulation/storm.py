"""A random scenario from a seed: users, faults and repairs in any order, followed by calm."""

from __future__ import annotations

import asyncio
import random
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

from sqlalchemy import Engine

from dray.reservations import ReservationRequest
from ray_workers.shared.contracts import Cause, Outcome
from service.domain import ids
from tests.simulation import clock
from tests.simulation.attempt import Plan
from tests.simulation.process import Process, Weather
from tests.simulation.scenarios import Numbers
from tests.simulation.world import SLOTS, World

NUM_EVENTS = 200
MAX_JOBS = 5
"""Enough for jobs to compete."""
PAUSES_S = (0.0, 0.0, 0.1, 0.5, 1.0, 3.0)
"""Pauses between events: long enough for jobs to start and end in between."""
COMES_BACK = 0.5
"""Probability that a service starts, at each event while there is none."""
GIVES_UP = 0.4
"""Probability that users cancel all their remaining jobs when the storm is over."""


class Stormy(Weather):
    """Every call may fail, with the probabilities `database` and `network`."""

    def __init__(self, chance: random.Random, database: float, network: float, slow: float) -> None:
        self._chance = chance
        self._database = database
        self._network = network
        self._slow = slow

    def latency_s(self) -> float:
        if self._chance.random() >= self._slow:
            return 0.0
        return self._chance.choice((0.01, 0.1, 1.0, 20.0))

    def _rate(self, call: str) -> float:
        return self._database if call in ("read", "write") else self._network

    def fails_before(self, call: str) -> bool:
        return self._chance.random() < self._rate(call)

    def fails_after(self, call: str) -> bool:
        return self._chance.random() < self._rate(call)

    def repeats_commit(self) -> bool:
        return self._chance.random() < self._database


class Storm:
    """The run of one seed. `trace` records the events."""

    def __init__(self, engine: Engine, folder: Path, seed: int, num_events: int) -> None:
        self.chance = random.Random(seed)
        self.num_events = num_events
        self._num_jobs = self._num_windows = 0
        self.world = World(engine, folder, self.chance)
        self._events: list[tuple[int, Callable[[], None]]] = [
            (6, self.submit),
            (2, self.cancel),
            (4, self.delete),
            (4, self.world.preempt),
            (4, self.kill_rank),
            (6, self.lose_worker),
            (3, self.lose_supervisor),
            (2, self.lose_node),
            (2, self.drain_node),
            (8, self.add_node),
            (1, self.restart_cluster),
            (2, self.lose_cluster),
            (2, self.kill_service),
            (4, self.start_service),
            (2, self.stop_service),
            (4, self.let_go),
            (6, self.ambush),
            (6, self.change_weather),
            (2, self.maintain),
            (1, self.end_maintenance),
            (32, self.nothing),
        ]

    async def run(self) -> None:
        """Run the storm. Raises Broken, with all problems found, if a promise is broken."""
        world = self.world
        self.add_node()
        self.add_node()
        world.start_process()
        weights = [weight for weight, _ in self._events]
        events = [event for _, event in self._events]
        try:
            for event in self.chance.choices(events, weights, k=self.num_events):
                event()
                if not world.processes and self.chance.random() < COMES_BACK:
                    self.start_service()
                await asyncio.sleep(self.chance.choice(PAUSES_S))
                world.check()
            if self.chance.random() < GIVES_UP:
                self.cancel_all()
            await world.come_to_rest()
        finally:
            await world.close()

    def _some_job(self) -> str | None:
        return self.chance.choice([*self.world.acknowledged]) if self.world.acknowledged else None

    def submit(self) -> None:
        if self._num_jobs >= MAX_JOBS:
            return
        self._num_jobs += 1
        chance = self.chance
        error = chance.choice(("none", "none", "user_error", "bad_data", "infrastructure"))
        steps = chance.choice((0, 1, 3, 6, 9))
        plan = Plan(
            steps, error, chance.randint(1, 6) if error != "none" else 0, chance.choice((1, 2, 99))
        )
        fields: dict[str, Any] = {
            "priority": chance.choice((10, 50, 90)),
            "max_retries": chance.choice((0, 1, 3)),
        }
        if chance.random() < 0.2:
            fields["max_runtime_s"] = 30
        workers = chance.randint(1, 2 * SLOTS)
        if chance.random() < 0.6:
            fields["elastic"] = {"min_workers": chance.randint(1, workers)}
        self.world.begin(self._submit(plan, workers, fields))

    async def _submit(self, plan: Plan, workers: int, fields: dict[str, Any]) -> None:
        await self.world.submit(plan, workers, **fields)

    def cancel(self) -> None:
        job_id = self._some_job()
        if job_id and job_id not in self.world.deleted:
            self.world.begin(self.world.cancel(job_id))

    def cancel_all(self) -> None:
        for job_id in self.world.acknowledged:
            if job_id not in self.world.deleted:
                self.world.begin(self.world.cancel(job_id))

    def delete(self) -> None:
        job_id = self._some_job()
        if job_id and job_id not in self.world.deleted:
            self.world.begin(self.world.delete(job_id))

    def kill_rank(self) -> None:
        alive = [a for a in self.world.cluster.of_this_session() if a.alive]
        if alive:
            attempt = self.chance.choice(alive)
            self.world.note(f"a rank of {attempt.key} is killed")
            attempt.end_as(Outcome.of(Cause.WORKER_LOST, "killed", rank=0, exit_code=-9))

    def lose_worker(self) -> None:
        alive = [a for a in self.world.cluster.of_this_session() if a.alive]
        if alive:
            attempt = self.chance.choice(alive)
            self.world.note(f"a worker of {attempt.key} is lost")
            attempt.lose_worker()

    def lose_supervisor(self) -> None:
        known = [a for a in self.world.cluster.of_this_session() if a.supervised]
        if known:
            attempt = self.chance.choice(known)
            self.world.note(f"the supervisor of {attempt.key} is killed")
            attempt.lose_supervisor()

    def lose_node(self) -> None:
        if self.world.cluster.nodes:
            node_id = self.chance.choice([*self.world.cluster.nodes])
            self.world.note(f"{node_id} is lost")
            self.world.cluster.lose_node(node_id)

    def drain_node(self) -> None:
        staying = [n for n, node in self.world.cluster.nodes.items() if node.drained_by is None]
        if staying:
            node_id = self.chance.choice(staying)
            after_s = self.chance.choice((1.0, 5.0, 40.0))
            self.world.note(f"{node_id} is drained, and goes in {after_s:g} s")
            self.world.cluster.drain_and_lose(node_id, after_s)

    def add_node(self) -> None:
        if len(self.world.cluster.nodes) < 4:
            self.world.note(f"{self.world.cluster.add_slots(SLOTS)} comes")

    def maintain(self) -> None:
        """Create a maintenance window that begins now or soon, often of a single node."""
        self._num_windows += 1
        chance, nodes = self.chance, [*self.world.cluster.nodes]
        where: dict[str, Any] = {"all_nodes": True}
        if nodes and chance.random() < 0.8:
            where = {"nodes": [chance.choice(nodes)]}
        begin_at = self.world.now() + timedelta(seconds=chance.choice((0, 20, 400)))
        wanted = ReservationRequest.model_validate(
            {
                "name": f"window-{self._num_windows}",
                "maintenance": True,
                "begin_at": begin_at,
                "duration_s": chance.choice((30, 120, 600)),
                "at_begin": chance.choice(("preempt", "preempt", "wait", "cancel")),
                **where,
            }
        )
        self.world.begin(self.world.maintain(wanted))

    def end_maintenance(self) -> None:
        if self._num_windows:
            number = self.chance.randint(1, self._num_windows)
            self.world.begin(self.world.end_maintenance(f"window-{number}"))

    def restart_cluster(self) -> None:
        self.world.note("the cluster restarts")
        self.world.cluster.restart()

    def lose_cluster(self) -> None:
        """Make the cluster unreachable for a while. Its processes keep running."""
        cluster = self.world.cluster
        if cluster.unavailable is not None:
            return
        self.world.note("the cluster is away")
        cluster.be_unavailable("Ray can't be reached")

        def come_back() -> None:
            self.world.note("the cluster answers again")
            cluster.be_unavailable(None)

        self.world.loop.call_later(self.chance.choice((1.0, 5.0, 30.0)), come_back)

    def kill_service(self) -> None:
        if self.world.processes:
            self.chance.choice(self.world.processes).kill()

    def start_service(self) -> None:
        if len(self.world.processes) < 2:
            self.world.start_process(timedelta(hours=self.chance.choice((-1, 0, 0, 1))))

    def stop_service(self) -> None:
        if self.world.processes:
            process = self.chance.choice(self.world.processes)
            self.world.note(f"{process.name} is stopped")
            process.stop()

    def let_go(self) -> None:
        for process in self.world.processes:
            if process.stopped:
                self.world.note(f"{process.name} is let go")
                process.go_on()
                return

    def ambush(self) -> None:
        """Kill a service, or stop it for a while, at one of the next calls."""
        at = self.world.num_points + self.chance.randint(1, 12)
        if self.chance.random() < 0.3:
            self.world.ambushes[at] = lambda process: process.kill()
            return
        seconds = self.chance.choice((3.0, 20.0, 40.0))

        def stop(process: Process) -> None:
            process.stop()
            self.world.loop.call_later(seconds, process.go_on)

        self.world.ambushes[at] = stop

    def change_weather(self) -> None:
        rate = self.chance.choice
        database, network, slow = rate((0, 0, 0.02, 0.3)), rate((0, 0, 0.05, 0.4)), rate((0, 0.1))
        self.world.note(
            f"share of failing calls: database {database}, network {network}; slow {slow}"
        )
        self.world.weather = Stormy(self.chance, database, network, slow)

    def nothing(self) -> None:
        """Let time pass."""


def run(engine: Engine, folder: Path, seed: int, num_events: int = NUM_EVENTS) -> list[str]:
    """Run the seed's storm and return its trace. Raises AssertionError with the trace if a promise
    is broken."""
    trace: list[str] = []

    async def main() -> None:
        nonlocal trace
        storm = Storm(engine, folder, seed, num_events)
        trace = storm.world.trace
        await storm.run()

    before, ids._sequence = ids._sequence, Numbers()  # type: ignore[assignment]
    try:
        clock.run(main())
    except Exception as error:
        lines = "\n".join(trace)
        why = "".join(traceback.format_exception(error))
        again = f"pytest tests/simulation --seed {seed}"
        raise AssertionError(f"seed {seed}: {error} ({again})\n{lines}\n{why}") from None
    finally:
        ids._sequence = before
    return trace
