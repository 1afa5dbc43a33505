"""Starts, observes and replaces the spares of a group while the group trains.

A spare is a worker without a rank: its process has the job's code and data, has built the model,
and waits for a rank. `RecoveryController` gives a spare the rank of a lost worker. The loss of a
spare does not affect the group, so only this module notices it.
"""

from __future__ import annotations

import signal
import traceback
from collections.abc import Sequence

from ray_workers.shared.contracts import AttemptSpec
from ray_workers.shared.heartbeat import RankObservation
from ray_workers.shared.processes.machine_speed import MachineSpeed
from ray_workers.shared.supervisor_frames import SparesReport
from ray_workers.supervision.member import Member
from ray_workers.supervision.node_clients import NodeClients
from ray_workers.supervision.preparation import Preparation
from ray_workers.supervision.recovery import RecoveryController
from ray_workers.supervision.reporter import Reporter
from ray_workers.supervision.rules import spare_rules
from ray_workers.supervision.rules.timings import Timings
from ray_workers.supervision.worker_group import WorkerGroup


class Spares:
    """The spares of one attempt's group."""

    def __init__(
        self,
        spec: AttemptSpec,
        group: WorkerGroup,
        nodes: NodeClients,
        reporter: Reporter,
        recovery: RecoveryController,
        preparation: Preparation,
        speed: MachineSpeed,
        timings: Timings,
    ) -> None:
        self._traits = spec.traits
        self._group = group
        self._nodes = nodes
        self._reporter = reporter
        self._recovery = recovery
        self._preparation = preparation
        self._speed = speed
        self._timings = timings
        self._starting: set[int] = set()
        """Indices of spares whose processes are being started."""
        self._not_before: dict[int, float] = {}
        """When the process of a spare may be started again, on the clock of `MachineSpeed.time`."""
        self._num_failures: dict[int, int] = {}
        """Number of consecutive starts of a spare that failed."""
        self._num_reported = 0
        """Number of ready spares in the latest report."""
        self._killed: set[tuple[int, int]] = set()
        """(worker index, incarnation) of each spare that was killed because it did not respond."""

    def look(self, observations: Sequence[RankObservation]) -> None:
        """Start processes for spares that have none, and kill spares that don't respond. While the
        group recovers, no process is started, because it would slow down the recovery.

        The first processes are started only after the group has begun to train, so that they don't
        delay its start. For a script, they are started only after the script has called
        `train.prepare`, because only such a script waits for a rank.
        """
        self._recovery.restart_idle()
        ready = self._num_ready()
        if ready < self._num_reported:  # they took ranks, or their slots were released
            verb = "is" if ready == 1 else "are"
            self._report(f"{spare_rules.counted(ready, 'spare')} {verb} ready now")
        if not self._group.spares or not self._has_begun(observations):
            return
        seen = {(one.rank, one.incarnation): one for one in observations}
        limit_s = self._speed.stretched(self._timings.stopped_hang_s)
        for member in self._group.spares:
            key = member.index, member.incarnation
            spare = seen.get(key)
            is_still = spare_rules.is_standing_still(spare, limit_s, was_ready=member.is_ready)
            if member.is_running and is_still:
                if key not in self._killed:
                    self._killed.add(key)
                    self._recovery.do(self._end(member))
            elif member.index in self._starting or self._recovery.state.regrouping is not None:
                continue
            elif not member.is_running:
                self._start_soon(member)
            elif not member.is_ready and spare_rules.is_responding(spare, limit_s):
                self._is_ready(member)
            elif member.index in self._num_failures:  # it runs, but did not get ready in time
                self._start_soon(member)

    def _has_begun(self, observations: Sequence[RankObservation]) -> bool:
        if any(member.exit is not None for member in self._group.spares):
            return True
        running = {(member.index, member.incarnation) for member in self._group.running}
        statuses = [one.status for one in observations if (one.rank, one.incarnation) in running]
        if self._traits.is_script:
            return any(status.is_prepared for status in statuses)
        return any(status.first_at for status in statuses)

    async def _end(self, member: Member) -> None:
        """Kill a spare that does not respond. The next call of `look` starts another process."""
        member.is_ready = False
        self._report(f"the spare on node {member.node_id} did not respond, and is replaced")
        await self._nodes.signal(member.node_id, member.index, signal.SIGKILL)

    def _start_soon(self, member: Member) -> None:
        if member.is_ready:
            member.is_ready = False
            how = spare_rules.how_it_ended(member.end)
            self._report(f"the spare on node {member.node_id} {how}, and is replaced")
        if self._speed.time() >= self._not_before.get(member.index, 0.0):
            self._starting.add(member.index)
            self._recovery.do(self._start(member))

    async def _start(self, member: Member) -> None:
        """Start a process for the spare, and wait until it is ready to get a rank."""
        try:
            dead = await self._preparation.restart_until_ready(
                member, self._recovery.state.round + 1
            )
        except Exception:  # no caller awaits this task, so the error would be lost
            traceback.print_exc()
            self._failed(member)
            return
        finally:
            self._starting.discard(member.index)
        if dead:
            await self._recovery.lose_spares(dead)
        elif member in self._group.members:
            self._is_ready(member)

    def _is_ready(self, member: Member) -> None:
        member.is_ready = True
        self._num_failures.pop(member.index, None)
        self._report(f"a spare is ready on node {member.node_id}")

    def _failed(self, member: Member) -> None:
        number = self._num_failures.get(member.index, 0)
        self._num_failures[member.index] = number + 1
        pause_s = spare_rules.pause_s(number)
        self._not_before[member.index] = self._speed.time() + pause_s
        if not number and member in self._group.members:
            self._report(
                f"the spare on node {member.node_id} could not be started; the group trains "
                "without it, and dray tries again"
            )

    def _num_ready(self) -> int:
        return sum(member.is_ready and member.is_running for member in self._group.spares)

    def _report(self, message: str) -> None:
        self._num_reported = self._num_ready()
        self._reporter.report(SparesReport(ready=self._num_reported, message=message))
