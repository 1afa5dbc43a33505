"""Drills: faults that users inject into their own jobs, and how the group recovered."""

from __future__ import annotations

import signal
import time
from collections.abc import Awaitable, Callable, Sequence

from ray_workers.shared.contracts import Drill, DrillKind, DrillState
from ray_workers.shared.frames import DrillReport, RegroupedReport
from ray_workers.supervision.reporter import Reporter

SIGNALS = {DrillKind.KILL: signal.SIGKILL, DrillKind.STALL: signal.SIGSTOP}
Strike = Callable[[int, int], Awaitable[bool]]
"""(rank, signal) -> whether a process was struck."""


class FaultInjector:
    """Of one attempt. A drill strikes once by its id."""

    def __init__(self, reporter: Reporter) -> None:
        self._reporter = reporter
        self._known: set[str] = set()
        self._waiting: list[Drill] = []
        self._struck: dict[int, tuple[Drill, float]] = {}

    @property
    def is_waiting(self) -> bool:
        return bool(self._waiting)

    def add(self, drill: Drill) -> None:
        if drill.id not in self._known:
            self._known.add(drill.id)
            self._waiting.append(drill)
            self._report(drill, DrillState.WAITING)

    async def strike(self, step: int, strike: Strike, preempt: Callable[[], None]) -> None:
        """Do what is due when `step` steps are done."""
        due = [d for d in self._waiting if d.at_step is None or step >= d.at_step]
        for drill in due:
            self._waiting.remove(drill)
            self._report(drill, DrillState.STRUCK, step)
            if drill.kind is DrillKind.PREEMPT:
                preempt()
                continue
            self._struck[drill.rank] = (drill, time.time())
            if not await strike(drill.rank, SIGNALS[drill.kind]):
                del self._struck[drill.rank]
                message = f"rank {drill.rank} has no process to inject a fault into"
                self._report(drill, DrillState.FAILED, message=message)

    def struck_at(self, ranks: Sequence[int], otherwise: float) -> float:
        """Unix seconds at which a drill struck one of these ranks, if one did."""
        return min((self._struck[r][1] for r in ranks if r in self._struck), default=otherwise)

    def passed(self, regrouped: RegroupedReport) -> None:
        """The group trains again after the loss of these ranks."""
        for rank in regrouped.ranks:
            if rank in self._struck:
                drill, _ = self._struck.pop(rank)
                self._report(drill, DrillState.PASSED, regrouped.step, regrouped=regrouped)

    def _report(
        self,
        drill: Drill,
        state: DrillState,
        step: int | None = None,
        *,
        message: str = "",
        regrouped: RegroupedReport | None = None,
    ) -> None:
        self._reporter.report(
            DrillReport(
                id=drill.id,
                state=state,
                step=step,
                recovery_s=None if regrouped is None else regrouped.recovery_s,
                steps_lost=None if regrouped is None else regrouped.steps_lost,
                message=message,
            )
        )
