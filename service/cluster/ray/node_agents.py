"""The gateway's records of node agents: which agents can start ranks, and which agents are
silent."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import ray
from ray.exceptions import ActorDiedError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

import dray
from ray_workers.node.agent import NodeAgent
from ray_workers.node.node_report import NodeReport
from ray_workers.node.ray_calls import brief, end_actor
from ray_workers.shared.contracts import ProcessKind, SilentProcess
from ray_workers.shared.gpu_faults import GpuFault
from ray_workers.shared.names import agent_name
from ray_workers.shared.paths import nonce_path
from ray_workers.shared.processes.silence import Silence, SilenceLimits
from ray_workers.shared.quarantine import Quarantined

logger = logging.getLogger(__name__)

REDESCRIBE_S = 5.0
STARTS = "the node agent is starting"
"""`JoinedNode.problem` of a node whose agent has not reported yet."""
RELEASED = (
    "the node is idle and was released to Ray's autoscaler; it will be used again when a job "
    "needs it"
)


@dataclass(frozen=True)
class GatewayConfig:
    """The configuration that is passed to the gateway when it starts."""

    deployment_id: str
    address: str
    dashboard_url: str | None
    shared: bool
    storage_url: str
    storage_nonce: str
    silence_limit_s: float


@dataclass
class JoinedNode:
    """The agent of a node, and the agent's latest responses."""

    agent: Any
    asked: asyncio.Future[NodeReport]
    asked_at: float
    """The time of the last request to the agent (`time.monotonic`)."""
    ping: asyncio.Future[float | None]
    problem: str | None = STARTS
    full: str | None = None
    """`NodeReport.full`."""
    silent_since: float | None = None
    """Unix time in seconds at which the agent went silent. Set once the agent has been silent for
    `SilenceLimits.report_s`."""
    forkserver_silent_since: float | None = None
    """When the node's forkserver went silent, according to the agent (Unix time, in seconds)."""
    has_answered: bool = False
    ending: asyncio.Future[None] | None = None
    """The task that ends an agent that was silent for too long. The reference prevents the task
    from being garbage-collected."""
    quarantined: tuple[Quarantined, ...] | None = None
    gpu_faults: tuple[GpuFault, ...] | None = None
    memory_bytes: int | None = None
    idle_workers: int | None = None
    has_silo_source: bool = False
    """`NodeReport.has_silo_source`. Ranks are not placed on a node before its first report."""

    @property
    def is_starting(self) -> bool:
        return self.problem == STARTS and not self.is_dead

    @property
    def is_dead(self) -> bool:
        """Whether Ray has given up on the agent, for example because its constructor failed.
        False during a restart."""
        return self.asked.done() and isinstance(self.asked.exception(), ActorDiedError)

    @property
    def refused(self) -> str | None:
        """The reason why ranks currently can't run on the node; None if they can."""
        if self.silent_since is not None:
            return _silence("node agent", self.silent_since)
        if self.forkserver_silent_since is not None:
            return _silence("forkserver", self.forkserver_silent_since)
        return self.problem

    def settle(self, config: GatewayConfig) -> None:
        """Store the agent's response if it has arrived."""
        if not self.asked.done():
            return
        try:
            report = self.asked.result()
            self.problem, self.quarantined = refusal(report, config), report.quarantined
            self.full, self.idle_workers = report.full, report.idle_workers
            self.gpu_faults, self.memory_bytes = report.gpu_faults, report.memory_bytes
            self.has_silo_source = report.has_silo_source
        except Exception as error:
            self.problem = f"the node agent failed: {brief(error)}"


