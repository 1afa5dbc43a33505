"""Implements the port's methods with a Ray driver in this process. This process is the gateway, a
child of the service, because a Ray driver exits when Ray's GCS is lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import ray
from ray.autoscaler.sdk import request_resources
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayActorError, RayError

from ray_workers.node import compat_ray
from ray_workers.node.ray_calls import brief, end_actor, result_within
from ray_workers.shared import spool_reader
from ray_workers.shared.commands import Command
from ray_workers.shared.contracts import (
    AttemptSpec,
    Cause,
    Frame,
    Outcome,
    Phase,
    PollReply,
    ProcessKind,
    SilentProcess,
)
from ray_workers.shared.names import namespace
from ray_workers.shared.node_needs import NodeEnvironment, NodeNeeds
from ray_workers.shared.processes.machine_speed import OVERLOADED, USUAL, overload_note
from ray_workers.shared.processes.silence import Silence, SilenceLimits
from ray_workers.shared.self_tests import NodeTest
from ray_workers.shared.spool_reader import SpoolRead
from ray_workers.supervision.supervisor import Farewell
from service.cluster.port import AttemptRef, ClusterSnapshot, ClusterUnavailable
from service.cluster.ray import launch_once, prestart
from service.cluster.ray.described_nodes import described, is_head_or_control
from service.cluster.ray.node_agents import GatewayConfig, NodeAgents
from service.cluster.ray.supervisors import Supervisors
from service.cluster.ray.unowned_slots import UnownedSlots
from service.config.node_types import labels_in, without_labels

logger = logging.getLogger(__name__)

AGENT_WAIT_S = 20.0
"""Maximum number of seconds that the driver waits for an agent's response."""
SUPERVISOR_SLACK_S = 10.0
"""Seconds, in addition to a poll's waiting time, that a supervisor may take to query its nodes."""
ANSWER_LIMIT_S = 5.0
"""Maximum number of seconds that the driver waits for a response from any other process."""
NO_ANSWER = (TimeoutError, ActorUnavailableError)
"""Exceptions raised by calls to an actor that might be suspended. If a new driver has no connection
to the actor yet, only the first call times out; later calls fail immediately."""
EXPECTED = (RayError, ClusterUnavailable, OSError)
"""Exceptions that calls can raise if the cluster is faulty. OSError includes TimeoutError."""
_logged: set[str] = set()


