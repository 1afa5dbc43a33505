"""A cluster in virtual time: nodes with slots, the attempts on them, and their spools.

It keeps the port's contract as Ray does, down to its awkward parts: slots come back only after the
processes that linger, spools go with their node, and a supervisor's death leaves ranks behind for a
while.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping, Sequence

from ray_workers.shared.commands import Command
from ray_workers.shared.contracts import AttemptSpec, Cause, Outcome, Phase, PollReply
from ray_workers.shared.node_needs import NodeEnvironment, NodeNeeds
from service.cluster.port import AttemptRef, ClusterNode, ClusterSnapshot, ClusterUnavailable
from tests.simulation.attempt import Key, SimAttempt, SimNode, read


class SimCluster:
    """The port, and what may happen to a cluster."""

    def __init__(
        self,
        chance: random.Random,
        now: Callable[[], float],
        on_start: Callable[[SimAttempt], None],
        on_take: Callable[[SimAttempt], None],
        note: Callable[[str], None],
    ) -> None:
        self.chance = chance
        self.now = now
        self.on_start = on_start
        self.on_take = on_take
        self.note = note
        self.nodes: dict[str, SimNode] = {}
        self.known: dict[Key, SimAttempt] = {}
        self.gone: list[SimAttempt] = []
        """Forgotten, but perhaps with processes that linger."""
        self.closed: dict[Key, None] = {}
        """Attempts that were given up: none of them may come any more."""
        self.mute: dict[str, None] = {}
        """Jobs of which a node took along what rank 0 had reported and nobody had asked for."""
        self.written: set[tuple[int, str]] = set()
        """(step, url) of every checkpoint that was saved."""
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
        """Running attempts go on."""

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
                    accepted=node.drained_by is None,
                    problem=None,
                    full=None,
                    quarantined=(),
                    drained_by=node.drained_by,
                    labels={},
                    is_starting=False,
                    is_released=False,
                    is_never_released=False,
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
            return self._orphan(ref, cursor, max_bytes)
        loop = asyncio.get_running_loop()
        deadline, phase = loop.time() + wait_s, attempt.phase
        while attempt.supervised:
            reply = attempt.reply(cursor, max_bytes)
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
        return self._orphan(ref, cursor, max_bytes)

    def _orphan(self, ref: AttemptRef, cursor: Mapping[str, int], max_bytes: int) -> PollReply:
        key = (ref.job_id, ref.attempt)
        if any(a.key == key and (a.alive or a.held) for a in self.everyone()):
            return PollReply(
                dict(cursor), Phase.STOPPING, {}, (), more=False, outcome=None, silent=()
            )
        here = {node_id: self.nodes[node_id] for node_id in ref.node_ids if node_id in self.nodes}
        frames, advanced, _ = read(here, key, cursor, max_bytes)
        if frames:
            return PollReply(
                advanced, Phase.STOPPING, {}, frames, more=True, outcome=None, silent=()
            )
        if len(here) < len(ref.node_ids):
            return _ended(cursor, Cause.NODE_LOST, "a node that carried it is gone")
        return _ended(cursor, Cause.SUPERVISOR_LOST, "its supervisor is gone")

    async def send(self, ref: AttemptRef, command: Command) -> None:
        self._check()
        attempt = self.known.get((ref.job_id, ref.attempt))
        if attempt is not None:
            attempt.carry_out(command)

    async def acknowledge(self, ref: AttemptRef) -> None:
        self._check()
        key = (ref.job_id, ref.attempt)
        attempt = self.known.pop(key, None)
        if attempt is not None:
            attempt.lose_supervisor()
            self.gone.append(attempt)
        for node in self.nodes.values():
            node.spools.pop(key, None)

    async def request_nodes(
        self, bundles: Sequence[tuple[Mapping[str, float], int]], released: Sequence[str]
    ) -> None:
        """It has no autoscaler."""

    async def prepare(self, node_id: str, needs: NodeNeeds) -> NodeEnvironment:
        raise NotImplementedError("no job has an environment here")

    async def forget(self, node_id: str, needs: NodeNeeds) -> None:
        raise NotImplementedError("no job has an environment here")

    async def kept_jobs(self) -> list[str]:
        self._check()
        return sorted({job_id for node in self.nodes.values() for job_id in node.work_dirs})

    async def drop_jobs(self, job_ids: Sequence[str]) -> None:
        self._check()
        for node in self.nodes.values():
            for job_id in job_ids:
                node.work_dirs.pop(job_id, None)

    async def attempts(self) -> list[AttemptRef]:
        self._check()
        found = {key: None for key, attempt in self.known.items() if attempt.supervised}
        for node in self.nodes.values():
            found |= dict.fromkeys(node.spools)
        return [AttemptRef(*key, self.session, tuple(self.nodes)) for key in found]

    def _check(self) -> None:
        if self.away:
            raise ClusterUnavailable("Ray can't be reached")

    # Faults of the cluster.

    def lasting_slots(self) -> int:
        """Of all nodes that stay."""
        return sum(node.slots for node in self.nodes.values() if node.drained_by is None)

    def add_node(self, slots: int) -> str:
        self.num_nodes += 1
        node_id = f"node-{self.num_nodes}"
        self.nodes[node_id] = SimNode(slots)
        return node_id

    def drain_node(self, node_id: str, after_s: float) -> None:
        """It is told to go, and goes."""
        self.nodes[node_id].drained_by = self.now() + after_s
        loop = asyncio.get_running_loop()
        loop.call_later(after_s, lambda: node_id in self.nodes and self.lose_node(node_id))

    def lose_node(self, node_id: str) -> None:
        for (job_id, _), spools in self.nodes.pop(node_id).spools.items():
            if any(name.startswith("rank-0.") for name in spools):
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


def _ended(cursor: Mapping[str, int], cause: Cause, message: str) -> PollReply:
    lost = Outcome.unseen(cause, message)
    return PollReply(dict(cursor), Phase.ENDED, {}, (), more=False, outcome=lost, silent=())
