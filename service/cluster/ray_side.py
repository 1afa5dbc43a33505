"""The Ray side of the cluster seam: the port's methods, by a Ray driver in this process.

Runs in the gateway, a child of the service, because a Ray driver exits when Ray's GCS is lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import ray
from ray.exceptions import ActorDiedError, RayActorError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

import dray
from ray_workers import spool
from ray_workers.contracts import (
    AttemptSpec,
    Cause,
    Drill,
    Frame,
    Grant,
    Outcome,
    Phase,
    PollReply,
    agent_name,
    namespace,
    supervisor_name,
)
from ray_workers.node_agent import NodeAgent, NodeReport
from ray_workers.paths import nonce_path
from ray_workers.quarantine import Quarantined
from ray_workers.supervisor import Supervisor
from service.cluster import once, prestart
from service.cluster.port import AttemptRef, ClusterNode, ClusterSnapshot, ClusterUnavailable
from service.cluster.unowned import UnownedSlots

REDESCRIBE_S = 5.0
CONTROL_RESOURCE = "dray_control"
HEAD_RESOURCE = "node:__internal_head__"
SLIVER = 0.001
"""Amount of a marker resource that ties an actor to the nodes that have it."""


@dataclass(frozen=True)
class GatewayConfig:
    """What the gateway needs to know, sent to it when it starts."""

    deployment_id: str
    address: str
    dashboard_url: str | None
    shared: bool
    storage_url: str
    storage_nonce: str


@dataclass
class JoinedNode:
    """The agent of a node and what it last said."""

    agent: Any
    asked: asyncio.Future[NodeReport]
    asked_at: float
    problem: str | None = "its node agent is starting"
    quarantined: tuple[Quarantined, ...] | None = None
    idle_workers: int | None = None
    """When it was asked last."""

    @property
    def is_dead(self) -> bool:
        """Ray has given the agent up, as when its constructor fails; a restart is not that."""
        return self.asked.done() and isinstance(self.asked.exception(), ActorDiedError)

    def settle(self, config: GatewayConfig) -> None:
        """Take over the agent's answer, if it came."""
        if not self.asked.done():
            return
        try:
            report = self.asked.result()
            self.problem, self.quarantined = refusal(report, config), report.quarantined
            self.idle_workers = report.idle_workers
        except Exception as error:
            self.problem = f"its node agent failed: {_brief(error)}"


def refusal(report: NodeReport, config: GatewayConfig) -> str | None:
    """Why the node that says this of itself may not carry ranks, or None."""
    if report.problem:
        return report.problem
    if report.version != dray.__version__:
        return (
            f"it runs dray {report.version}, the service {dray.__version__}: "
            "start its Ray from the same checkout or image"
        )
    if nonce_path(config.storage_url) and report.storage_nonce != config.storage_nonce:
        return (
            f"it does not see the service's files at {config.storage_url}: mount the "
            "same directory there, or set DRAY_STORAGE_URL to storage that all nodes share"
        )
    return None


