"""Calls to the node agents, which observe an attempt's processes and send signals to them."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence, Set
from typing import Any

import ray

from ray_workers.node import placement_groups
from ray_workers.node.ray_calls import result_within
from ray_workers.shared.contracts import AttemptSpec, Frame, ProcessKind, SilentProcess
from ray_workers.shared.heartbeat import NodeObservation, RankObservation
from ray_workers.shared.names import agent_name
from ray_workers.shared.processes.machine_speed import USUAL, MachineSpeed
from ray_workers.shared.processes.procfs import Activity
from ray_workers.shared.processes.silence import Silence, SilenceLimits
from ray_workers.supervision.rules.timings import Timings
from ray_workers.supervision.system_metrics import SystemMetricsReporter


class CodeUnavailable(Exception):
    """A node can't get the job's code at the moment, for example because its disk is full."""


class CodeUnfetchable(Exception):
    """The remote code of a job can't be fetched or used, and a retry would also fail."""


class NodeClients:
    """Calls the node agents of one attempt."""

    def __init__(
        self,
        spec: AttemptSpec,
        agents: dict[str, Any],
        speed: MachineSpeed,
        system_metrics: SystemMetricsReporter,
        timings: Timings,
    ) -> None:
        """`agents` maps node ids to node agents; `know` and `forget` modify this dict."""
        self._speed = speed
        self._system_metrics = system_metrics
        self._timings = timings
        self._key = (spec.job_id, spec.attempt)
        self._agents = agents
        self._limits = SilenceLimits(spec.silence_limit_s)
        self._silence = Silence()
        self._silent_at = -math.inf
        self._speed_at = -math.inf

    async def ask(self, node_id: str, method: str, *arguments: Any, limit_s: float) -> Any:
        """Call a node's agent and return the response. Raises TimeoutError or Ray's error if the
        agent does not respond.

        `limit_s` is the limit at the machines' usual speed.
        """
        if self.is_silent(node_id):
            self._silent_at = time.monotonic()
        call = getattr(self._agents[node_id], method).remote(*self._key, *arguments)
        return await self._silence.ask(node_id, self._speed.stretched(limit_s), call)

    def is_silent(self, node_id: str) -> bool:
        """Whether the node's agent has been unresponsive for so long that users are notified."""
        return self._silence.seconds(node_id) > self._limits.report_s

    @property
    def was_one_silent(self) -> bool:
        """Whether an agent is unresponsive, or was unresponsive recently. When an unresponsive
        agent is killed, the ranks on its node are also killed, so the death of the agent can
        explain why ranks were lost."""
        return time.monotonic() - self._silent_at < self._limits.start_s

    def silent(self) -> tuple[SilentProcess, ...]:
        return tuple(
            SilentProcess(ProcessKind.NODE_AGENT, node_id, self._silence.since(node_id))
            for node_id in self._agents
            if self.is_silent(node_id)
        )

    async def are_given_up(self, node_ids: Set[str]) -> bool:
        """Whether to give up waiting for the last reports of these unresponsive nodes, because the
        nodes are dead or have been silent for too long. Return False for agents that are
        restarting, because their reports are not lost."""
        longest_s = self._limits.last_reports_s
        if all(self._silence.seconds(node_id) > longest_s for node_id in node_ids):
            return True
        return not node_ids & await asyncio.to_thread(placement_groups.alive_nodes)

    async def put_code(self, spec: AttemptSpec, node_ids: Collection[str]) -> None:
        """Have the agents of these nodes put the job's code into the job's directory.

        Raises CodeUnavailable if a node can't get the code at the moment, CodeUnfetchable if no
        node will ever be able to get the code, and Ray's error if an agent dies.
        """
        if spec.code is None:
            return
        asked = {
            node_id: result_within(
                self._timings.code_limit_s,
                agent.put_code.remote(spec.job_id, spec.code, spec.storage_url),
            )
            for node_id, agent in self._agents.items()
            if node_id in node_ids
        }
        for node_id, problem in zip(asked, await asyncio.gather(*asked.values()), strict=True):
            if problem is not None:
                kind = CodeUnfetchable if problem.is_final else CodeUnavailable
                message = f"the code can't be copied to the node {node_id}: {problem.message}"
                raise kind(message)

    async def know(self, node_ids: Iterable[str]) -> None:
        """Look up the agents of these nodes. Raises ValueError if a node has no agent."""
        for node_id in set(node_ids) - self._agents.keys():
            self._agents[node_id] = await asyncio.to_thread(ray.get_actor, agent_name(node_id))

    def forget(self, node_ids: Iterable[str]) -> None:
        """Stop calling the agents of these nodes, because the nodes are gone."""
        for node_id in node_ids:
            self._agents.pop(node_id, None)

    async def observations(self) -> list[RankObservation]:
        """Return observations of all processes that have a heartbeat page, including ended
        processes. Nodes that do not respond are skipped."""
        with_speed = self._speed_is_older_than(self._timings.speed_period_s)
        with_metrics = self._system_metrics.take_wish()
        answers: list[NodeObservation] = await self._all("observe", with_speed, with_metrics)
        if with_speed and answers:
            self._speed.learn(max(one.slowness or USUAL for one in answers))
            self._speed_at = time.monotonic()
        if with_metrics:
            self._system_metrics.report(answer.system_metrics for answer in answers)
        return [one for answer in answers for one in answer.ranks]

    async def activity(self) -> dict[tuple[int, int], Activity]:
        """Return the CPU time and I/O that each running process has used so far, keyed by rank and
        incarnation."""
        return {key: one for answer in await self._all("activity") for key, one in answer.items()}

    async def refresh_speed(self) -> None:
        """Measure how slow the machines are, unless they were measured recently. If no agent
        responds, the last known speed is kept."""
        if self._speed_is_older_than(self._timings.speed_limit_s):
            await self.observations()

    def _speed_is_older_than(self, age_s: float) -> bool:
        return time.monotonic() - self._speed_at >= age_s

    async def stacks(self, ranks: Sequence[int]) -> dict[int, str]:
        """Return the available stack traces of these ranks."""
        wait_s = self._timings.stacks_wait_s
        limit_s = wait_s + self._timings.answer_limit_s
        answers = await self._all("stacks", list(ranks), wait_s, limit_s=limit_s)
        return {rank: text for answer in answers for rank, text in answer.items()}

    async def errors(self) -> list[Frame]:
        """Return the ERROR frames that processes wrote before they exited. Nodes that do not
        respond are skipped."""
        return _joined(await self._all("errors"))

    async def all_errors(self, are_given_up: Callable[[Set[str]], Awaitable[bool]]) -> list[Frame]:
        """Like `errors`, but wait until every node has responded, or until `are_given_up` returns
        True for the remaining nodes."""
        answers: dict[str, list[Frame]] = {}
        while missing := set(self._agents) - answers.keys():
            answers |= await self._answers(missing, "errors")
            missing -= answers.keys()
            if missing and await are_given_up(missing):
                break
            if missing:
                await asyncio.sleep(self._timings.ask_again_pause_s)
        return _joined(answers.values())

    async def signal(self, node_id: str, rank: int, number: int) -> bool:
        """Send a signal to the processes of a rank. Returns False if the rank has no running
        process on the node, or if the agent does not respond."""
        limit_s = self._timings.answer_limit_s
        try:
            return bool(await self.ask(node_id, "signal", rank, number, limit_s=limit_s))
        except TimeoutError:
            return False

    async def _all(self, method: str, *arguments: Any, limit_s: float | None = None) -> list[Any]:
        answers = await self._answers(self._agents, method, *arguments, limit_s=limit_s)
        return list(answers.values())

    async def _answers(
        self, asked: Iterable[str], method: str, *arguments: Any, limit_s: float | None = None
    ) -> dict[str, Any]:
        """Return the responses, keyed by node id. Nodes that do not respond are omitted."""
        node_ids = list(asked)
        limit_s = self._timings.answer_limit_s if limit_s is None else limit_s
        calls = (self.ask(node_id, method, *arguments, limit_s=limit_s) for node_id in node_ids)
        answers = await asyncio.gather(*calls, return_exceptions=True)
        found = zip(node_ids, answers, strict=True)
        return {node: answer for node, answer in found if not isinstance(answer, BaseException)}


def _joined(answers: Iterable[Sequence[Frame]]) -> list[Frame]:
    return [frame for answer in answers for frame in answer]
