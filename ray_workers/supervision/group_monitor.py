"""Monitors a running group: waits for its end, and reacts to lost and hanging ranks.

The monitor periodically observes the ranks on all nodes, and waits for their processes to end.
`GroupPolicy` decides which actions to take; the monitor carries out these actions by calling the
recovery, the fault injection and the node agents.
"""

from __future__ import annotations

import asyncio
import signal
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from ray_workers.shared.contracts import AttemptSpec, Cause, Outcome, SilentProcess
from ray_workers.shared.heartbeat import RankObservation, TimeCategory
from ray_workers.shared.processes.machine_speed import MachineSpeed
from ray_workers.shared.supervisor_frames import LossKind
from ray_workers.supervision.asked_end import AskedEnd
from ray_workers.supervision.fault_injection import FaultInjector
from ray_workers.supervision.member import Member
from ray_workers.supervision.node_clients import NodeClients
from ray_workers.supervision.recovery import RecoveryController
from ray_workers.supervision.reporter import Reporter
from ray_workers.supervision.resizing import Resizing
from ray_workers.supervision.rules import collective_hangs, recovery_rules, script_hangs
from ray_workers.supervision.rules.failure_attribution import RankExit, all_lost_a_peer, errors_of
from ray_workers.supervision.rules.group_policy import (
    Action,
    AddWorkers,
    Confirm,
    End,
    EndHang,
    Gather,
    GroupMemory,
    GroupObservation,
    GroupPolicy,
    Inject,
)
from ray_workers.supervision.rules.hang_detector import Hang, hang_report
from ray_workers.supervision.rules.timings import Timings
from ray_workers.supervision.running_time import RunningTime
from ray_workers.supervision.script_hang_watch import ScriptHangWatch
from ray_workers.supervision.silence_watch import SilenceWatch
from ray_workers.supervision.spares import Spares
from ray_workers.supervision.standalone_ranks import StandaloneRanks
from ray_workers.supervision.worker_group import WorkerGroup


