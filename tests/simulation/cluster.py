"""A cluster in virtual time: nodes with slots, attempts that train by a plan, and their spools.

It keeps the port's contract as Ray does, down to its awkward parts: slots come back only after the
processes that linger, spools go with their node, and a supervisor's death leaves ranks behind for a
while. What a job does is written in its name (`Plan`).
"""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ray_workers.contracts import (
    AttemptSpec,
    Cause,
    Drill,
    Frame,
    FrameKind,
    Outcome,
    Phase,
    PollReply,
    Slice,
    attempt_prefix,
)
from service.cluster.port import AttemptRef, ClusterNode, ClusterSnapshot, ClusterUnavailable

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
        frames, advanced = _read(self.nodes, self.key, cursor)
        if self.phase is Phase.STARTING and any(f.kind is FrameKind.METRICS for f in frames):
            self._enter(Phase.RUNNING)
        return PollReply(
            cursor=advanced,
            phase=self.phase,
            phase_times=dict(self.phase_times),
            frames=frames,
            outcome=None if frames else self.outcome,
        )


class SimCluster:
    """The port, and what may happen to a cluster."""

    def __init__(
        self,
        chance: random.Random,
        now: Callable[[], float],
        on_start: Callable[[SimAttempt], None],
    ) -> None:
        self.chance = chance
        self.now = now
        self.on_start = on_start
        self.nodes: dict[str, SimNode] = {}
        self.known: dict[Key, SimAttempt] = {}
        self.gone: list[SimAttempt] = []
        """Forgotten, but perhaps with processes that linger."""
        self.closed: dict[Key, None] = {}
        """Attempts that were given up: none of them may come any more."""
        self.mute: dict[str, None] = {}
        """Jobs of which a node took along what rank 0 had reported and nobody had asked for."""
        self.num_sessions = 1
        self.num_nodes = 0
        self.away = False
        self.changed = asyncio.Event()

    @property
    def session(self) -> str:
        return f"session-{self.num_sessions}"

    def beat(self) -> None:
        self.changed.set()
        self.changed = asyncio.Event()

    def linger_s(self) -> float:
        return self.chance.choice((0.0, 0.1, 2.0))

    def everyone(self) -> list[SimAttempt]:
        return [*self.known.values(), *self.gone]

    # The port.

    async def start(self) -> None:
        """There is nothing to connect to."""

    async def stop(self) -> None:
        """What trains goes on."""

    async def snapshot(self) -> ClusterSnapshot:
        self._check()
        return ClusterSnapshot(
            session=self.session,
            address="simulated",
            dashboard_url=None,
            shared=False,
            nodes=tuple(
                ClusterNode(
                    node_id=node_id,
                    hostname=node_id,
                    alive=True,
                    resources={"CPU": float(node.slots)},
                    # Not looked at where nobody else takes slots, so its changes would be noise.
                    available={"CPU": float(node.slots)},
                    accepted=True,
                )
                for node_id, node in self.nodes.items()
            ),
        )

    async def launch(self, spec: AttemptSpec) -> None:
        self._check()
        key = (spec.job_id, spec.attempt)
        if key in self.closed:
            raise ClusterUnavailable(f"{key} was given up")
        known = self.known.get(key)
        if known is not None and known.supervised:
            raise ClusterUnavailable(f"the name of {key} is taken")
        if known is not None:
            self.gone.append(known)
        if all(part.node_id in self.nodes for part in spec.slices):
            self.known[key] = SimAttempt(self, spec)

    async def give_up(self, ref: AttemptRef) -> None:
        self._check()
        self.closed[ref.job_id, ref.attempt] = None

    async def poll(
        self, ref: AttemptRef, cursor: Mapping[str, int], wait_s: float, max_bytes: int
    ) -> PollReply:
        self._check()
        if ref.session != self.session:
            return _ended(cursor, Cause.NODE_LOST, "the Ray cluster that ran it is gone")
        attempt = self.known.get((ref.job_id, ref.attempt))
        if attempt is None:
            return self._orphan(ref, cursor)
        loop = asyncio.get_running_loop()
        deadline, phase = loop.time() + wait_s, attempt.phase
        while attempt.supervised:
            reply = attempt.reply(cursor)
            if (
                reply.frames
                or reply.outcome
                or attempt.phase is not phase
                or loop.time() >= deadline
            ):
                return reply
            try:
                async with asyncio.timeout_at(deadline):
                    await attempt.changed.wait()
            except TimeoutError:
                pass
            self._check()
            if ref.session != self.session:
                raise ClusterUnavailable("the Ray driver is gone")
        return self._orphan(ref, cursor)

    def _orphan(self, ref: AttemptRef, cursor: Mapping[str, int]) -> PollReply:
        key = (ref.job_id, ref.attempt)
        if any(a.key == key and (a.alive or a.held) for a in self.everyone()):
            return PollReply(dict(cursor), Phase.STOPPING, {})
        here = {node_id: self.nodes[node_id] for node_id in ref.node_ids if node_id in self.nodes}
        frames, advanced = _read(here, key, cursor)
        if frames:
            return PollReply(advanced, Phase.STOPPING, {}, frames, more=True)
        if len(here) < len(ref.node_ids):
            return _ended(cursor, Cause.NODE_LOST, "a node that carried it is gone")
        return _ended(cursor, Cause.SUPERVISOR_LOST, "its supervisor is gone")

    async def stop_attempt(self, ref: AttemptRef) -> None:
        self._check()
        attempt = self.known.get((ref.job_id, ref.attempt))
        if attempt is not None:
            attempt.strike(Outcome(Cause.STOPPED, "stopped as asked"))

    async def preempt(self, ref: AttemptRef, grace_s: float) -> None:
        self._check()
        attempt = self.known.get((ref.job_id, ref.attempt))
        if attempt is not None:
            attempt.strike(Outcome(Cause.PREEMPTED, "left its slots as asked"))

    async def drill(self, ref: AttemptRef, drill: Drill) -> None:
        raise NotImplementedError("nobody drills here")

    async def acknowledge(self, ref: AttemptRef) -> None:
        self._check()
        key = (ref.job_id, ref.attempt)
        attempt = self.known.pop(key, None)
        if attempt is not None:
            attempt.lose_supervisor()
            self.gone.append(attempt)
        for node in self.nodes.values():
            node.spools.pop(key, None)

    async def attempts(self) -> list[AttemptRef]:
        self._check()
        found = {key: None for key, attempt in self.known.items() if attempt.supervised}
        for node in self.nodes.values():
            found |= dict.fromkeys(node.spools)
        return [AttemptRef(*key, self.session, tuple(self.nodes)) for key in found]

    def _check(self) -> None:
        if self.away:
            raise ClusterUnavailable("Ray can't be reached")

    # What happens to it.

    def add_node(self, slots: int) -> str:
        self.num_nodes += 1
        node_id = f"node-{self.num_nodes}"
        self.nodes[node_id] = SimNode(slots)
        return node_id

    def lose_node(self, node_id: str) -> None:
        for (job_id, _), spools in self.nodes.pop(node_id).spools.items():
            if "rank-0" in spools:
                self.mute[job_id] = None
        for attempt in self.everyone():
            attempt.lose_node(node_id)

    def restart(self) -> None:
        """The whole cluster dies with all that runs on it; another one of the same shape comes."""
        for attempt in self.everyone():
            attempt.task.cancel()
            attempt.supervised = attempt.alive = False
            attempt.held = []
            attempt.beat()
        for node in self.nodes.values():
            self.mute |= dict.fromkeys(job_id for job_id, _ in node.spools)
        self.known, self.gone = {}, []
        self.num_sessions += 1
        shape = [node.slots for node in self.nodes.values()]
        self.nodes = {}
        for slots in shape:
            self.add_node(slots)

    def what_is_left(self) -> list[str]:
        """Of anything that dray put there (I7)."""
        left = [f"the supervisor of {key}" for key, a in self.known.items() if a.supervised]
        left += [f"processes of {a.key}" for a in self.everyone() if a.alive]
        for node_id, node in self.nodes.items():
            left += [f"a spool of {key} on {node_id}" for key in node.spools]
            left += [f"{node.held} slots of {node_id}"] if node.held else []
        return left


def _read(
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


def _ended(cursor: Mapping[str, int], cause: Cause, message: str) -> PollReply:
    return PollReply(dict(cursor), Phase.ENDED, {}, outcome=Outcome(cause, message))