class RayCluster:
    """Implements the port `Cluster` with the Ray cluster to which this process is connected."""

    def __init__(self, config: GatewayConfig) -> None:
        self._config = config
        self._supervisors: dict[tuple[str, int], Any] = {}
        self._launching: dict[tuple[str, int], asyncio.Future[Any]] = {}
        self._agents = NodeAgents(config)
        self._limits = SilenceLimits(config.silence_limit_s)
        self._silence = Silence()
        self._heard: set[tuple[str, int]] = set()
        """Attempts whose supervisor has responded to this process."""
        self._looking_since: dict[tuple[str, int], float] = {}
        """For each attempt, when the search for frames from dead nodes began (`time.monotonic`)."""
        self._ended: dict[tuple[str, int], float] = {}
        """For each attempt whose supervisor was killed because it did not respond: how many times
        slower than usual its machines were."""
        self._prestarter = prestart.Prestarter()
        self._unowned = UnownedSlots()
        self._pool = Supervisors(config.deployment_id)
        self._drained: Collection[str] = ()

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

    async def ping(self) -> None:
        """Do nothing. If the gateway is suspended, the caller gets no response."""

    async def snapshot(self) -> ClusterSnapshot:
        nodes = await asyncio.to_thread(ray.nodes)
        available = await asyncio.to_thread(compat_ray.available_by_node)
        self._drained = drained = await asyncio.to_thread(compat_ray.drained_nodes)
        alive = [node for node in nodes if node["Alive"]]
        node_ids = [node["NodeID"] for node in alive]
        heads = {node["NodeID"] for node in alive if is_head_or_control(node)}
        self._agents.meet(node_ids, heads, wants_news=self._prestarter.awaits_news)
        for node in alive:
            if node["NodeID"] in self._agents:
                self._keep_warm(node)
        return ClusterSnapshot(
            session=self._session,
            address=self._config.address,
            dashboard_url=self._dashboard_url,
            shared=self._config.shared,
            nodes=tuple(
                described(
                    *(node, available.get(node["NodeID"], {}), drained.get(node["NodeID"])),
                    self._agents.get(node["NodeID"]) if node["NodeID"] in self._agents else None,
                )
                for node in alive
            ),
        )

    def _keep_warm(self, node: Mapping[str, Any]) -> None:
        joined = self._agents.get(node["NodeID"])
        if joined.idle_workers is not None:
            address = f"{node['NodeManagerAddress']}:{node['NodeManagerPort']}"
            count = prestart.Count(address, joined.idle_workers, joined.asked_at)
            self._prestarter.keep_warm(node["NodeID"], count)

    async def launch(self, spec: AttemptSpec) -> None:
        starting = await self._pool.claim(spec, self._drained)
        # The launch continues even if the caller stops waiting. Record the launch, because looking
        # up the actor by name may fail until its creation is complete.
        key = (spec.job_id, spec.attempt)
        launching = asyncio.ensure_future(starting)
        self._launching[key] = launching
        launching.add_done_callback(lambda _: self._launching.pop(key, None))
        self._supervisors[key] = await asyncio.shield(launching)
        self._prestarter.used()

    async def give_up(self, ref: AttemptRef) -> None:
        deployment_id = self._config.deployment_id
        await asyncio.to_thread(launch_once.give_up, deployment_id, ref.job_id, ref.attempt)

    async def poll(
        self, ref: AttemptRef, cursor: Mapping[str, int], wait_s: float, max_bytes: int
    ) -> PollReply:
        if ref.session != self._session:
            lost = Outcome.unseen(Cause.NODE_LOST, "the attempt's Ray cluster no longer exists")
            await self.snapshot()  # to update the list of nodes
            return await self._left_of(ref, cursor, max_bytes) or _ended(cursor, lost)
        if (ref.job_id, ref.attempt) in self._launching:
            return _nothing_new(cursor, Phase.ACQUIRING)
        try:
            supervisor = await self._supervisor(ref)
        except ValueError:
            return await self._poll_unsupervised(ref, cursor, max_bytes, "there is no such actor")
        key = (ref.job_id, ref.attempt)
        try:
            call = supervisor.poll.remote(key, dict(cursor), wait_s, max_bytes)
            reply: PollReply | None = await self._silence.ask(
                key, wait_s + SUPERVISOR_SLACK_S, call
            )
        except ActorDiedError as error:
            self._forget(key)
            return await self._poll_unsupervised(ref, cursor, max_bytes, brief(error))
        except NO_ANSWER:
            return await self._silent_reply(ref, cursor)
        if reply is None:
            self._forget(key)
            how = "it was never handed over to its supervisor"
            return await self._poll_unsupervised(ref, cursor, max_bytes, how)
        self._heard.add(key)
        if reply.outcome is not None:
            self._agents.look_again(ref.node_ids)
            if reply.outcome.cause is Cause.NODE_LOST:
                left = await self._left_of(ref, reply.cursor, max_bytes)
                if left is not None:
                    reply = replace(left, frames=(*reply.frames, *left.frames))
        silent = (*reply.silent, *self._agents.silent_forkservers(ref.node_ids))
        return replace(reply, silent=silent)

    async def _silent_reply(self, ref: AttemptRef, cursor: Mapping[str, int]) -> PollReply:
        """Return the reply for an attempt whose supervisor doesn't respond.

        If Ray itself responds, the supervisor is killed once it has been silent for longer than its
        time limit, which is longer on slow machines. Killing the supervisor also ends its ranks.
        """
        key = (ref.job_id, ref.attempt)
        silent_s, since = self._silence.seconds(key), self._silence.since(key)
        has_started = key in self._heard or cursor  # or it has answered another gateway
        limit_s = self._limits.replace_s if has_started else self._limits.start_s
        slowness = await self._slowness(ref)
        if silent_s > limit_s * slowness:
            await self.snapshot()
            logger.warning(
                "killing the supervisor of %s attempt %d: no response for %.0f s", *key, silent_s
            )
            self._ended[key] = slowness
            await asyncio.to_thread(end_actor, await self._supervisor(ref))
        silent = (SilentProcess(ProcessKind.SUPERVISOR, None, since),)
        shown = silent if silent_s > self._limits.report_s else ()
        return _nothing_new(cursor, None, shown)

    async def _slowness(self, ref: AttemptRef) -> float:
        """Return how many times slower than usual the machines are, according to their agents."""
        asked = [
            result_within(ANSWER_LIMIT_S, agent.slowness.remote(ref.job_id, ref.attempt))
            for agent in self._agents.of(ref.node_ids).values()
        ]
        answers = await asyncio.gather(*asked, return_exceptions=True)
        return max((a for a in answers if not isinstance(a, BaseException)), default=USUAL)

    def _forget(self, key: tuple[str, int]) -> None:
        self._looking_since.pop(key, None)
        self._supervisors.pop(key, None)
        self._heard.discard(key)
        self._silence.answered(key)

    async def _supervisor(self, ref: AttemptRef) -> Any:
        """Return the handle of the attempt's supervisor. Raises ValueError if there is none."""
        key = (ref.job_id, ref.attempt)
        if key not in self._supervisors:
            self._supervisors[key] = await asyncio.to_thread(self._pool.find, *key)
        return self._supervisors[key]

    async def _poll_unsupervised(
        self, ref: AttemptRef, cursor: Mapping[str, int], max_bytes: int, how: str
    ) -> PollReply:
        """Return the reply for an attempt without a supervisor: its unread frames or, once all of
        its processes are known to be gone, its outcome."""
        attempt = (ref.job_id, ref.attempt)
        await self.snapshot()  # to update the live nodes and their agents
        agents = self._agents.of(ref.node_ids)
        self._agents.look_again(ref.node_ids)
        if not await self._unowned.are_released(attempt, ref.node_ids):
            return _nothing_new(cursor, Phase.STOPPING)
        ends = [a.keep_output.remote(*attempt, []) for a in agents.values()]
        kept = await asyncio.gather(
            *(result_within(ANSWER_LIMIT_S, end) for end in ends), return_exceptions=True
        )
        # A node returns a string while it is copying files. `_left_of` handles unresponsive nodes.
        if any(isinstance(end, str) for end in kept):
            return _nothing_new(cursor, Phase.STOPPING)
        reads = await asyncio.gather(
            *(self._read_unsupervised(ref, node, dict(cursor), max_bytes) for node in agents),
            return_exceptions=True,
        )
        frames: list[Frame] = []
        advanced = dict(cursor)
        for answer in reads:
            if isinstance(answer, SpoolRead):
                for key, chunk in answer.data.items():
                    frames += spool_reader.decode(key, chunk)
                    advanced[key] = advanced.get(key, 0) + len(chunk)
        if advanced != dict(cursor):
            return PollReply(
                advanced, Phase.STOPPING, {}, tuple(frames), more=True, outcome=None, silent=()
            )
        unread = [n for n, r in zip(agents, reads, strict=True) if not isinstance(r, SpoolRead)]
        awaited = [n for n in unread if not self._is_given_up(ref, n)]
        if awaited:
            silent = tuple(
                SilentProcess(ProcessKind.NODE_AGENT, n, self._silence.since((ref, n)))
                for n in awaited
                if self._silence.seconds((ref, n)) > self._limits.report_s
            )
            return _nothing_new(cursor, Phase.STOPPING, silent)
        is_lost = bool(unread) or len(agents) < len(ref.node_ids)
        if is_lost and (left := await self._left_of(ref, cursor, max_bytes)) is not None:
            return left
        for node_id in ref.node_ids:
            self._silence.answered((ref, node_id))
        if is_lost:
            lost = Outcome.unseen(Cause.NODE_LOST, "a node on which the attempt ran was lost")
            return _ended(cursor, lost)
        slowness = self._ended.get(attempt, USUAL)
        if attempt in self._ended:
            how = "the supervisor did not respond and was killed"
        message = f"the attempt lost its supervisor: {how}{overload_note(slowness)}"
        slowness = slowness if slowness >= OVERLOADED else USUAL
        return _ended(cursor, Outcome.unseen(Cause.SUPERVISOR_LOST, message, slowness))

    async def _left_of(
        self, ref: AttemptRef, cursor: Mapping[str, int], max_bytes: int
    ) -> PollReply | None:
        """Return a reply with the last frames of dead nodes, which new nodes on the same machines
        can read; None if there are no more frames.

        Waits, up to a time limit, for nodes that are starting or don't respond, because after a
        restart of Ray on a machine, the machine's new node can read the frames of the old node. If
        no node is alive, Ray must be restarted first.
        """
        began = self._looking_since.setdefault((ref.job_id, ref.attempt), time.monotonic())
        nodes = [node for node in self._agents.joined if not node.is_dead]
        asked = (ref.job_id, ref.attempt, dict(cursor), max_bytes)
        calls = (node.agent.read_left.remote(*asked) for node in nodes)
        found = await asyncio.gather(
            *(result_within(AGENT_WAIT_S, call) for call in calls), return_exceptions=True
        )
        data: dict[str, bytes] = {}
        for answer in found:
            if not isinstance(answer, BaseException):
                data |= answer
        if data:
            frames = [frame for key in data for frame in spool_reader.decode(key, data[key])]
            advanced = {key: cursor.get(key, 0) + len(chunk) for key, chunk in data.items()}
            nothing_new = _nothing_new({**cursor, **advanced}, Phase.STOPPING)
            return replace(nothing_new, frames=tuple(frames), more=True)
        has_all = not any(isinstance(answer, BaseException) for answer in found)
        if nodes and has_all and not any(node.is_starting for node in nodes):
            return None
        limits = self._limits
        limit_s = limits.start_s if nodes else limits.ray_s + limits.join_s
        is_over = time.monotonic() - began > limit_s
        return None if is_over else _nothing_new(cursor, Phase.STOPPING)

    async def _read_unsupervised(
        self, ref: AttemptRef, node_id: str, cursor: dict[str, int], max_bytes: int
    ) -> SpoolRead:
        agent = self._agents.get(node_id).agent
        call = agent.read.remote(ref.job_id, ref.attempt, cursor, max_bytes, 0.0)
        answer: SpoolRead = await self._silence.ask((ref, node_id), ANSWER_LIMIT_S, call)
        return answer

    def _is_given_up(self, ref: AttemptRef, node_id: str) -> bool:
        return self._silence.seconds((ref, node_id)) > self._limits.last_reports_s

    async def send(self, ref: AttemptRef, command: Command) -> None:
        with contextlib.suppress(ValueError, ActorDiedError):
            supervisor = await self._supervisor(ref)
            call = supervisor.carry_out.remote((ref.job_id, ref.attempt), command)
            await result_within(ANSWER_LIMIT_S, call)

    async def acknowledge(self, ref: AttemptRef) -> None:
        key = (ref.job_id, ref.attempt)
        try:
            supervisor = await self._supervisor(ref)
            try:
                call = supervisor.acknowledge.remote(key)
                farewell: Farewell | None = await result_within(2 * ANSWER_LIMIT_S, call)
            except NO_ANSWER:
                await asyncio.to_thread(end_actor, supervisor)
            else:
                if farewell is None:
                    raise ValueError("it is the supervisor of another attempt")
                await self._pool.dismiss(supervisor, farewell)
        except (ValueError, RayActorError):
            await self.snapshot()
            agents = list(self._agents.of(ref.node_ids).values())
            if len(agents) < len(ref.node_ids):  # other nodes might have the frames of dead nodes
                agents = [node.agent for node in self._agents.joined]
            calls = (agent.drop.remote(ref.job_id, ref.attempt) for agent in agents)
            drops = [result_within(ANSWER_LIMIT_S, call) for call in calls]
            await asyncio.gather(*drops, return_exceptions=True)
        self._forget(key)
        self._ended.pop(key, None)
        await self._unowned.sweep(key, ref.node_ids)

    async def attempts(self) -> list[AttemptRef]:
        found = set()
        for name in await asyncio.to_thread(ray.util.list_named_actors):
            match name.split(":"):
                case ["dray", job_id, attempt, "supervisor"]:
                    found.add((job_id, int(attempt)))
        # Include attempts whose supervisor died before its spools were deleted.
        for spooled in await self._of_agents(lambda agent: agent.spooled.remote()):
            found.update(spooled)
        kept = {
            (q.job_id, q.attempt) for node in self._agents.joined for q in node.quarantined or ()
        }
        found |= await self._unowned.keys(kept)
        nodes = self._agents.node_ids
        return [AttemptRef(*key, self._session, nodes) for key in sorted(found)]

    async def request_nodes(
        self, bundles: Sequence[tuple[Mapping[str, float], int]], released: Sequence[str]
    ) -> None:
        each = [bundle for bundle, number in bundles for _ in range(number)]
        selectors = [labels_in(bundle) for bundle in each]
        # Pass labels only if there are any, because older releases of Ray don't accept this
        # argument.
        labels = {"bundle_label_selectors": selectors} if any(selectors) else {}
        asked: dict[str, Any] = {"bundles": [without_labels(bundle) for bundle in each], **labels}
        await asyncio.to_thread(request_resources, **asked)
        await self._agents.release(released)

    async def prepare(self, node_id: str, needs: NodeNeeds) -> NodeEnvironment:
        for agent in self._agents.of([node_id]).values():
            answer: NodeEnvironment = await result_within(AGENT_WAIT_S, agent.prepare.remote(needs))
            return answer
        raise ClusterUnavailable(f"the node {node_id} is gone")

    async def forget(self, node_id: str, needs: NodeNeeds) -> None:
        for agent in self._agents.of([node_id]).values():
            await result_within(AGENT_WAIT_S, agent.forget.remote(needs))

    async def check(self, node_id: str, check_id: str, num_held: int) -> NodeTest:
        for agent in self._agents.of([node_id]).values():
            call = agent.check.remote(check_id, num_held)
            answer: NodeTest = await result_within(ANSWER_LIMIT_S, call)
            return answer
        raise ClusterUnavailable(f"the node {node_id} is gone")

    async def kept_jobs(self) -> list[str]:
        answers = await self._of_agents(lambda agent: agent.kept_jobs.remote())
        return sorted({job_id for found in answers for job_id in found})

    async def drop_jobs(self, job_ids: Sequence[str]) -> None:
        await self._of_agents(lambda agent: agent.drop_jobs.remote(job_ids))

    async def _of_agents(self, ask: Callable[[Any], Any]) -> list[Any]:
        """Return the responses of the agents that respond in time."""
        asked = [result_within(AGENT_WAIT_S, ask(agent)) for agent in self._accepted_agents()]
        answers = await asyncio.gather(*asked, return_exceptions=True)
        return [answer for answer in answers if not isinstance(answer, BaseException)]

    def _accepted_agents(self) -> list[Any]:
        return [node.agent for node in self._agents.joined if node.refused is None]


def _ended(cursor: Mapping[str, int], outcome: Outcome) -> PollReply:
    return replace(_nothing_new(cursor, Phase.ENDED), outcome=outcome)


def _nothing_new(
    cursor: Mapping[str, int], phase: Phase | None, silent: tuple[SilentProcess, ...] = ()
) -> PollReply:
    return PollReply(dict(cursor), phase, {}, frames=(), more=False, outcome=None, silent=silent)


def as_unavailable(error: Exception) -> ClusterUnavailable:
    """Convert a failure of Ray to an error of the `Cluster` port. Unexpected failures, which might
    be bugs in dray, are logged once with their traceback."""
    kind = "Ray" if isinstance(error, RayError) else type(error).__name__
    message = f"{kind}: {brief(error)}"
    if not isinstance(error, EXPECTED) and message not in _logged:
        _logged.add(message)
        logger.error("a call to Ray failed", exc_info=error)
    return ClusterUnavailable(message)