class RayCluster:
    """The port `Cluster` on a Ray that this process is connected to."""

    def __init__(self, config: GatewayConfig) -> None:
        self._config = config
        self._supervisors: dict[tuple[str, int], Any] = {}
        self._launching: dict[tuple[str, int], asyncio.Future[Any]] = {}
        self._nodes: dict[str, JoinedNode] = {}
        self._prestarter = prestart.Prestarter()
        self._unowned = UnownedSlots()

    async def start(self) -> None:
        joined = await asyncio.to_thread(
            ray.init,
            address=self._config.address,
            namespace=namespace(self._config.deployment_id),
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
        self._dashboard_url = self._config.dashboard_url
        if joined.dashboard_url and not self._dashboard_url:
            self._dashboard_url = f"http://{joined.dashboard_url}"
        context = ray.get_runtime_context()
        self._session: str = context.get_session_name()

    async def stop(self) -> None:
        await asyncio.to_thread(ray.shutdown)

    async def snapshot(self) -> ClusterSnapshot:
        nodes = await asyncio.to_thread(ray.nodes)
        available = await asyncio.to_thread(_available_by_node)
        drained = await asyncio.to_thread(_drained_nodes)
        alive = [node for node in nodes if node["Alive"]]
        self._nodes = {n["NodeID"]: self._joined(n["NodeID"]) for n in alive}
        for node in alive:
            self._keep_warm(node)
        return ClusterSnapshot(
            session=self._session,
            address=self._config.address,
            dashboard_url=self._dashboard_url,
            shared=self._config.shared,
            nodes=tuple(
                self._describe(node, available, drained.get(node["NodeID"])) for node in alive
            ),
        )

    def _describe(
        self,
        node: Mapping[str, Any],
        available: Mapping[str, Mapping[str, float]],
        drained_by: float | None,
    ) -> ClusterNode:
        joined = self._nodes[node["NodeID"]]
        problem = joined.problem if drained_by is None else _leaving(drained_by)
        return ClusterNode(
            node_id=node["NodeID"],
            hostname=node["NodeManagerHostname"],
            alive=True,
            resources=_schedulable(node["Resources"]),
            available=_schedulable(available.get(node["NodeID"], {})),
            accepted=problem is None,
            problem=problem,
            quarantined=joined.quarantined,
            drained_by=drained_by,
        )

    def _joined(self, node_id: str) -> JoinedNode:
        """The node's agent, created or asked again where it is time."""
        known = self._nodes.get(node_id)
        if known is None or known.is_dead:
            agent = NodeAgent.options(  # type: ignore[attr-defined]
                name=agent_name(node_id),
                lifetime="detached",
                get_if_exists=True,
                max_concurrency=1000,
                scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False),
            ).remote(self._config.deployment_id)
            known = JoinedNode(agent, self._ask(agent), time.monotonic())
        known.settle(self._config)
        is_old = time.monotonic() - known.asked_at > REDESCRIBE_S
        if known.asked.done() and (is_old or self._prestarter.awaits_news(known.asked_at)):
            known.asked, known.asked_at = self._ask(known.agent), time.monotonic()
            known.idle_workers = None
        return known

    def _keep_warm(self, node: Mapping[str, Any]) -> None:
        joined = self._nodes[node["NodeID"]]
        if joined.idle_workers is not None:
            address = f"{node['NodeManagerAddress']}:{node['NodeManagerPort']}"
            count = prestart.Count(address, joined.idle_workers, joined.asked_at)
            self._prestarter.keep_warm(node["NodeID"], count)

    def _ask(self, agent: Any) -> asyncio.Future[NodeReport]:
        path = nonce_path(self._config.storage_url)
        return asyncio.ensure_future(_result(agent.describe.remote(path)))

    async def launch(self, spec: AttemptSpec) -> None:
        deployment_id = self._config.deployment_id
        await asyncio.to_thread(once.claim_launch, deployment_id, spec.job_id, spec.attempt)
        resources = await asyncio.to_thread(ray.cluster_resources)
        control = CONTROL_RESOURCE if CONTROL_RESOURCE in resources else HEAD_RESOURCE
        key = (spec.job_id, spec.attempt)
        create = asyncio.to_thread(
            Supervisor.options(  # type: ignore[attr-defined]
                name=supervisor_name(spec.job_id, spec.attempt),
                lifetime="detached",
                max_concurrency=64,
                resources={control: SLIVER},
            ).remote,
            spec,
        )
        # Whoever asked may give up, the creation goes on: until it is over there is nothing to
        # conclude from there being no such actor.
        launching = asyncio.ensure_future(create)
        self._launching[key] = launching
        launching.add_done_callback(lambda _: self._launching.pop(key, None))
        self._supervisors[key] = await asyncio.shield(launching)
        self._prestarter.used()

    async def give_up(self, ref: AttemptRef) -> None:
        deployment_id = self._config.deployment_id
        await asyncio.to_thread(once.give_up, deployment_id, ref.job_id, ref.attempt)

    async def poll(
        self, ref: AttemptRef, cursor: Mapping[str, int], wait_s: float, max_bytes: int
    ) -> PollReply:
        if ref.session != self._session:
            return _ended(cursor, Cause.NODE_LOST, "the Ray cluster that ran it is gone")
        if (ref.job_id, ref.attempt) in self._launching:
            return PollReply(dict(cursor), Phase.ACQUIRING, {})
        try:
            supervisor = await self._supervisor(ref)
        except ValueError:
            return await self._poll_orphan(ref, cursor, max_bytes, "there is no such actor")
        try:
            reply: PollReply = await supervisor.poll.remote(dict(cursor), wait_s, max_bytes)
        except ActorDiedError as error:
            self._supervisors.pop((ref.job_id, ref.attempt), None)
            return await self._poll_orphan(ref, cursor, max_bytes, _brief(error))
        if reply.outcome is not None:
            self._look_again(ref)
        return reply

    def _look_again(self, ref: AttemptRef) -> None:
        """Ask its nodes anew: an attempt that ended may have left slots in quarantine."""
        for node_id in ref.node_ids:
            if node_id in self._nodes:
                self._nodes[node_id].asked_at = -math.inf

    async def _supervisor(self, ref: AttemptRef) -> Any:
        """Its handle; ValueError if there is no such actor."""
        key = (ref.job_id, ref.attempt)
        if key not in self._supervisors:
            self._supervisors[key] = await asyncio.to_thread(
                ray.get_actor, supervisor_name(ref.job_id, ref.attempt)
            )
        return self._supervisors[key]

    async def _poll_orphan(
        self, ref: AttemptRef, cursor: Mapping[str, int], max_bytes: int, how: str
    ) -> PollReply:
        """Of an attempt without a supervisor: what is left, and its end when all is seen gone."""
        await self.snapshot()  # which nodes are alive, and their agents
        agents = [self._nodes[node].agent for node in ref.node_ids if node in self._nodes]
        self._look_again(ref)
        if not await self._unowned.are_released((ref.job_id, ref.attempt), ref.node_ids):
            return PollReply(dict(cursor), Phase.STOPPING, {})
        reads = [
            agent.read.remote(ref.job_id, ref.attempt, dict(cursor), max_bytes, 0.0)
            for agent in agents
        ]
        frames: list[Frame] = []
        advanced = dict(cursor)
        for answer in await asyncio.gather(*map(_result, reads)):
            for key, chunk in answer.data.items():
                frames += spool.decode(key, chunk)
                advanced[key] = advanced.get(key, 0) + len(chunk)
        if frames:
            return PollReply(advanced, Phase.STOPPING, {}, tuple(frames), more=True)
        if len(agents) < len(ref.node_ids):
            return _ended(cursor, Cause.NODE_LOST, "a node that carried it is gone")
        return _ended(cursor, Cause.SUPERVISOR_LOST, f"its supervisor is gone: {how}")

    async def stop_attempt(self, ref: AttemptRef) -> None:
        with contextlib.suppress(ValueError, ActorDiedError):
            supervisor = await self._supervisor(ref)
            await supervisor.stop.remote()

    async def preempt(self, ref: AttemptRef, grace_s: float) -> None:
        with contextlib.suppress(ValueError, ActorDiedError):
            supervisor = await self._supervisor(ref)
            await supervisor.preempt.remote(grace_s)

    async def drill(self, ref: AttemptRef, drill: Drill) -> None:
        with contextlib.suppress(ValueError, ActorDiedError):
            supervisor = await self._supervisor(ref)
            await supervisor.drill.remote(drill)

    async def grow(self, ref: AttemptRef, grant: Grant) -> None:
        with contextlib.suppress(ValueError, ActorDiedError):
            supervisor = await self._supervisor(ref)
            await supervisor.grow.remote(grant)

    async def acknowledge(self, ref: AttemptRef) -> None:
        try:
            supervisor = await self._supervisor(ref)
            await supervisor.acknowledge.remote()
            await asyncio.to_thread(ray.kill, supervisor)
        except (ValueError, RayActorError):
            await self.snapshot()
            agents = [self._nodes[node].agent for node in ref.node_ids if node in self._nodes]
            drops = [_result(agent.drop.remote(ref.job_id, ref.attempt)) for agent in agents]
            await asyncio.gather(*drops, return_exceptions=True)
        self._supervisors.pop((ref.job_id, ref.attempt), None)
        await self._unowned.sweep((ref.job_id, ref.attempt), ref.node_ids)

    async def attempts(self) -> list[AttemptRef]:
        found = set()
        for name in await asyncio.to_thread(ray.util.list_named_actors):
            match name.split(":"):
                case ["dray", job_id, attempt, "supervisor"]:
                    found.add((job_id, int(attempt)))
        # A supervisor may have died before its spools were dropped.
        agents = [node.agent for node in self._nodes.values() if node.problem is None]
        for spooled in await asyncio.gather(*(_result(a.spooled.remote()) for a in agents)):
            found.update(spooled)
        kept = {
            (q.job_id, q.attempt) for node in self._nodes.values() for q in node.quarantined or ()
        }
        found |= await self._unowned.keys(kept)
        nodes = tuple(self._nodes)
        return [AttemptRef(*key, self._session, nodes) for key in sorted(found)]


