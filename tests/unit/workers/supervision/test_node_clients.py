"""Calls of the node agents, without Ray."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from ray_workers.shared.heartbeat import NodeObservation, RankObservation
from ray_workers.shared.processes.machine_pace import MachinePace
from ray_workers.supervision.node_clients import NodeClients
from ray_workers.supervision.rules.timings import Timings
from tests.unit.workers.supervision.observed import observation
from tests.wire import attempt_spec

pytestmark = pytest.mark.anyio


class Agent:
    """Observes one rank, on a machine that is so many times slower than usual."""

    def __init__(self, rank: int, slowness: float) -> None:
        self._ranks: tuple[RankObservation, ...] = (observation(rank),)
        self._slowness = slowness
        self.asked: list[bool] = []
        """Of each observation, whether the pace was asked along."""
        self.observe = SimpleNamespace(remote=self._observe)

    async def _observe(self, _job_id: str, _attempt: int, with_pace: bool) -> NodeObservation:
        self.asked.append(with_pace)
        return NodeObservation(self._ranks, self._slowness if with_pace else None)


def clients_of(pace: MachinePace, timings: Timings, **agents: Any) -> NodeClients:
    return NodeClients(attempt_spec(), agents, pace, timings)


async def test_an_observation_brings_the_pace_along_where_it_is_old() -> None:
    pace, agents = MachinePace(), {"a": Agent(0, 2.0), "b": Agent(1, 7.0)}
    clients = clients_of(pace, replace(Timings(), pace_period_s=3600.0), **agents)
    for _ in range(3):
        assert [one.rank for one in await clients.observations()] == [0, 1]
    assert pace.slowness == 7.0
    assert [one.asked for one in agents.values()] == [[True, False, False]] * 2


@pytest.mark.parametrize(("limit_s", "num_asked"), [(3600.0, 1), (0.0, 3)])
async def test_the_pace_is_asked_for_where_no_observation_brings_it(
    limit_s: float, num_asked: int
) -> None:
    agent = Agent(0, 2.0)
    timings = replace(Timings(), pace_period_s=0.0, pace_limit_s=limit_s)
    clients = clients_of(MachinePace(), timings, a=agent)
    for _ in range(3):
        await clients.keep_pace()
    assert agent.asked == [True] * num_asked


async def test_without_an_answer_the_machines_are_as_slow_as_before() -> None:
    pace, agent = MachinePace(), Agent(0, 2.0)
    timings = replace(Timings(), pace_period_s=0.0, answer_limit_s=0.001)
    clients = clients_of(pace, timings, a=agent)
    await clients.observations()

    async def stand_still(*_: object) -> NodeObservation:
        await asyncio.Event().wait()
        raise AssertionError

    agent.observe.remote = stand_still
    assert await clients.observations() == []
    assert pace.slowness == 2.0
