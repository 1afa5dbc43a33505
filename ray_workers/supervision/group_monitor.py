"""The monitor of a running group: it waits for the group's end and reacts to losses and hangs.

It looks at the ranks' pages on every node, again and again, and waits for the ends of their
processes. Who is to blame and what counts as a hang is decided in `verdict` and `watchdog`, which
are pure; what is lost is the mender's.
"""

from __future__ import annotations

import asyncio
import signal
import time
import traceback
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ray_workers.shared.contracts import (
    LEFT_EXIT_CODE,
    AttemptSpec,
    Cause,
    Outcome,
    SilentProcess,
)
from ray_workers.shared.heartbeat import RankObservation, RankPhase, TimeCategory
from ray_workers.shared.machine_pace import MachinePace
from ray_workers.supervision.failure_attribution import RankExit
from ray_workers.supervision.fault_injection import FaultInjector
from ray_workers.supervision.hang_detector import PATIENCE, Hang, HangDetector, Suspicion
from ray_workers.supervision.node_clients import NodeClients, hang_report
from ray_workers.supervision.recovery import RecoveryController
from ray_workers.supervision.reporter import Reporter
from ray_workers.supervision.silence_watch import SilenceWatch
from ray_workers.supervision.worker_group import Member, WorkerGroup

LOOK_S = 0.5
QUICK_LOOK_S = 0.03
"""Between two looks while something is awaited: a step to strike at, a group to be whole."""
STRAY_S = 1.0
"""How long ranks may stand by though nobody is lost: then a connection broke between the living."""
SEVERING_S = 3.0
"""How long after its announcement everybody has certainly been cut off from the old group."""
ECHO_S = 1.0
DRILL_GRACE_S = 30.0


