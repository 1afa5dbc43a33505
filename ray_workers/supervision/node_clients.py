"""Asking every node what is seen of an attempt's processes there, and reaching them."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence, Set
from typing import Any

import ray

from ray_workers.node import placement_groups
from ray_workers.shared.contracts import AttemptSpec, Frame, ProcessKind, SilentProcess, agent_name
from ray_workers.shared.frames import HangReport, RankWhereabouts
from ray_workers.shared.heartbeat import RankObservation
from ray_workers.shared.machine_pace import MachinePace
from ray_workers.shared.silence import Silence, SilenceLimits
from ray_workers.supervision.hang_detector import Hang

STACKS_WAIT_S = 4.0
ANSWER_LIMIT_S = 3.0
"""A node that does not answer by then is passed over."""
ASK_AGAIN_S = 0.2
"""After an agent failed at once, as one does that is being restarted."""


class NodeClients:
    """The nodes of one attempt, by their agents."""

    def __init__(self, spec: AttemptSpec, agents: dict[str, Any], pace: MachinePace) -> None:
        """agents: node agents by node id, kept up with the nodes that there are."""
        self._pace = pace
        self._key = (spec.job_id, spec.attempt)
        self._agents = agents
        self._limits = SilenceLimits(spec.silence_limit_s)
        self._silence = Silence()
        self._silent_at = -math.inf

    async def ask(self, node_id: str, method: str, *arguments: Any, limit_s: float) -> Any:
        """What a node's agent answers. TimeoutError or Ray's error if it does not in time.

        limit_s: at the usual pace.
        """
        if self.is_silent(node_id):
            self._silent_at = time.monotonic()
        call = getattr(self._agents[node_id], method).remote(*self._key, *arguments)
        return await self._silence.ask(node_id, self._pace.stretched(limit_s), call)

    def is_silent(self, node_id: str) -> bool:
        """Whether its agent has not answered for so long that users are told."""
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

    async def know(self, node_ids: Iterable[str]) -> None:
        """Take these nodes in. ValueError if one has no agent."""
        for node_id in set(node_ids) - self._agents.keys():
            self._agents[node_id] = await asyncio.to_thread(ray.get_actor, agent_name(node_id))

    def forget(self, node_ids: Iterable[str]) -> None:
        """These nodes are gone: nobody there answers any more."""
        for node_id in node_ids:
            self._agents.pop(node_id, None)

    async def observations(self) -> list[RankObservation]:
        """Every process that left a page, also the dead. Of a node that does not answer, none."""
        return [one for answer in await self._all("observations") for one in answer]

    async def learn_pace(self) -> None:
        """Ask how slow the machines are; those that do not answer are taken to be as they were."""
        if told := await self._all("slowness"):
            self._pace.learn(max(told))

    async def stacks(self, ranks: Sequence[int]) -> dict[int, str]:
        """Where these ranks stand now, of those that can say so."""
        arguments = (list(ranks), STACKS_WAIT_S)
        answers = await self._all("stacks", *arguments, limit_s=STACKS_WAIT_S + ANSWER_LIMIT_S)
        return {rank: text for answer in answers for rank, text in answer.items()}

    async def errors(self) -> dict[int, Frame]:
        """The ERROR frame of each rank that left one, of its newest process that did. Nodes that
        do not answer are passed over."""
        return _newest(await self._all("errors"))

    async def all_errors(
        self, are_given_up: Callable[[Set[str]], Awaitable[bool]]
    ) -> dict[int, Frame]:
        """As `errors`, but every node is waited for until it answers or is given up."""
        answers: dict[str, list[Frame]] = {}
        while missing := set(self._agents) - answers.keys():
            answers |= await self._answers(missing, "errors")
            missing -= answers.keys()
            if missing and await are_given_up(missing):
                break
            if missing:
                await asyncio.sleep(ASK_AGAIN_S)
        return _newest(list(answers.values()))

    async def signal(self, node_id: str, rank: int, number: int) -> bool:
        """Send a signal to a rank's processes; False if none runs there, or nobody answers."""
        try:
            return bool(await self.ask(node_id, "signal", rank, number, limit_s=ANSWER_LIMIT_S))
        except TimeoutError:
            return False

    async def _all(
        self, method: str, *arguments: Any, limit_s: float = ANSWER_LIMIT_S
    ) -> list[Any]:
        return list(
            (await self._answers(self._agents, method, *arguments, limit_s=limit_s)).values()
        )

    async def _answers(
        self, asked: Iterable[str], method: str, *arguments: Any, limit_s: float = ANSWER_LIMIT_S
    ) -> dict[str, Any]:
        """By node, of those that answer."""
        node_ids = list(asked)
        calls = (self.ask(node_id, method, *arguments, limit_s=limit_s) for node_id in node_ids)
        answers = await asyncio.gather(*calls, return_exceptions=True)
        found = zip(node_ids, answers, strict=True)
        return {node: answer for node, answer in found if not isinstance(answer, BaseException)}


def _newest(answers: Sequence[Sequence[Frame]]) -> dict[int, Frame]:
    frames = sorted((one for answer in answers for one in answer), key=lambda f: f.incarnation)
    return {frame.rank: frame for frame in frames}


def hang_report(
    hang: Hang, observations: Sequence[RankObservation], stacks: Mapping[int, str]
) -> HangReport:
    """Which ranks are to blame for a hang, and where everyone was."""
    blamed = hang.culprits or tuple(observations)
    return HangReport(
        culprits=[observation.rank for observation in hang.culprits],
        step=min(observation.status.step for observation in blamed),
        phase=blamed[0].status.phase.name.lower(),
        waited_s=hang.waited_s,
        limit_s=hang.limit_s,
        ranks=[
            RankWhereabouts(
                rank=observation.rank,
                step=observation.status.step,
                phase=observation.status.phase.name.lower(),
                collective=observation.status.collective,
                since_s=observation.age_s,
                stack=stacks.get(observation.rank, ""),
            )
            for observation in observations
        ],
    )
