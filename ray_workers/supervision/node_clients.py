"""Calls of the node agents: they observe an attempt's processes and signal them."""

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
from ray_workers.shared.processes.machine_pace import USUAL, MachinePace
from ray_workers.shared.processes.procfs import Activity
from ray_workers.shared.processes.silence import Silence, SilenceLimits
from ray_workers.supervision.rules.timings import Timings
from ray_workers.supervision.system_metrics import SystemMetricsReporter


class CodeUnavailable(Exception):
    """A node does not get the job's code: its disk is full, say, or the storage does not answer."""


class CodeUnfetchable(Exception):
    """The code that a job names elsewhere can't be had, or not be used, however often one tries."""


class NodeClients:
    """The nodes of one attempt, by their agents."""

    def __init__(
        self,
        spec: AttemptSpec,
        agents: dict[str, Any],
        pace: MachinePace,
        system_metrics: SystemMetricsReporter,
        timings: Timings,
    ) -> None:
        """agents: node agents by node id; `know` and `forget` change it."""
        self._pace = pace
        self._system_metrics = system_metrics
        self._timings = timings
        self._key = (spec.job_id, spec.attempt)
        self._agents = agents
        self._limits = SilenceLimits(spec.silence_limit_s)
        self._silence = Silence()
        self._silent_at = -math.inf
        self._pace_at = -math.inf

    async def ask(self, node_id: str, method: str, *arguments: Any, limit_s: float) -> Any:
        """The answer of a node's agent; raises TimeoutError, or Ray's error, if none comes in time.

        limit_s: at the usual pace.
        """
        if self.is_silent(node_id):
            self._silent_at = time.monotonic()
        call = getattr(self._agents[node_id], method).remote(*self._key, *arguments)
        return await self._silence.ask(node_id, self._pace.stretched(limit_s), call)

    def is_silent(self, node_id: str) -> bool:
        """Whether its agent has not answered for so long that users are to know."""
        return self._silence.seconds(node_id) > self._limits.report_s

    @property
    def was_one_silent(self) -> bool:
        """Whether an agent is silent, or was a moment ago: one that is ended for it takes the
        node's ranks along."""
        return time.monotonic() - self._silent_at < self._limits.start_s

    def silent(self) -> tuple[SilentProcess, ...]:
        return tuple(
            SilentProcess(ProcessKind.NODE_AGENT, node_id, self._silence.since(node_id))
            for node_id in self._agents
            if self.is_silent(node_id)
        )

    async def are_given_up(self, node_ids: Set[str]) -> bool:
        """Whether the last reports of these nodes, which did not answer, are waited for no longer:
        they are dead, or silent for too long. An agent that died comes back and has them all."""
        longest_s = self._limits.last_reports_s
        if all(self._silence.seconds(node_id) > longest_s for node_id in node_ids):
            return True
        return not node_ids & await asyncio.to_thread(placement_groups.alive_nodes)

    async def put_code(self, spec: AttemptSpec, node_ids: Collection[str]) -> None:
        """Have the code that the job brings put into its directory on these nodes.

        CodeUnavailable if a node can't have it now, CodeUnfetchable if none ever will; Ray's error
        if an agent dies.
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
                message = f"the code can't be put on the node {node_id}: {problem.message}"
                raise kind(message)

    async def know(self, node_ids: Iterable[str]) -> None:
        """Take these nodes in. ValueError if one has no agent."""
        for node_id in set(node_ids) - self._agents.keys():
            self._agents[node_id] = await asyncio.to_thread(ray.get_actor, agent_name(node_id))

    def forget(self, node_ids: Iterable[str]) -> None:
        """These nodes are gone, and are not asked any more."""
        for node_id in node_ids:
            self._agents.pop(node_id, None)

    async def observations(self) -> list[RankObservation]:
        """Every process that left a page, also the dead. Of a node that does not answer, none."""
        with_pace = self._pace_is_older_than(self._timings.pace_period_s)
        with_metrics = self._system_metrics.take_wish()
        answers: list[NodeObservation] = await self._all("observe", with_pace, with_metrics)
        if with_pace and answers:
            self._pace.learn(max(one.slowness or USUAL for one in answers))
            self._pace_at = time.monotonic()
        if with_metrics:
            self._system_metrics.report(answer.system_metrics for answer in answers)
        return [one for answer in answers for one in answer.ranks]

    async def activity(self) -> dict[tuple[int, int], Activity]:
        """The work of every living process so far, by its rank and incarnation."""
        return {key: one for answer in await self._all("activity") for key, one in answer.items()}

    async def keep_pace(self) -> None:
        """Ask how slow the machines are, unless an observation has brought it lately; without an
        answer they are as slow as before."""
        if self._pace_is_older_than(self._timings.pace_limit_s):
            await self.observations()

    def _pace_is_older_than(self, age_s: float) -> bool:
        return time.monotonic() - self._pace_at >= age_s

    async def stacks(self, ranks: Sequence[int]) -> dict[int, str]:
        """The stacks of these ranks, as far as they can be had."""
        wait_s = self._timings.stacks_wait_s
        limit_s = wait_s + self._timings.answer_limit_s
        answers = await self._all("stacks", list(ranks), wait_s, limit_s=limit_s)
        return {rank: text for answer in answers for rank, text in answer.items()}

    async def errors(self) -> list[Frame]:
        """The ERROR frames that processes left. Nodes that do not answer are passed over."""
        return _joined(await self._all("errors"))

    async def all_errors(self, are_given_up: Callable[[Set[str]], Awaitable[bool]]) -> list[Frame]:
        """As `errors`, but every node is waited for until it answers or is given up."""
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
        """Send a signal to a rank's processes; False if none runs there, or nobody answers."""
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
        """By node, of those that answer."""
        node_ids = list(asked)
        limit_s = self._timings.answer_limit_s if limit_s is None else limit_s
        calls = (self.ask(node_id, method, *arguments, limit_s=limit_s) for node_id in node_ids)
        answers = await asyncio.gather(*calls, return_exceptions=True)
        found = zip(node_ids, answers, strict=True)
        return {node: answer for node, answer in found if not isinstance(answer, BaseException)}


def _joined(answers: Iterable[Sequence[Frame]]) -> list[Frame]:
    return [frame for answer in answers for frame in answer]