class GroupMonitor:
    """Watches one group from its start to its end."""

    def __init__(
        self,
        spec: AttemptSpec,
        group: WorkerGroup,
        nodes: NodeClients,
        reporter: Reporter,
        drills: FaultInjector,
        recovery: RecoveryController,
        pace: MachinePace,
    ) -> None:
        self._spec = spec
        self._group = group
        self._nodes = nodes
        self._reporter = reporter
        self._drills = drills
        self._recovery = recovery
        self._pace = pace
        self._is_script = bool(spec.spec.get("script"))
        self._silence = SilenceWatch(spec, group, pace)
        self._hung: set[int] = set()
        self._hang_outcome: Outcome | None = None
        """What the attempt ends with once they are gone, where they are not replaced."""
        self._stray_since: float | None = None
        self._hang_detector = HangDetector(1.0 if spec.recovers_in_place else PATIENCE)
        self._suspicion = Suspicion()
        self._sights: list[RankObservation] = []
        self._grace_s = 0.0
        self._stop_asked = asyncio.Event()
        self._leave_asked = asyncio.Event()

    def stop(self) -> None:
        """End the group: its job is being cancelled."""
        self._stop_asked.set()

    @property
    def is_stopping(self) -> bool:
        return self._stop_asked.is_set()

    def silent(self) -> tuple[SilentProcess, ...]:
        """Processes of the group that do not answer."""
        return self._silence.silent()

    def leave(self, grace_s: float) -> None:
        """Have the group save a checkpoint and go, within so many seconds."""
        self._grace_s = grace_s
        self._leave_asked.set()

    async def asked_to_end(self) -> Outcome:
        """Once asked to stop or to leave, of a group that does not train yet."""
        stop = asyncio.ensure_future(self._stop_asked.wait())
        leave = asyncio.ensure_future(self._leave_asked.wait())
        try:
            await asyncio.wait({stop, leave}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            stop.cancel()
            leave.cancel()
        cause = Cause.STOPPED if self._stop_asked.is_set() else Cause.PREEMPTED
        return Outcome(cause, "stopped before it started")

    @property
    def use(self) -> TimeCategory:
        """What the slots are used for that no process accounts for."""
        if self._recovery.regrouping is not None:
            return TimeCategory.RECOVERING
        looks = [observation.status for observation in self._sights]
        if any(look.step or look.first_at for look in looks):
            return TimeCategory.IDLE
        return (
            TimeCategory.UNREPORTED
            if any(look.use is TimeCategory.UNREPORTED for look in looks)
            else TimeCategory.STARTING
        )

    async def watch(self) -> Outcome | None:
        """Until the group has ended; an Outcome if it was not the ranks' own end."""
        stop = asyncio.ensure_future(self._stop_asked.wait())
        left = asyncio.ensure_future(self._left())
        looking = asyncio.ensure_future(self._look_around())
        store = asyncio.ensure_future(self._group.store_is_lost())
        silence = asyncio.ensure_future(self._silence.run())
        chores: list[asyncio.Future[Any]] = [stop, left, looking, store, silence]
        try:
            return await self._wait_for_the_end(stop, left, looking, store)
        finally:
            for chore in chores:
                chore.cancel()
            await asyncio.gather(*chores, return_exceptions=True)
            await self._recovery.stop()

    async def _wait_for_the_end(
        self,
        stop: asyncio.Future[Any],
        left: asyncio.Future[Outcome],
        looking: asyncio.Future[Outcome],
        store: asyncio.Future[Outcome],
    ) -> Outcome | None:
        runtime_s = self._spec.max_runtime_s
        deadline = None if runtime_s is None else time.monotonic() + runtime_s
        handled: set[asyncio.Future[RankExit]] = set()
        while running := self._exits() - handled:
            timeout = None if deadline is None else max(deadline - time.monotonic(), 0.0)
            either: set[asyncio.Future[Any]] = {stop, left, looking, store, *running}
            done, _ = await asyncio.wait(
                either, timeout=timeout, return_when=asyncio.FIRST_COMPLETED
            )
            if stop in done:
                return Outcome(Cause.STOPPED, "stopped as asked")
            for ended_by_us in (left, looking):
                if ended_by_us in done:
                    return ended_by_us.result()
            if store in done:
                return store.result()
            if not done:
                return Outcome(
                    Cause.RUNTIME_EXCEEDED,
                    f"ran for max_runtime_s, {runtime_s:g} s in this attempt",
                )
            ended = running & done
            handled |= ended
            lost = [m for m in self._group.placed if m.exit in ended and m.end.exit_code != 0]
            if lost and (outcome := self._as_asked(lost)):
                return outcome
            if lost and not await self._mend(lost):
                if self._hang_outcome is None:
                    await self._let_echoes_end()
                return self._hang_outcome
        self._recovery.settle(self._newest())
        return None

    def _exits(self) -> set[asyncio.Future[RankExit]]:
        """Of the newest process of each rank, ended or not."""
        return {member.exit for member in self._group.placed if member.exit is not None}

    async def _mend(self, lost: Sequence[Member]) -> bool:
        if not self._spec.recovers_in_place:
            return False
        ranks = {member.rank for member in lost}
        code = "lost" if any(member.end.exit_code is None for member in lost) else "killed"
        if ranks & self._hung:
            code = "hang"
        self._hung -= ranks
        return await self._recovery.mend(lost, code=code)

    async def _let_echoes_end(self) -> None:
        """Give the others a moment to fail by themselves, so that their last words are kept.

        Not where they wait for a place in a next group, which will not come.
        """
        running = [m.exit for m in self._group.running if m.exit is not None]
        if running and not self._spec.recovers_in_place:
            await asyncio.wait(running, timeout=self._pace.stretched(ECHO_S))

    # Leaving.

    async def _left(self) -> Outcome:
        """Once asked to leave: the end of the group's time to do so."""
        await self._leave_asked.wait()
        await self._group.ask_to_leave()
        await asyncio.sleep(self._grace_s)  # what ends before is looked at where all ends are
        return Outcome(
            Cause.PREEMPTED,
            f"asked to leave its slots; it did not end by itself within {self._grace_s:g} s",
        )

    def _as_asked(self, lost: Sequence[Member]) -> Outcome | None:
        """An Outcome if ranks ended because the group was asked to leave."""
        if not self._leave_asked.is_set():
            return None
        if self._is_script:
            return Outcome(Cause.PREEMPTED, "left its slots as asked")
        if any(member.end.exit_code == LEFT_EXIT_CODE for member in lost):
            return Outcome(Cause.PREEMPTED, "saved a checkpoint and left its slots as asked")
        return None

    # Looking.

    async def _look_around(self) -> Outcome:
        """Until something is found that ends the attempt."""
        while True:
            quick = self._drills.is_waiting or self._recovery.regrouping is not None
            # On a machine that is overloaded the looks themselves would hold up what they look at.
            await asyncio.sleep(self._pace.stretched(QUICK_LOOK_S) if quick else LOOK_S)
            try:
                outcome = await self._look()
            except Exception:
                traceback.print_exc()  # a node that does not answer is no reason to end
                continue
            if outcome is not None:
                return outcome

    async def _look(self) -> Outcome | None:
        await self.see()
        self._hang_detector.slowness = self._pace.slowness
        newest = self._newest()
        outcome = await self._recovery.look(newest)
        if outcome is not None:
            return outcome
        if self._are_astray(newest):
            return await self._gather()
        if self._recovery.regrouping is not None:
            return await self._end_left_behind(newest)
        step = max((observation.status.step for observation in newest), default=0)
        await self._drills.strike(step, self._signal, lambda: self.leave(DRILL_GRACE_S))
        if self._is_script or self._stray_since is not None:
            return None  # a script does not say what it does
        if self._hung or len(newest) < len(self._group.placed):
            return None  # who is to blame is not seen gone yet, or is silent with its node
        return await self._judge(self._hang_detector.look(newest, self._pace.time()), newest)

    def _are_astray(self, newest: Sequence[RankObservation]) -> bool:
        """Whether ranks have stood by for a while though nobody is lost: their connections broke,
        or a next group could not be formed."""
        standing = any(observation.status.phase is RankPhase.STAND_BY for observation in newest)
        all_run = len(self._group.running) == len(self._group.placed)
        may_be = self._spec.recovers_in_place and standing and all_run
        if not may_be or self._recovery.is_waiting_for_slots:
            self._stray_since = None
            return False
        if self._stray_since is None:
            self._stray_since = self._pace.time()
        if self._leave_asked.is_set():
            return False
        return self._pace.is_over(self._stray_since, STRAY_S)

    async def _gather(self) -> Outcome | None:
        """Give the strays another generation, and the others come along."""
        self._stray_since = None
        if await self._recovery.mend([], code="lost"):
            return None
        message = "ranks that lost each other could not be brought together again"
        return Outcome(Cause.WORKER_LOST, message)

    async def _end_left_behind(self, newest: Sequence[RankObservation]) -> Outcome | None:
        """Whoever does not come along, though it was told to and cut off, is lost as well."""
        since = self._recovery.announced_at
        if self._hung or since is None or self._pace.time() - since < SEVERING_S:
            return None
        hang = self._hang_detector.left_behind(newest, self._recovery.generation)
        return await self._judge(hang, newest)

    async def _judge(self, hang: Hang | None, newest: Sequence[RankObservation]) -> Outcome | None:
        if hang is None or not self._suspicion.proves(hang, newest, self._pace.time()):
            return None
        return await self._end_hang(hang)

    async def _end_hang(self, hang: Hang) -> Outcome | None:
        """Tell what everyone was at, and kill who is to blame; an Outcome if nobody is."""
        self._pace.ran_out()
        newest = self._newest()  # as they were judged: those who are let go on may be gone soon
        seats = {member.seat: member.rank for member in self._group.running}
        by_seat = await self._nodes.stacks(list(seats))
        stacks = {seats[seat]: text for seat, text in by_seat.items()}
        report = hang_report(hang, newest, stacks)
        self._reporter.report(report)
        if not hang.culprits:
            return Outcome(
                Cause.WORKER_LOST,
                f"all ranks stood still at the same place for {hang.waited_s:.1f} s",
            )
        self._hung |= {observation.rank for observation in hang.culprits}
        if not self._spec.recovers_in_place:
            self._hang_outcome = _ended_by_hang(hang, str(report.phase))
        for observation in hang.culprits:
            await self._signal(observation.rank, signal.SIGKILL)
        return None

    async def see(self) -> list[RankObservation]:
        """Look at every process of the attempt, also the dead."""
        self._sights = await self._nodes.observations()
        return self._sights

    def _newest(self) -> list[RankObservation]:
        """Of the processes that have a place and run now, as the ranks that they are."""
        running = {(m.seat, m.incarnation): m.rank for m in self._group.running}
        seen = [
            replace(observation, rank=running[observation.rank, observation.incarnation])
            for observation in self._sights
            if (observation.rank, observation.incarnation) in running
        ]
        return sorted(seen, key=lambda observation: observation.rank)

    async def _signal(self, rank: int, number: int) -> bool:
        member = next((m for m in self._group.running if m.rank == rank), None)
        if member is None:
            return False
        return await self._nodes.signal(member.node_id, member.seat, number)


def _ended_by_hang(hang: Hang, phase: str) -> Outcome:
    """Of a group that resumes from its checkpoint."""
    ranks = [observation.rank for observation in hang.culprits]
    who = f"rank{'' if len(ranks) == 1 else 's'} {', '.join(map(str, ranks))}"
    message = f"{who} stood still for {hang.waited_s:.1f} s in {phase}, and was ended"
    return Outcome(Cause.WORKER_LOST, message, ranks[0])
