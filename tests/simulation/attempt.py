"""An attempt in virtual time: it trains according to a plan, loses workers, waits for new ones and
grows.

The job's name encodes the plan (`Plan`).
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ray_workers.shared.commands import Command, Drill, Grant, Leave, Limit, Recall, Stop
from ray_workers.shared.contracts import (
    SUPERVISOR_RANK,
    AttemptSpec,
    Cause,
    FrameKind,
    Outcome,
    Phase,
)
from ray_workers.shared.names import attempt_prefix
from ray_workers.shared.slices import Slice
from ray_workers.shared.spool_reader import spool_key
from tests.fakes.attempt import Attempt
from tests.fakes.node import FakeNode, Spool

if TYPE_CHECKING:
    from tests.simulation.cluster import SimCluster

SHA = hashlib.sha256(b"").hexdigest()
TOLD = spool_key(SUPERVISOR_RANK, 0, "metrics")
"""Key of the spool with the supervisor's reports."""
STANDBY_S = 30.0
"""How long a group waits for the workers it needs to continue training."""
PAUSE = "pause"
"""The error of a plan that stops making steps but doesn't end."""


@dataclass(frozen=True)
class Plan:
    """The number of a job's steps (0: endless), and an error at one of them in its first
    attempts."""

    num_steps: int
    error: str = "none"
    error_step: int = 0
    num_errors: int = 0

    @property
    def name(self) -> str:
        return f"{self.num_steps}.{self.error}.{self.error_step}.{self.num_errors}"

    @classmethod
    def of(cls, name: str) -> Plan:
        steps, error, error_step, num_errors = name.split(".")
        return cls(int(steps), error, int(error_step), int(num_errors))


