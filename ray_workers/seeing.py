"""Asking every node what is seen of an attempt's processes there, and reaching them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import ray

from ray_workers.contracts import AttemptSpec, Frame, agent_name
from ray_workers.pages import Sight
from ray_workers.watchdog import Hang

STACKS_WAIT_S = 4.0
ANSWER_LIMIT_S = 3.0
"""A node that does not answer by then is passed over."""


class Nodes:
    """The nodes of one attempt, by their agents."""

    def __init__(self, spec: AttemptSpec, agents: dict[str, Any]) -> None:
        """agents: node agents by node id, kept up with the nodes that there are."""
        self._key = (spec.job_id, spec.attempt)
        self._agents = agents

    async def know(self, node_ids: Iterable[str]) -> None:
        """Take these nodes in. ValueError if one has no agent."""
        for node_id in set(node_ids) - self._agents.keys():
            self._agents[node_id] = await asyncio.to_thread(ray.get_actor, agent_name(node_id))

    def forget(self, node_ids: Iterable[str]) -> None:
        """These nodes are gone: nobody there answers any more."""
        for node_id in node_ids:
            self._agents.pop(node_id, None)

    async def sights(self) -> list[Sight]:
        """Every process that left a page, also the dead. Of a node that does not answer, none."""
        return [one for answer in await self._all("sights") for one in answer]

    async def stacks(self, ranks: Sequence[int]) -> dict[int, str]:
        """Where these ranks stand now, of those that can say so."""
        arguments = (list(ranks), STACKS_WAIT_S)
        answers = await self._all("stacks", *arguments, limit_s=STACKS_WAIT_S + ANSWER_LIMIT_S)
        return {rank: text for answer in answers for rank, text in answer.items()}

    async def errors(self) -> dict[int, Frame]:
        """The last words of each rank that had any, of its newest process that did."""
        frames: list[Frame] = [one for answer in await self._all("errors") for one in answer]
        return {frame.rank: frame for frame in sorted(frames, key=lambda frame: frame.incarnation)}

    async def signal(self, node_id: str, rank: int, number: int) -> bool:
        """Send a signal to a rank's processes; False if none runs there."""
        reached: bool = await self._agents[node_id].signal.remote(*self._key, rank, number)
        return reached

    async def _all(
        self, method: str, *arguments: Any, limit_s: float = ANSWER_LIMIT_S
    ) -> list[Any]:
        calls = (
            getattr(agent, method).remote(*self._key, *arguments) for agent in self._agents.values()
        )
        bounded = (result_within(limit_s, call) for call in calls)
        answers = await asyncio.gather(*bounded, return_exceptions=True)
        return [answer for answer in answers if not isinstance(answer, BaseException)]


def hang_bundle(hang: Hang, sights: Sequence[Sight], stacks: Mapping[int, str]) -> dict[str, Any]:
    """What is kept of a hang: who is to blame, and where everyone was."""
    blamed = hang.culprits or tuple(sights)
    return {
        "culprits": [sight.rank for sight in hang.culprits],
        "step": min(sight.look.step for sight in blamed),
        "phase": blamed[0].look.doing.name.lower(),
        "waited_s": hang.waited_s,
        "limit_s": hang.limit_s,
        "ranks": [
            {
                "rank": sight.rank,
                "step": sight.look.step,
                "phase": sight.look.doing.name.lower(),
                "collective": sight.look.collective,
                "since_s": sight.age_s,
                "stack": stacks.get(sight.rank, ""),
            }
            for sight in sights
        ],
    }


async def result_within(limit_s: float, ref: Any) -> Any:
    """What a remote call answers; TimeoutError when it takes longer."""
    async with asyncio.timeout(limit_s):
        return await ref
