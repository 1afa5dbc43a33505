"""Restarts ranks of a script whose ranks form no process group, without forming another round."""

from __future__ import annotations

import time
import traceback
from collections import Counter
from collections.abc import Sequence

from ray_workers.shared.contracts import AttemptSpec
from ray_workers.shared.processes.machine_speed import MachineSpeed
from ray_workers.shared.supervisor_frames import LossKind, RegroupedReport
from ray_workers.supervision.member import Member
from ray_workers.supervision.preparation import NOT_STARTED
from ray_workers.supervision.reporter import Reporter
from ray_workers.supervision.rules import recovery_rules
from ray_workers.supervision.rules.recovery_rules import RESTARTS_WITHIN_S
from ray_workers.supervision.rules.timings import Timings
from ray_workers.supervision.worker_group import WorkerGroup


class StandaloneRanks:
    """Restarts individual ranks of an attempt."""

    def __init__(
        self,
        spec: AttemptSpec,
        group: WorkerGroup,
        reporter: Reporter,
        speed: MachineSpeed,
        timings: Timings,
    ) -> None:
        self._traits = spec.traits
        self._group = group
        self._reporter = reporter
        self._speed = speed
        self._timings = timings
        self._restarts: list[tuple[float, int]] = []
        """(time, rank) of each recent restart, on the clock of `MachineSpeed.time`."""

    async def restart(
        self, lost: Sequence[Member], *, kind: LossKind, began_at: float
    ) -> RegroupedReport | None:
        """Restart ranks in their slots, with the same addresses. `lost` contains the members whose
        processes have ended. Returns None if the ranks can't or must not be restarted."""
        now, ends = self._speed.time(), [member.end for member in lost]
        self._restarts = [one for one in self._restarts if now - one[0] < RESTARTS_WITHIN_S]
        earlier = Counter(rank for _, rank in self._restarts)
        if not recovery_rules.may_restart(ends, self._traits.restarted_alone, earlier):
            return None
        self._restarts += ((now, end.rank) for end in ends)
        self._reporter.report(
            recovery_rules.loss_report(ends, kind, 0, self._traits, self._speed.why())
        )
        try:
            await self._speed.within(self._timings.replace_limit_s, self._group.replace(lost, 0))
        except NOT_STARTED:
            traceback.print_exc()
            return None
        report = RegroupedReport(
            generation=0,
            ranks=[end.rank for end in ends],
            world_size=len(self._group.placed),
            step=None,
            steps_lost=None,
            recovery_s=max(0.0, time.time() - began_at),
        )
        self._reporter.report(report)
        return report