class SimAttempt(Attempt):
    """An attempt that trains according to the plan in its job's name. It has processes while
    `alive`."""

    def __init__(self, cluster: SimCluster, spec: AttemptSpec) -> None:
        super().__init__(cluster, spec)
        self.sim = cluster
        self._limit = Limit(0, spec.max_runtime_s)
        self._timer: asyncio.TimerHandle | None = None
        self.plan = Plan.of(spec.spec["name"])
        self.alive = False
        self.generation = 0
        self.told = Spool()
        """Its supervisor's reports, which are lost with it."""
        self.order: Outcome | None = None
        """The reason to end before its plan does."""
        self.step = spec.resume_from[0].step if spec.resume_from else 0
        self.task = asyncio.get_running_loop().create_task(self._run())

    @property
    def num_processes(self) -> int:
        return int(self.alive)

    @property
    def lacking(self) -> int:
        """Number of workers missing for it to continue training."""
        least = self.spec.min_workers or self.spec.world_size
        return max(0, least - self.num_held)

    @property
    def num_held(self) -> int:
        return sum(part.num_workers for part in self.held)

    @property
    def _trains(self) -> bool:
        going = self.phase in (Phase.STARTING, Phase.RUNNING)
        return going and self.supervised and self.alive and self.order is None

    def end_as(self, outcome: Outcome) -> None:
        """End the attempt. Only the first reason counts."""
        if self.order is None:
            self.order = outcome
            self.cluster.pulse.beat()

    async def _until_ended(self, seconds: float | None) -> bool:
        """Wait until it is ordered to end. Return False if the time is up first."""
        deadline = None if seconds is None else asyncio.get_running_loop().time() + seconds
        while self.order is None:
            if not await self.cluster.pulse.wait(deadline):
                return False
        return True

    async def _run(self) -> None:
        outcome = await self._train()
        self.enter(Phase.STOPPING)
        await asyncio.sleep(self.sim.linger_s())
        self._let_go()
        self.outcome = outcome
        self.enter(Phase.ENDED)

    def _let_go(self) -> None:
        """Release the slots, after the processes have exited."""
        self.alive = False
        for part in self.held:
            self._release(part)
        self.held = []
        self.cluster.pulse.beat()

    async def _train(self) -> Outcome:
        unfit = await self._acquire()
        if unfit is not None:
            return unfit
        self.enter(Phase.STARTING)
        self.alive = True
        self._began = asyncio.get_running_loop().time()
        self._set_limit(self._limit)
        self.sim.on_start(self)
        self._emit(FrameKind.RESUMED, {"step": self.step, "url": ""})
        self._emit(FrameKind.LOG, {"line": 0, "text": "begins"})
        while not self.plan.num_steps or self.step < self.plan.num_steps:
            pauses = self.plan.error == PAUSE and self.step >= self.plan.error_step
            if await self._until_ended(None if pauses else self.sim.chance.uniform(0.3, 3.0)):
                assert self.order is not None
                if self.order.cause is Cause.PREEMPTED and self.step:
                    self._checkpoint()
                return self.order
            if self.lacking:
                await self._wait_for_slots()
                continue
            for _ in range(self.sim.chance.randint(1, 3)):
                failed = self._take_step()
                if failed is not None:
                    return failed
            self.cluster.pulse.beat()
        self._emit(FrameKind.LOG, {"line": 1, "text": "done"})
        return Outcome.of(Cause.SUCCEEDED, "every rank succeeded")

    async def _wait_for_slots(self) -> None:
        """Wait until no workers are missing or it is ordered to end, at most STAND_BY_S."""
        deadline = asyncio.get_running_loop().time() + STANDBY_S
        while self.lacking and self.order is None:
            if not await self.cluster.pulse.wait(deadline):
                self.end_as(Outcome.of(Cause.NODE_LOST, "no replacement was to be had"))

    async def _acquire(self) -> Outcome | None:
        """Acquire every slice. Return an Outcome if that failed."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self.spec.start_timeout_s
        wanted = list(self.spec.slices)
        while True:
            for part in list(wanted):
                if self.nodes[part.node_id].take(self.spec.bundle, part.num_workers):
                    self.held.append(part)
                    wanted.remove(part)
            if self.order is not None:
                return self.order
            if not wanted:
                return None
            if loop.time() >= deadline:
                return Outcome.of(Cause.SLOTS_UNAVAILABLE, "Ray did not provide the slots")
            await self._until_ended(min(1.0, deadline - loop.time()))

    def _take_step(self) -> Outcome | None:
        """Run one step and its reports. Return an Outcome if the attempt ends with it."""
        plan = self.plan
        if plan.num_steps and self.step >= plan.num_steps:
            return None
        self.step += 1
        if self.step == plan.error_step and self.spec.attempt <= plan.num_errors:
            cause = Cause(plan.error)
            if cause is Cause.WORKER_LOST:
                return Outcome.of(cause, "killed by plan", rank=0, exit_code=-9)
            body = {"cause": cause, "type": "Error", "message": "by plan", "traceback": "by plan"}
            self._emit(FrameKind.ERROR, body)
            return Outcome.of(cause, "by plan", rank=0, exit_code=1)
        values = {"train/loss": float(self.spec.attempt)}
        self._emit(FrameKind.METRICS, {"step": self.step, "values": values})
        if self.step % 3 == 0:
            self._checkpoint()
        return None

    def _checkpoint(self) -> None:
        prefix = f"{self.spec.storage_url}/{attempt_prefix(*self.key)}/checkpoints"
        body = {"step": self.step, "url": f"{prefix}/{self.step}", "size_bytes": 1}
        self.sim.written.add((self.step, f"{prefix}/{self.step}"))
        self._emit(FrameKind.CHECKPOINT, body | {"manifest_sha256": SHA})

    def _emit(self, kind: FrameKind, body: Mapping[str, Any]) -> None:
        """Rank 0 writes all frames; the first rank on each other node writes only metrics. Each
        generation of the group has its own spools, because ranks move."""
        for number, node_id in enumerate(dict.fromkeys(part.node_id for part in self.held)):
            if number == 0 or kind is FrameKind.METRICS:
                key = spool_key(number, self.generation, "metrics")
                spool = self.nodes[node_id].spool_of(*self.key, key)
                spool.append(kind, body, self.cluster.now())

    def _tell(self, kind: FrameKind, body: Mapping[str, Any]) -> None:
        self.told.append(kind, body, self.cluster.now())
        self.cluster.pulse.beat()

    def lose_supervisor(self) -> None:
        if self.supervised:
            self.supervised = False
            self.task.cancel()
            self.task = asyncio.get_running_loop().create_task(self._linger())
            self.cluster.pulse.beat()

    def vanish(self) -> None:
        self.task.cancel()
        self.supervised = self.alive = False
        self.held = []
        self.cluster.pulse.beat()

    async def _linger(self) -> None:
        await asyncio.sleep(self.sim.linger_s())
        self._let_go()

    # Size.

    def lose_node(self, node_id: str) -> None:
        if node_id not in self.nodes:
            return
        self.nodes[node_id] = FakeNode({})
        had = self.num_held
        self.held = [part for part in self.held if part.node_id != node_id]
        if not self.alive and self.phase is Phase.ACQUIRING:
            self.end_as(Outcome.of(Cause.NODE_LOST, f"{node_id} is gone"))
        elif self.num_held < had:
            self._lost(f"{node_id} is gone")

    def lose_worker(self) -> None:
        """Lose a worker permanently and release its slot, if there are other workers."""
        if not self._trains or self.num_held <= 1:
            return
        last = self.held.pop()
        self._release(Slice(last.node_id, 1))
        if last.num_workers > 1:
            self.held.append(Slice(last.node_id, last.num_workers - 1))
        self.cluster.pulse.beat()
        self._lost("a worker is gone")

    def _lost(self, why: str) -> None:
        """Let the remaining workers, if any, continue or wait for replacements."""
        if not self._trains:
            return
        if not self.held:
            self.end_as(Outcome.of(Cause.NODE_LOST, why))
            return
        body = {"generation": self.generation + 1, "ranks": [1], "code": "lost", "message": why}
        self._tell(FrameKind.REGROUPING, body)
        self._resize()

    def carry_out(self, command: Command) -> None:
        match command:
            case Stop():
                self.end_as(Outcome.of(Cause.STOPPED, "stopped as requested"))
            case Leave():
                self.end_as(Outcome.of(Cause.PREEMPTED, "released its slots as requested"))
            case Grant():
                self.grow(command)
            case Recall():
                self.recall(command)
            case Limit():
                if command.number > self._limit.number:
                    self._set_limit(command)
            case Drill():
                raise NotImplementedError("there are no drills in simulations")

    def _set_limit(self, limit: Limit) -> None:
        self._limit = limit
        if self._timer is not None:
            self._timer.cancel()
        if limit.max_runtime_s is not None:
            over = Outcome.of(Cause.RUNTIME_EXCEEDED, "reached max_runtime_s")
            at = self._began + limit.max_runtime_s
            self._timer = asyncio.get_running_loop().call_at(at, self.end_as, over)

    def grow(self, grant: Grant) -> None:
        """Take the granted slots that are still available."""
        if grant.number <= self.grants or not self._trains:
            return
        self.grants = grant.number
        taken = [part for part in grant.slices if self._take(part)]
        self.sim.note(f"{self.key} takes {taken} of grant {grant.number}")
        self.sim.on_take(self)
        self._resize()

    def recall(self, recall: Recall) -> None:
        """Release the recalled slots."""
        if recall.number <= self.grants or not self._trains:
            return
        self.grants = recall.number
        for part in recall.slices:
            if part in self.held and len(self.held) > 1:
                self.held.remove(part)
                self._release(part)
        self.sim.note(f"{self.key} gives {recall.slices} back")
        self._resize()

    def _take(self, part: Slice) -> bool:
        node = self.cluster.nodes.get(part.node_id)
        if node is None or not node.take(self.spec.bundle, part.num_workers):
            return False
        self.nodes[part.node_id] = node
        self.held.append(part)
        return True

    def _release(self, part: Slice) -> None:
        self.nodes[part.node_id].release(self.spec.bundle, part.num_workers)

    def _resize(self) -> None:
        """Start a new generation, which is reported after a delay."""
        self.generation += 1
        self.cluster.pulse.beat()
        delay_s = self.sim.chance.choice((0.0, 0.3, 2.0))
        asyncio.get_running_loop().call_later(delay_s, self._tell_size)

    def _tell_size(self) -> None:
        if not self._trains:
            return
        by_node = Counter[str]()
        for part in self.held:
            by_node[part.node_id] += part.num_workers
        slices = [{"node_id": name, "num_workers": number} for name, number in by_node.items()]
        body = {"world_size": self.num_held, "slices": slices, "lacking": self.lacking}
        self.sim.note(f"{self.key} says {body}, and knows grant {self.grants}")
        self._tell(FrameKind.RESIZED, body | {"grants": self.grants, "message": ""})
        if not self.lacking:
            whole = {"generation": self.generation, "ranks": [1], "world_size": self.num_held}
            self._tell(FrameKind.REGROUPED, whole)

    def read(self, cursor: Mapping[str, int], max_bytes: int) -> dict[str, tuple[bytes, int]]:
        found = super().read(cursor, max_bytes)
        chunk, end = self.told.read(cursor.get(TOLD, 0), max_bytes)
        return found | ({TOLD: (chunk, end)} if chunk else {})

    def has_more(self, cursor: Mapping[str, int]) -> bool:
        return self.told.has_more(cursor.get(TOLD, 0)) or super().has_more(cursor)