class GroupMonitor:
    """Monitors one group from its start to its end."""

    def __init__(
        self,
        spec: AttemptSpec,
        group: WorkerGroup,
        nodes: NodeClients,
        reporter: Reporter,
        drills: FaultInjector,
        recovery: RecoveryController,
        resizing: Resizing,
        spares: Spares,
        speed: MachineSpeed,
        timings: Timings,
    ) -> None:
        self._spec = spec
        self._group = group
        self._nodes = nodes
        self._reporter = reporter
        self._drills = drills
        self._recovery = recovery
        self._resizing = resizing
        self._spares = spares
        self._standalone_ranks = StandaloneRanks(spec, group, reporter, speed, timings)
        self._speed = speed
        self._timings = timings
        self._traits = spec.traits
        self._script_hangs = ScriptHangWatch(
            *(spec, group, nodes, speed, timings),
            newest=self._newest,
            is_expected_to_stand=self._is_expected_to_stand,
        )
        self._silence = SilenceWatch(spec, group, speed, timings)
        self._is_elastic = spec.min_workers is not None or spec.traits.most_ranks is not None
        """Whether processes join the group later. A script must then call `train.prepare`."""
        self._policy = GroupPolicy(timings, spec.traits, is_elastic=self._is_elastic)
        self.asked = AskedEnd(group, is_script=spec.traits.is_script)
        self._memory = GroupMemory()
        self._hung: set[int] = set()
        """Indices of workers killed because of a hang, until their exits have been observed."""
        self._hang_outcome: Outcome | None = None
        """The outcome of the attempt if the ranks in `_hung` are not replaced."""
        self._observations: list[RankObservation] = []
        self._look_asked = asyncio.Event()
        self.running_time = RunningTime(spec.max_runtime_s)

    def look(self) -> None:
        """Observe the group as soon as possible instead of at the next regular time."""
        self._look_asked.set()

    def silent(self) -> tuple[SilentProcess, ...]:
        """Return the processes of the group that do not respond."""
        return self._silence.silent()

    @property
    def use(self) -> TimeCategory:
        """The category for slot time that no process has accounted for."""
        if self._recovery.state.regrouping is not None:
            return TimeCategory.RECOVERING
        statuses = [observation.status for observation in self._observations]
        if any(status.step or status.first_at for status in statuses):
            return TimeCategory.IDLE
        if any(status.use is TimeCategory.UNREPORTED for status in statuses):
            return TimeCategory.UNREPORTED
        return TimeCategory.STARTING

    async def watch(self) -> Outcome | None:
        """Wait for the group to end. Returns an Outcome, or None if the ranks ended on their
        own."""
        ends = [
            asyncio.ensure_future(end)
            for end in (
                self.asked.stopped(),
                self.asked.left(),
                self._found_to_end(),
                self._found_hanging(),
                self._group.store_is_lost(),
            )
        ]
        silence = asyncio.ensure_future(self._silence.run())
        try:
            return await self._wait_for_the_end(ends)
        finally:
            for watching in (*ends, silence):
                watching.cancel()
            await asyncio.gather(*ends, silence, return_exceptions=True)
            await self._recovery.stop()

    async def _wait_for_the_end(self, ends: Sequence[asyncio.Future[Outcome]]) -> Outcome | None:
        """Wait for the ranks to exit, or for one of the futures in `ends`, which can end the group
        earlier. The futures are in order of precedence."""
        self.running_time.begin()
        handled: set[asyncio.Future[RankExit]] = set()
        while (running := self._exits() - handled) and self._awaited() - handled:
            events = (self._recovery.workers_added, self.running_time.changed)
            changes = [asyncio.ensure_future(event.wait()) for event in events]
            either: set[asyncio.Future[Any]] = {*ends, *running, *changes}
            try:
                done, _ = await asyncio.wait(
                    either,
                    timeout=self.running_time.left_s(),
                    return_when=asyncio.FIRST_COMPLETED,
                )
            finally:
                for change in changes:
                    change.cancel()
            for event in events:
                event.clear()
            for end in ends:
                if end in done:
                    return end.result()
            if not done:
                return self.running_time.exceeded()
            ended = running & done
            handled |= ended
            lost = [m for m in self._group.placed if m.exit in ended and m.end.exit_code != 0]
            if lost and (outcome := self.asked.of(lost)):
                return outcome
            if outcome := await self._lost_at_the_end(lost):
                return outcome
            if lost and not await self._recovers(lost):
                # The other ranks might have finished while the supervisor queried the nodes.
                if outcome := await self._lost_at_the_end(lost):
                    return outcome
                if self._hang_outcome is None:
                    await self._await_secondary_failures()
                return self._hang_outcome
        return None

    def _exits(self) -> set[asyncio.Future[RankExit]]:
        """Return a future for the exit of each rank's latest process, even if the process has
        already exited."""
        return {member.exit for member in self._group.placed if member.exit is not None}

    def _awaited(self) -> set[asyncio.Future[RankExit]]:
        """Like `_exits`, but without servers, whose exits are not awaited."""
        placed, serving = self._group.placed, self._traits.unawaited
        return {m.exit for m in placed if m.exit is not None and m.rank not in serving}

    @property
    def _recovers_in_place(self) -> bool:
        """Whether the group recovers in place. A script must have called `train.prepare`."""
        if not self._traits.recovers_in_place or not self._traits.is_script:
            return self._traits.recovers_in_place
        running = {(member.index, member.incarnation) for member in self._group.running}
        return recovery_rules.are_prepared(self._observations, running)

    async def _recovers(self, lost: Sequence[Member]) -> bool:
        if self._traits.is_script and self._traits.recovers_in_place:
            await self.observe()
        vanished = any(member.end.exit_code is None for member in lost)
        kind = LossKind.LOST if vanished else LossKind.KILLED
        indices = {member.index for member in lost}
        kind = LossKind.HANG if indices & self._hung else kind
        began_at = self._drills.injected_at({member.rank for member in lost}, time.time())
        if not self._recovers_in_place:
            return await self._restarts(lost, kind, began_at)
        self._hung -= indices
        recovers = await self._recovery.recover(lost, kind=kind, began_at=began_at)
        if recovers and self.asked.is_leaving:
            await self._group.ask_to_leave()  # rank 0 might be a new process
        return recovers

    async def _restarts(self, lost: Sequence[Member], kind: LossKind, began_at: float) -> bool:
        """Restart ranks that form no process group. Return whether the ranks were restarted."""
        report = await self._standalone_ranks.restart(lost, kind=kind, began_at=began_at)
        if report is None:
            return False
        self._hung -= {member.index for member in lost}
        self._hang_outcome = None
        self._drills.passed(report)
        return True

    async def _lost_at_the_end(self, lost: Sequence[Member]) -> Outcome | None:
        """Return an Outcome if a rank has exited with code 0 while other ranks are lost, or are
        being recovered or added. The exited rank will not join another round, so new ranks would
        wait for it forever.

        A rank of a recipe ends with code 0 only when the result is stored and all ranks are done
        (`Trainer.finish`). A rank of a script can exit before the other ranks have finished their
        work, but the rest of the work can't depend on ranks that have not been added yet.
        """
        through = self._through()
        if through and not lost and self._recovery.state.regrouping is not None:
            await self._confirm_at_the_end()
        regrouping = self._recovery.state.regrouping
        ranks = {m.rank for m in lost if m.end.exit_code is None or m.end.exit_code < 0}
        ranks |= set() if regrouping is None else set(regrouping.ranks)
        if not through or (regrouping is None and (self._traits.is_script or not ranks)):
            return None
        # Don't wait for servers, which keep running while the new ranks are connected to them.
        left = [m for m in self._group.running if m.rank not in ranks | self._traits.unawaited]
        if others := {m.exit for m in left if m.exit}:
            await asyncio.wait(others, timeout=self._speed.stretched(self._timings.secondary_s))
        names = " and ".join(str(rank) for rank in sorted(ranks))
        broke = f"ranks {names} were lost" if len(ranks) > 1 else f"rank {names} was lost"
        broke = broke if ranks else "the group was about to change its size"
        message = f"rank {through[0].rank} had exited with code 0 when {broke}"
        if not self._traits.is_script:
            message += ": the result was stored, and all ranks had finished"
            return Outcome.of(Cause.SUCCEEDED, message)
        has_trained = any(one.status.step or one.status.first_at for one in self._newest())
        if not ranks and not has_trained:
            message += ": no rank that had trained was still running"
            return Outcome.of(Cause.SUCCEEDED, message)
        return Outcome.of(Cause.WORKER_LOST, message, min(ranks, default=None))

    async def _confirm_at_the_end(self) -> None:
        """Confirm the recovery if the last statuses of exited ranks show that the group has resumed
        training. If the ranks form no process group, these statuses are not enough, because a
        replacement might still be running."""
        if self._traits.state_holders:
            await self.observe()
        seen = self._seen()
        if self._policy.trains_again(seen):
            self._confirm(seen)

    def _through(self) -> list[RankExit]:
        """Return the exits of the ranks that exited with code 0."""
        return [end for end in self._group.ended() if end.exit_code == 0]

    async def _await_secondary_failures(self) -> None:
        """Give the other ranks a moment to fail on their own, so that their errors are reported.

        Does nothing if the group recovers in place: instead of failing, its ranks wait for a new
        round, although no such round will be formed.
        """
        running = [m.exit for m in self._group.running if m.exit is not None]
        if running and not self._recovers_in_place:
            await asyncio.wait(running, timeout=self._speed.stretched(self._timings.secondary_s))
            if self._traits.is_script:
                await self._await_root_cause()

    async def _await_root_cause(self) -> None:
        """If all failed ranks of a script report only the loss of a peer, wait for another rank to
        fail. The peer might close its connections long before it reports its error."""
        deadline = time.monotonic() + self._speed.stretched(self._timings.root_cause_s)
        while (left_s := deadline - time.monotonic()) > 0:
            running = [m.exit for m in self._group.running if m.exit is not None]
            failed = [end for end in self._group.ended() if end.exit_code != 0]
            ranks = {(m.index, m.incarnation): m.rank for m in self._group.placed}
            errors = errors_of(await self._nodes.errors(), ranks)
            if not running or not all_lost_a_peer(failed, errors):
                return
            await asyncio.wait(running, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)

    # Reasons to end the group other than the exit of a rank.

    async def _found_to_end(self) -> Outcome:
        """Observe the group until a decision ends the attempt, and return the outcome."""
        while True:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._look_asked.wait(), self._pause_s())
            self._look_asked.clear()
            try:
                outcome = await self._decide()
            except Exception:
                traceback.print_exc()  # an unresponsive node does not end the attempt
                continue
            if outcome is not None:
                return outcome

    async def _found_hanging(self) -> Outcome:
        """Return an outcome once all ranks of a script hang at the same point. If only some ranks
        cause a hang, kill these ranks and continue."""
        if not self._traits.is_script:
            await asyncio.Event().wait()
        while True:
            hang, ranks = await self._script_hangs.next()
            if outcome := await self._end_hang(hang, ranks, Cause.USER_ERROR):
                return outcome

    def _is_expected_to_stand(self) -> bool:
        """Whether ranks are expected to wait for each other, because hanging ranks are being ended
        or the group is recovering."""
        return bool(self._hung) or self._recovery.state.regrouping is not None

    def _pause_s(self) -> float:
        if self._drills.waiting or self._recovery.state.regrouping is not None:
            # On an overloaded machine, frequent observations would slow down the group.
            return self._speed.stretched(self._timings.quick_look_period_s)
        if self._may_only_be_stopped and not self._memory.suspicion.suspects:
            return self._timings.script_period_s
        return self._timings.look_period_s

    @property
    def _may_only_be_stopped(self) -> bool:
        """Whether suspended processes are the only problem that the monitor can detect. True for a
        script that has not called `train.prepare` and is not required to call it."""
        prepared = any(one.status.is_prepared for one in self._observations)
        return self._traits.is_script and not self._is_elastic and not prepared

    # Decisions and actions.

    async def observe(self) -> list[RankObservation]:
        """Observe all processes of the attempt, including exited processes."""
        self._observations = await self._nodes.observations()
        return self._observations

    async def _decide(self) -> Outcome | None:
        await self.observe()
        self._spares.look(self._observations)
        seen = self._seen()
        actions, self._memory = self._policy.decide(seen, self._memory, self._speed.time())
        for action in actions:
            outcome = await self._act(action, seen)
            if outcome is not None:
                return outcome
        return None

    def _seen(self) -> GroupObservation:
        return GroupObservation(
            self._newest(),
            num_running=len(self._group.running),
            num_placed=len(self._group.placed),
            recovery=self._recovery.state,
            through={r.rank: r.last_status for r in self._through() if r.last_status is not None},
            num_through=len(self._through()),
            drills=self._drills.waiting,
            is_leaving=self.asked.is_leaving,
            is_ending_hang=bool(self._hung),
            slowness=self._speed.slowness,
        )

    async def _act(self, action: Action, seen: GroupObservation) -> Outcome | None:
        """Carry out an action. Returns an Outcome if the action ends the attempt. `seen` is the
        observation on which the action is based."""
        if isinstance(action, Gather | EndHang | End):
            self._speed.ran_out()
        match action:
            case AddWorkers(grant):
                self._resizing.add_workers(grant)
            case Confirm():
                self._confirm(seen)
            case Inject(drill, step):
                grace_s = self._timings.drill_grace_s
                await self._drills.inject(
                    drill, step, self._signal, lambda: self.asked.leave(grace_s)
                )
            case Gather():
                lost = LossKind.LOST
                if not await self._recovery.recover([], kind=lost, began_at=time.time()):
                    message = "ranks that lost their connections could not be regrouped"
                    return Outcome.of(Cause.WORKER_LOST, message)
            case EndHang(hang):
                return await self._end_hang(hang, seen.ranks)
            case End(outcome):
                return outcome
        return None

    def _confirm(self, seen: GroupObservation) -> None:
        if (report := self._recovery.confirm(seen.statuses.values())) is not None:
            self._drills.passed(report)

    async def _end_hang(
        self, hang: Hang, ranks: Sequence[RankObservation], cause: Cause = Cause.WORKER_LOST
    ) -> Outcome | None:
        """Report the stacks of all ranks, and kill the ranks that cause the hang. Returns an
        Outcome with the given cause if no rank can be identified as the cause of the hang. `cause`
        is USER_ERROR for a script, because a script might hang every time it runs.
        """
        rank_of = {member.index: member.rank for member in self._group.running}
        blamed = {observation.rank for observation in hang.culprits}
        culprits = [(m, m.incarnation) for m in self._group.running if m.rank in blamed]
        by_index = await self._nodes.stacks(list(rank_of))
        stacks = {rank_of[index]: text for index, text in by_index.items()}
        report = hang_report(hang, ranks, collective_hangs.with_absences(stacks))
        if self._traits.is_script:
            report = script_hangs.with_collectives(report)
        self._reporter.report(report)
        if not hang.culprits:
            message = f"all ranks hung at the same point for {hang.waited_s:.1f} s"
            return Outcome.of(cause, message)
        # These members might have exited or changed rank while the stacks were being read.
        running = [(member, member.incarnation) for member in self._group.running]
        killed = [member for member, number in culprits if (member, number) in running]
        self._hung |= {member.index for member in killed}
        if not self._recovers_in_place:
            self._hang_outcome = hang.outcome(str(report.phase), cause)
        for member in killed:
            await self._nodes.signal(member.node_id, member.index, signal.SIGKILL)
        return None

    def _newest(self) -> list[RankObservation]:
        """Return the latest observations of running processes that have a rank, sorted by rank."""
        ranks = {(m.index, m.incarnation): m.rank for m in self._group.running}
        seen = [
            replace(observation, rank=ranks[observation.rank, observation.incarnation])
            for observation in self._observations
            if (observation.rank, observation.incarnation) in ranks
        ]
        return sorted(seen, key=lambda observation: observation.rank)

    async def _signal(self, rank: int, number: int) -> bool:
        member = next((m for m in self._group.running if m.rank == rank), None)
        return member is not None and await self._nodes.signal(member.node_id, member.index, number)
