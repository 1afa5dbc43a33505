"""Injects the faults of drills and reports the recovery. Users request drills for their own
jobs."""

from __future__ import annotations

import signal
import time
from collections.abc import Awaitable, Callable, Iterable

from dray.drills import DrillKind, DrillState
from ray_workers.shared.commands import CORRUPT_SIGNAL, Drill
from ray_workers.shared.supervisor_frames import DrillReport, RegroupedReport
from ray_workers.supervision.reporter import Reporter

SIGNALS = {
    DrillKind.KILL: signal.SIGKILL,
    DrillKind.STALL: signal.SIGSTOP,
    DrillKind.CORRUPT: CORRUPT_SIGNAL,
}
Send = Callable[[int, int], Awaitable[bool]]
"""A function (rank, signal) that sends the signal to the rank, and returns whether a process of the
rank received the signal."""


class FaultInjector:
    """Injects the faults of one attempt. The fault of each drill is injected at most once."""

    def __init__(self, reporter: Reporter) -> None:
        self._reporter = reporter
        self._known: set[str] = set()
        self.waiting: tuple[Drill, ...] = ()
        """Drills whose fault has not been injected yet."""
        self._injected: dict[int, tuple[Drill, float]] = {}

    def add(self, drill: Drill) -> None:
        if drill.id not in self._known:
            self._known.add(drill.id)
            self.waiting = (*self.waiting, drill)
            self._report(drill, DrillState.WAITING)

    async def inject(
        self, drill: Drill, step: int, send: Send, preempt: Callable[[], None]
    ) -> None:
        """Inject the fault of a drill. `step` is the last step that the group has completed."""
        self.waiting = tuple(one for one in self.waiting if one != drill)
        self._report(drill, DrillState.STRUCK, step)
        if drill.kind is DrillKind.PREEMPT:
            preempt()
            return
        if drill.kind is not DrillKind.CORRUPT:  # no rank is lost
            self._injected[drill.rank] = (drill, time.time())
        if not await send(drill.rank, SIGNALS[drill.kind]):
            self._injected.pop(drill.rank, None)
            message = f"no fault can be injected, because rank {drill.rank} has no running process"
            self._report(drill, DrillState.FAILED, message=message)

    def injected_at(self, ranks: Iterable[int], otherwise: float) -> float:
        """Return the Unix time of the earliest injected fault from which one of these ranks has not
        recovered, or `otherwise` if they have recovered from all faults."""
        times = (self._injected[rank][1] for rank in ranks if rank in self._injected)
        return min(times, default=otherwise)

    def passed(self, regrouped: RegroupedReport) -> None:
        """Report that the group has resumed training after the loss described by `regrouped`."""
        for rank in regrouped.ranks:
            if rank in self._injected:
                drill, _ = self._injected.pop(rank)
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