class NodeAgents:
    """Creates an agent for each node, asks it for reports, and ends it if it is silent.

    Ray restarts an agent that was killed because it was silent, and the new agent finds the spools
    of its node. When an agent ends, the node's forkserver and ranks also end. The ranks are then
    recovered as after any other loss.
    """

    def __init__(self, config: GatewayConfig) -> None:
        self._config = config
        self._limits = SilenceLimits(config.silence_limit_s)
        self._silence = Silence()
        self._nodes: dict[str, JoinedNode] = {}
        self._released: frozenset[str] = frozenset()
        self._heads: frozenset[str] = frozenset()

    def __contains__(self, node_id: str) -> bool:
        return node_id in self._nodes

    @property
    def node_ids(self) -> tuple[str, ...]:
        return tuple(self._nodes)

    @property
    def joined(self) -> Collection[JoinedNode]:
        return self._nodes.values()

    def of(self, node_ids: Collection[str]) -> dict[str, Any]:
        """Return the agents of these nodes, except for dead nodes, keyed by node id."""
        return {node: self._nodes[node].agent for node in node_ids if node in self._nodes}

    def meet(
        self,
        node_ids: Collection[str],
        heads: Collection[str] = (),
        *,
        wants_news: Callable[[float], bool],
    ) -> None:
        """Create agents for these nodes, and forget all other nodes. On a released node, an agent
        is created only if the node is a head. `wants_news` returns whether to ask an agent again,
        given the time (`time.monotonic`) at which the agent was last asked."""
        self._heads = frozenset(heads)
        self._nodes = {
            node_id: self._met(node_id, wants_news)
            for node_id in node_ids
            if node_id in self._heads or node_id not in self._released
        }

    async def release(self, node_ids: Collection[str]) -> None:
        """End the agents on these nodes, and don't create new agents on them until a later call
        omits the nodes. Ray considers an agent a worker in use, and considers only nodes without
        such workers idle."""
        leaving = frozenset(node_ids) - self._released - self._heads
        self._released = frozenset(node_ids)
        ends = (asyncio.to_thread(_end_agent, n, self._nodes.pop(n, None)) for n in leaving)
        for failure in await asyncio.gather(*ends, return_exceptions=True):
            if isinstance(failure, BaseException):
                logger.warning("the agent of a released node might still be running: %r", failure)

    def get(self, node_id: str) -> JoinedNode:
        return self._nodes[node_id]

    def silent_forkservers(self, node_ids: Collection[str]) -> tuple[SilentProcess, ...]:
        """Return the silent forkservers on these nodes. Nodes whose agents are silent are
        omitted."""
        known = ((node, self._nodes[node]) for node in node_ids if node in self._nodes)
        return tuple(
            SilentProcess(ProcessKind.FORKSERVER, node, one.forkserver_silent_since)
            for node, one in known
            if one.forkserver_silent_since is not None and one.silent_since is None
        )

    def look_again(self, node_ids: Collection[str]) -> None:
        """Ask these nodes again, because an attempt that ended might have left slots in
        quarantine."""
        for node_id in node_ids:
            if node_id in self._nodes:
                self._nodes[node_id].asked_at = -math.inf

    def _met(self, node_id: str, wants_news: Callable[[float], bool]) -> JoinedNode:
        known = self._nodes.get(node_id)
        if known is None or known.is_dead:
            agent = NodeAgent.options(  # type: ignore[attr-defined]
                name=agent_name(node_id),
                lifetime="detached",
                get_if_exists=True,
                max_concurrency=1000,
                scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False),
            ).remote(self._config.deployment_id, self._config.silence_limit_s)
            known = JoinedNode(agent, self._ask(agent), time.monotonic(), self._ping(agent))
            self._silence.answered(node_id)
            self._silence.asked(node_id)
        known.settle(self._config)
        is_old = time.monotonic() - known.asked_at > REDESCRIBE_S
        if known.asked.done() and (is_old or wants_news(known.asked_at)):
            known.asked, known.asked_at = self._ask(known.agent), time.monotonic()
            known.idle_workers = None
        self._listen(node_id, known)
        return known

    def _listen(self, node_id: str, known: JoinedNode) -> None:
        """Check whether an agent responds. If the agent is silent, report this, and eventually
        replace the agent."""
        if known.ping.done():
            if known.ping.exception() is None:
                known.has_answered, known.silent_since = True, None
                known.forkserver_silent_since = known.ping.result()
                self._silence.answered(node_id)
            known.ping = self._ping(known.agent)
            self._silence.asked(node_id)
        silent_s = self._silence.seconds(node_id)
        if known.has_answered and silent_s > self._limits.report_s:
            # Record when the silence began, so that the silence can be reported until the agent or
            # its replacement responds.
            known.silent_since = self._silence.since(node_id)
        if silent_s > (self._limits.replace_s if known.has_answered else self._limits.start_s):
            logger.warning(
                "killing the agent of node %s: no response for %.0f s", node_id, silent_s
            )
            ending = asyncio.to_thread(end_actor, known.agent, may_restart=True)
            known.ending = asyncio.ensure_future(ending)
            known.has_answered = False  # the next agent is given the time that a start takes
            self._silence.answered(node_id)

    def _ask(self, agent: Any) -> asyncio.Future[NodeReport]:
        path = nonce_path(self._config.storage_url)
        return _answer(agent.describe.remote(path))

    def _ping(self, agent: Any) -> asyncio.Future[float | None]:
        return _answer(agent.ping.remote(self._config.silence_limit_s))


def _answer(ref: Any) -> asyncio.Future[Any]:
    """Return a future for an agent's response. The future's exception is marked as retrieved,
    because there might be no other code that reads it if the agent's node is gone."""
    answer = asyncio.ensure_future(result(ref))
    answer.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
    return answer


def _end_agent(node_id: str, known: JoinedNode | None) -> None:
    """End the node's agent (blocking). `known` is None if another gateway might have created the
    agent."""
    with contextlib.suppress(ValueError):  # the agent does not exist
        end_actor(ray.get_actor(agent_name(node_id)) if known is None else known.agent)


def _silence(process: str, since: float) -> str:
    at = datetime.fromtimestamp(since, UTC)
    return f"the {process} has not responded since {at:%Y-%m-%d %H:%M:%S} UTC"


def refusal(report: NodeReport, config: GatewayConfig) -> str | None:
    """Return the reason why ranks can't run on the node with this report; None if they can."""
    if report.problem:
        return report.problem
    if report.version != dray.__version__:
        return (
            f"the node runs dray {report.version}, but the service runs dray {dray.__version__}: "
            "start the node's Ray from the service's checkout or image"
        )
    if nonce_path(config.storage_url) and report.storage_nonce != config.storage_nonce:
        return (
            f"the node can't access the service's files at {config.storage_url}: mount the same "
            "directory there, or set DRAY_STORAGE_URL to storage that all nodes share"
        )
    return None


async def result(ref: Any) -> Any:
    """Await an object ref. asyncio's functions require a coroutine."""
    return await ref
