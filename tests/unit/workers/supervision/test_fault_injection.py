"""Faults that are injected on purpose, and their reports."""

from __future__ import annotations

import signal
from typing import Any

from dray.drills import DrillKind, DrillState
from ray_workers.shared.commands import Drill
from ray_workers.shared.contracts import FrameKind
from ray_workers.shared.supervisor_frames import RegroupedReport
from ray_workers.supervision.fault_injection import FaultInjector
from tests.unit.workers.supervision.observed import Reports


class Ranks:
    """Processes that get signals, unless none runs."""

    def __init__(self, *, run: bool = True) -> None:
        self._run = run
        self.signals: list[tuple[int, int]] = []
        self.num_preempted = 0

    async def send(self, rank: int, number: int) -> bool:
        self.signals.append((rank, number))
        return self._run

    def preempt(self) -> None:
        self.num_preempted += 1


async def injected(kind: DrillKind, ranks: Ranks) -> tuple[FaultInjector, Reports]:
    reports: Any = Reports()
    injector, drill = FaultInjector(reports), Drill("d", kind, rank=1, at_step=None)
    for _ in range(2):  # the service may ask twice
        injector.add(drill)
    assert injector.waiting == (drill,)
    await injector.inject(drill, 7, ranks.send, ranks.preempt)
    injector.add(drill)
    assert injector.waiting == ()
    return injector, reports


def states(reports: Reports) -> list[str]:
    return [body["state"] for body in reports.of(FrameKind.DRILL)]


async def test_a_fault_is_injected_once_and_passed_when_the_group_trains_again() -> None:
    injector, reports = await injected(DrillKind.STALL, ranks := Ranks())
    assert ranks.signals == [(1, signal.SIGSTOP)]
    assert injector.injected_at([0], otherwise=5.0) == 5.0
    assert injector.injected_at([0, 1], otherwise=1e12) < 1e12
    injector.passed(
        RegroupedReport(generation=1, ranks=[1], world_size=2, step=7, steps_lost=0, recovery_s=2.0)
    )
    assert states(reports) == [DrillState.WAITING, DrillState.STRUCK, DrillState.PASSED]
    assert reports.of(FrameKind.DRILL)[-1]["recovery_s"] == 2.0
    assert injector.injected_at([1], otherwise=5.0) == 5.0


async def test_a_fault_fails_where_no_process_is_left() -> None:
    injector, reports = await injected(DrillKind.KILL, Ranks(run=False))
    assert states(reports) == [DrillState.WAITING, DrillState.STRUCK, DrillState.FAILED]
    assert injector.injected_at([1], otherwise=5.0) == 5.0


async def test_a_preemption_asks_the_group_to_leave() -> None:
    _, reports = await injected(DrillKind.PREEMPT, ranks := Ranks())
    assert (ranks.num_preempted, ranks.signals) == (1, [])
    assert states(reports) == [DrillState.WAITING, DrillState.STRUCK]
