"""An attempt in virtual time: a supervisor, processes that train by a plan, and their spools."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ray_workers.contracts import (
    AttemptSpec,
    Cause,
    Frame,
    FrameKind,
    Outcome,
    Phase,
    PollReply,
    Slice,
    attempt_prefix,
)

if TYPE_CHECKING:
    from tests.simulation.cluster import SimCluster

Key = tuple[str, int]
SHA = hashlib.sha256(b"").hexdigest()


@dataclass(frozen=True)
class Plan:
    """What a job does: so many steps (0: on and on), with this error in its first attempts."""

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


@dataclass
class SimNode:
    """A node: its slots, and what ranks on it have written."""

    slots: int
    held: int = 0
    spools: dict[Key, dict[str, list[Frame]]] = field(default_factory=dict)


class SimAttempt:
    """One attempt: a supervisor while `supervised`, and processes while `alive`."""

    def __init__(self, cluster: SimCluster, spec: AttemptSpec) -> None:
        self.cluster = cluster
        self.spec = spec
        self.key = (spec.job_id, spec.attempt)
        self.plan = Plan.of(spec.spec["name"])
        self.nodes = {part.node_id: cluster.nodes[part.node_id] for part in spec.slices}
        self.supervised = True
        self.alive = False
        self.held: list[Slice] = []
        self.phase = Phase.ACQUIRING
        self.phase_times = {Phase.ACQUIRING.value: cluster.now()}
        self.outcome: Outcome | None = None
        self.order: Outcome | None = None
        """Why it is to end before its plan does."""
        self.step = spec.resume_from[0].step if spec.resume_from else 0
        self.changed = asyncio.Event()
        self.task = asyncio.get_running_loop().create_task(self._run())

    def beat(self) -> None:
        self.changed.set()
        self.changed = asyncio.Event()

    def strike(self, outcome: Outcome) -> None:
        """The first reason counts."""
        if self.order is None:
            self.order = outcome
            self.beat()

    async def _until_struck(self, seconds: float | None) -> bool:
        """False when the time is up first."""
        deadline = None if seconds is None else asyncio.get_running_loop().time() + seconds
        while self.order is None:
            try:
                async with asyncio.timeout_at(deadline):
                    await self.changed.wait()
            except TimeoutError:
                return False
        return True

    def _enter(self, phase: Phase) -> None:
        self.phase = phase
        self.phase_times[phase.value] = self.cluster.now()
        self.beat()

    async def _run(self) -> None:
        outcome = await self._train()
        self._enter(Phase.STOPPING)
        await asyncio.sleep(self.cluster.linger_s())
        self._let_go()
        self.outcome = outcome
        self._enter(Phase.ENDED)

    def _let_go(self) -> None:
        """The processes are gone; only then the slots."""
        self.alive = False
        for part in self.held:
            self.nodes[part.node_id].held -= part.num_workers
        self.held = []
        self.cluster.beat()

    async def _train(self) -> Outcome:
        unfit = await self._acquire()
        if unfit is not None:
            return unfit
        self._enter(Phase.STARTING)
        self.alive = True
        self.cluster.on_start(self)
        self._emit(FrameKind.RESUMED, {"step": self.step, "url": ""})
        while not self.plan.num_steps or self.step < self.plan.num_steps:
            if await self._until_struck(self.cluster.chance.uniform(0.3, 3.0)):
                assert self.order is not None
                if self.order.cause is Cause.PREEMPTED and self.step:
                    self._checkpoint()
                return self.order
            for _ in range(self.cluster.chance.randint(1, 3)):
                failed = self._take_step()
                if failed is not None:
                    return failed
            self.beat()
        self._emit(FrameKind.LOG, {"line": 1, "text": "done"})
        return Outcome(Cause.SUCCEEDED, "every rank ended well")

    async def _acquire(self) -> Outcome | None:
        """Hold every slice; an Outcome if that was not to be."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self.spec.start_timeout_s
        wanted = list(self.spec.slices)
        while True:
            for part in list(wanted):
                node = self.nodes[part.node_id]
                if node.slots - node.held >= part.num_workers:
                    node.held += part.num_workers
                    self.held.append(part)
                    wanted.remove(part)
            if self.order is not None:
                return self.order
            if not wanted:
                return None
            if loop.time() >= deadline:
                return Outcome(Cause.SLOTS_UNAVAILABLE, "Ray did not give the slots")
            await self._until_struck(min(1.0, deadline - loop.time()))

    def _take_step(self) -> Outcome | None:
        """One step and what it reports; an Outcome if it was the last one."""
        plan = self.plan
        if plan.num_steps and self.step >= plan.num_steps:
            return None
        self.step += 1
        if self.step == plan.error_step and self.spec.attempt <= plan.num_errors:
            cause = Cause(plan.error)
            body = {"cause": cause, "type": "Error", "message": "by plan", "traceback": ""}
            self._emit(FrameKind.ERROR, body)
            return Outcome(cause, "by plan", rank=0, exit_code=1)
        if self.phase is Phase.STARTING:
            self._emit(FrameKind.LOG, {"line": 0, "text": "begins"})
        values = {"train/loss": float(self.spec.attempt)}
        self._emit(FrameKind.METRICS, {"step": self.step, "values": values})
        if self.step % 3 == 0:
            self._checkpoint()
        return None

    def _checkpoint(self) -> None:
        prefix = f"{self.spec.storage_url}/{attempt_prefix(*self.key)}/checkpoints"
        body = {"step": self.step, "url": f"{prefix}/{self.step}", "size_bytes": 1}
        self._emit(FrameKind.CHECKPOINT, body | {"manifest_sha256": SHA})

    def _emit(self, kind: FrameKind, body: Mapping[str, Any]) -> None:
        """Rank 0 writes all; the first rank of each other node writes its steps."""
        for number, node in enumerate(self.nodes.values()):
            if number == 0 or kind is FrameKind.METRICS:
                spool = node.spools.setdefault(self.key, {}).setdefault(f"rank-{number}", [])
                spool.append(Frame(number, 0, kind, self.cluster.now(), body))

    def lose_supervisor(self) -> None:
        if self.supervised:
            self.supervised = False
            self.task.cancel()
            self.task = asyncio.get_running_loop().create_task(self._linger())
            self.beat()

    async def _linger(self) -> None:
        await asyncio.sleep(self.cluster.linger_s())
        self._let_go()

    def lose_node(self, node_id: str) -> None:
        if node_id in self.nodes:
            self.nodes[node_id] = SimNode(0)
            self.held = [part for part in self.held if part.node_id != node_id]
            self.strike(Outcome(Cause.NODE_LOST, f"{node_id} is gone"))

    def reply(self, cursor: Mapping[str, int]) -> PollReply:
        frames, advanced = read_spools(self.nodes, self.key, cursor)
        if self.phase is Phase.STARTING and any(f.kind is FrameKind.METRICS for f in frames):
            self._enter(Phase.RUNNING)
        return PollReply(
            cursor=advanced,
            phase=self.phase,
            phase_times=dict(self.phase_times),
            frames=frames,
            outcome=None if frames else self.outcome,
        )


def read_spools(
    nodes: Mapping[str, SimNode], key: Key, cursor: Mapping[str, int]
) -> tuple[tuple[Frame, ...], dict[str, int]]:
    """What the spools hold after the cursor, and the cursor after that."""
    frames: list[Frame] = []
    advanced = dict(cursor)
    for node in nodes.values():
        for name, spool in node.spools.get(key, {}).items():
            frames += spool[cursor.get(name, 0) :]
            advanced[name] = max(len(spool), cursor.get(name, 0))
    return tuple(frames), advanced