def _ended(cursor: Mapping[str, int], cause: Cause, message: str) -> PollReply:
    return PollReply(dict(cursor), Phase.ENDED, {}, outcome=Outcome(cause, message))


async def _result(ref: Any) -> Any:
    """Await an object ref as a coroutine, which is what asyncio's functions take."""
    return await ref


def _schedulable(resources: Mapping[str, float]) -> dict[str, float]:
    """Without Ray's own bookkeeping: object store, node markers, placement group shadows."""
    return {
        name: amount
        for name, amount in resources.items()
        if name in ("CPU", "GPU", "memory") or name.startswith("accelerator_type:")
    }


def _available_by_node() -> dict[str, dict[str, float]]:
    from ray._private.state import available_resources_per_node

    found: dict[str, dict[str, float]] = available_resources_per_node()  # type: ignore[no-untyped-call]
    return found


def _drained_nodes() -> dict[str, float]:
    """By node: the Unix time of the end of each that is being drained, inf if it has none."""
    from ray._private.state import state

    found: dict[str, int] = state.get_draining_nodes()
    return {node: at_ms / 1000 if at_ms else math.inf for node, at_ms in found.items()}


def _leaving(drained_by: float) -> str:
    told = "it is drained: Ray was told that the node goes"
    try:
        return f"{told} at {datetime.fromtimestamp(drained_by, UTC):%Y-%m-%d %H:%M:%S} UTC"
    except (OverflowError, ValueError):  # at no time that anybody will see
        return told


def _brief(error: BaseException) -> str:
    """The last line of an error: Ray's messages hold whole remote tracebacks."""
    lines = str(error).strip().splitlines()
    return lines[-1].strip() if lines else type(error).__name__


def as_unavailable(error: Exception) -> ClusterUnavailable:
    """Any failure of Ray, as the port's one error."""
    kind = "Ray" if isinstance(error, RayError) else type(error).__name__
    return ClusterUnavailable(f"{kind}: {_brief(error)}")
