"""Calls of the node agents, without Ray."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from ray_workers.shared.frames import Report
from ray_workers.shared.heartbeat import NodeObservation, RankObservation
from ray_workers.shared.processes.machine_speed import MachineSpeed
from ray_workers.supervision.node_clients import NodeClients
from ray_workers.supervision.reporter import Reporter
from ray_workers.supervision.rules.timings import Timings
from ray_workers.supervision.system_metrics import SystemMetricsReporter
from tests.unit.workers.supervision.observed import observation
from tests.wire import attempt_spec


class Agent:
    """Observes one rank, on a machine that is `slowness` times slower than usual."""

    def __init__(self, rank: int, slowness: float) -> None:
        self._ranks: tuple[RankObservation, ...] = (observation(rank),)
        self._slowness = slowness
        self.asked: list[bool] = []
        """Whether each observation also asked for the speed."""
        self.asked_metrics: list[bool] = []
        self.observe = SimpleNamespace(remote=self._observe)

    async def _observe(
        self, _job_id: str, _attempt: int, with_speed: bool, with_metrics: bool
    ) -> NodeObservation:
        self.asked.append(with_speed)
        self.asked_metrics.append(with_metrics)
        rank = self._ranks[0].rank
        metrics = {rank: {"system/cpu": self._slowness}} if with_metrics else {}
        return NodeObservation(self._ranks, self._slowness if with_speed else None, metrics)


class KeptReports(Reporter):
    """Keeps them."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []

    def report(self, report: Report) -> None:
        self.bodies.append(report.body())


def clients_of(
    speed: MachineSpeed,
    timings: Timings,
    metrics: SystemMetricsReporter | None = None,
    **agents: Any,
) -> NodeClients:
    metrics = metrics or SystemMetricsReporter(KeptReports(), None)
    return NodeClients(attempt_spec(), agents, speed, metrics, timings)


async def test_an_observation_measures_the_speed_if_the_known_speed_is_old() -> None:
    speed, agents = MachineSpeed(), {"a": Agent(0, 2.0), "b": Agent(1, 7.0)}
    clients = clients_of(speed, replace(Timings(), speed_period_s=3600.0), **agents)
    for _ in range(3):
        assert [one.rank for one in await clients.observations()] == [0, 1]
    assert speed.slowness == 7.0
    assert [one.asked for one in agents.values()] == [[True, False, False]] * 2


@pytest.mark.parametrize(("limit_s", "num_asked"), [(3600.0, 1), (0.0, 3)])
async def test_the_speed_is_measured_if_no_observation_measures_it(
    limit_s: float, num_asked: int
) -> None:
    agent = Agent(0, 2.0)
    timings = replace(Timings(), speed_period_s=0.0, speed_limit_s=limit_s)
    clients = clients_of(MachineSpeed(), timings, a=agent)
    for _ in range(3):
        await clients.refresh_speed()
    assert agent.asked == [True] * num_asked


async def test_without_an_answer_the_machines_are_as_slow_as_before() -> None:
    speed, agent = MachineSpeed(), Agent(0, 2.0)
    timings = replace(Timings(), speed_period_s=0.0, answer_limit_s=0.001)
    clients = clients_of(speed, timings, a=agent)
    await clients.observations()

    async def stand_still(*_: object) -> NodeObservation:
        await asyncio.Event().wait()
        raise AssertionError

    agent.observe.remote = stand_still
    assert await clients.observations() == []
    assert speed.slowness == 2.0


async def test_system_metrics_come_with_the_next_observation_and_make_no_call() -> None:
    reports, agents = KeptReports(), {"a": Agent(0, 2.0), "b": Agent(1, 7.0)}
    now = [100.0]
    metrics = SystemMetricsReporter(reports, 10.0, clock=lambda: now[0], wall_clock=lambda: 5000.0)
    clients = clients_of(MachineSpeed(), Timings(), metrics, **agents)
    await clients.observations()
    for now[0] in (100.0, 105.0, 109.5):  # the last is due, as it goes along with another call
        metrics.ask()
        await clients.observations()
        await clients.observations()
    wanted = [False, True, False, False, False, True, False]
    assert [one.asked_metrics for one in agents.values()] == [wanted] * 2
    columns = [{"ranks": [0, 1], "values": {"system/cpu": [2.0, 7.0]}}]
    assert reports.bodies == [{"time": t, "columns": columns} for t in (5000, 5010)]


async def test_system_metrics_that_are_turned_off_are_never_asked_for() -> None:
    reports, agent = KeptReports(), Agent(0, 2.0)
    metrics = SystemMetricsReporter(reports, None)
    clients = clients_of(MachineSpeed(), Timings(), metrics, a=agent)
    metrics.ask()
    await clients.observations()
    assert agent.asked_metrics == [False]
    assert reports.bodies == []


def test_times_of_samples_rise_while_the_nodes_clock_is_set_back() -> None:
    reports, wall = KeptReports(), [5000.0, 1400.0]
    now = [0.0]
    metrics = SystemMetricsReporter(
        reports, 10.0, clock=lambda: now[0], wall_clock=lambda: wall.pop(0)
    )
    for now[0] in (0.0, 10.0, 20.0):
        metrics.report([{0: {"system/cpu": 1.0}}])
    assert [body["time"] for body in reports.bodies] == [5000, 5010, 5020]


def test_ranks_with_the_same_series_share_a_column_and_none_without_a_rank() -> None:
    reports = KeptReports()
    metrics = SystemMetricsReporter(reports, 10.0, clock=lambda: 0.0, wall_clock=lambda: 1.0)
    metrics.report([{}, {}])
    of_nodes = [
        {first: {"c": 1.0, "n": 2.0}, first + 1: {"c": 3.0}, first + 2: {}} for first in (0, 3)
    ]
    metrics.report(of_nodes)
    columns = [
        {"ranks": [0, 3], "values": {"c": [1.0, 1.0], "n": [2.0, 2.0]}},
        {"ranks": [1, 4], "values": {"c": [3.0, 3.0]}},
    ]
    assert reports.bodies == [{"time": 1, "columns": columns}]


def test_a_report_of_512_ranks_is_small() -> None:
    reports = KeptReports()
    values = {f"system/metric_{n}": 1234567.89 for n in range(8)}
    metrics = SystemMetricsReporter(reports, 10.0)
    metrics.report([dict.fromkeys(range(512), values)])
    assert len(json.dumps(reports.bodies)) < 64 * 1024
