"""Brings a group into its next rendezvous round, following the rules in `membership` and
`recovery_rules`.

The members of a group change for several reasons: ranks or nodes are lost, slots are granted or
recalled, or a replacement becomes ready. A `GroupChange` describes each such change.
`RecoveryController.form` starts the processes that the next round needs, and announces the round.
"""

from __future__ import annotations

import asyncio
import time
import traceback
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence, Set
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from ray_workers.shared.contracts import AttemptSpec, Frame
from ray_workers.shared.heartbeat import RankObservation, RankStatus
from ray_workers.shared.processes.machine_speed import MachineSpeed
from ray_workers.shared.supervisor_frames import LossKind, RegroupedReport, ResizedReport
from ray_workers.supervision.group_positions import GroupPositions
from ray_workers.supervision.member import GroupChange, Member
from ray_workers.supervision.node_clients import NodeClients
from ray_workers.supervision.preparation import NOT_STARTED, Preparation
from ray_workers.supervision.reporter import Reporter
from ray_workers.supervision.rules import recovery_rules, spare_rules
from ray_workers.supervision.rules.failure_attribution import RankExit, errors_of
from ray_workers.supervision.rules.membership import (
    GroupRoster,
    NextRound,
    Worker,
    WorkerState,
    next_round,
)
from ray_workers.supervision.rules.recovery_rules import RecoveryState
from ray_workers.supervision.rules.spare_rules import counted
from ray_workers.supervision.rules.timings import Timings
from ray_workers.supervision.worker_group import WorkerGroup


class RecoveryController:
    """Recovers a group and forms its rounds."""

    def __init__(
        self,
        spec: AttemptSpec,
        group: WorkerGroup,
        nodes: NodeClients,
        reporter: Reporter,
        on_resize: Callable[[], None],
        preparation: Preparation,
        speed: MachineSpeed,
        timings: Timings,
    ) -> None:
        """`on_resize` is called whenever the number of the attempt's slots changes."""
        self._traits = spec.traits
        self._group = group
        self._nodes = nodes
        self._reporter = reporter
        self.on_resize = on_resize
        self._preparation = preparation
        self._speed = speed
        self._timings = timings
        self.least = recovery_rules.least_ranks(spec)
        """Minimum number of workers that the group needs to train."""
        self.state = RecoveryState()
        self.workers_added = asyncio.Event()
        """Set when new members have been assigned a rank, so that the monitor also waits for their
        exits."""
        self.one_at_a_time = asyncio.Lock()
        """Held during each change of the group."""
        self.settled_command = 0
        """The number of the latest grant or recall that was carried out or found to be
        impossible."""
        self._tasks: set[asyncio.Task[None]] = set()
        """Tasks that run while the group trains."""
        self._rejoining: list[Member] = []
        """Lost members whose processes are being replaced while the other members train, including
        idle members (`positions.idle`)."""
        self.positions = GroupPositions(spec)
        self._responding: set[int] = set()
        """Indices of the spares and idle members that responded to the latest `observe`."""
        self._asks_until = 0.0
        """Time until which replacements for slots on lost nodes are requested, on the clock of
        `MachineSpeed.time`."""

    async def recover(self, lost: Sequence[Member], *, kind: LossKind, began_at: float) -> bool:
        """Continue without the lost members, or with new processes for them. Returns False if the
        group does not recover.

        `lost` contains the members whose processes have exited. If `lost` is empty, the remaining
        ranks reconnect in another round. `began_at` is the Unix time of the failure.
        """
        async with self.one_at_a_time:
            left = [member for member in lost if member in self._group.members]
            if lost and not left:
                return True  # a change that held the lock has formed a round without them
            lost = left
            # Query Ray only if a process vanished without an exit code, because Ray responds
            # slowly.
            vanished = any(member.end.exit_code is None for member in lost)
            dead = await self._preparation.dead_nodes() if vanished else set()
            self._nodes.forget(dead)
            ranks = {(member.index, member.incarnation): member.rank for member in lost}
            ends = [member.end for member in lost]
            errors = errors_of(await self._nodes.errors(), ranks)
            why_not = recovery_rules.refused(
                ends,
                errors,
                num_holders=await self.num_holders(),
                without_a_step=self.state.without_a_step,
                servers=self._traits.state_holders,
                replicas=self._traits.replicas,
                recovering=() if self.state.regrouping is None else self.state.regrouping.ranks,
            )
            if why_not is not None:
                print(f"not recovered in place: {why_not}", flush=True)  # noqa: T201
                return False
            self.state = replace(self.state, without_a_step=self.state.without_a_step + 1)
            await self.begin(ends, began_at, kind, errors)
            try:
                return await self.form(GroupChange(lost=lost, dead_nodes=dead))
            except NOT_STARTED:
                traceback.print_exc()
                return False

    async def num_holders(self) -> int:
        """Return the number of running ranks that can pass on the state.

        If no such rank has been observed, wait for nodes that are slow to respond.
        """
        # Also consider the step that was recorded when the ranks were lost, because a lost node no
        # longer reports the steps of its processes.
        regrouping = self.state.regrouping
        furthest_step = 0 if regrouping is None else regrouping.furthest_step
        began = self._speed.time()
        while True:
            observations = await self._nodes.observations()
            running = {(member.index, member.incarnation) for member in self._group.running}
            num = recovery_rules.num_holders(observations, running, furthest_step=furthest_step)
            observed = {(one.rank, one.incarnation) for one in observations}
            if num or running <= observed:
                return num
            if self._speed.is_over(began, self._timings.holders_limit_s):
                return 0
            await asyncio.sleep(self._timings.ask_again_pause_s)

    async def begin(
        self,
        lost: Sequence[RankExit],
        began_at: float,
        kind: LossKind | None = None,
        errors: Mapping[int, Frame] = MappingProxyType({}),
    ) -> None:
        """Start the transition of the group to its next round. `kind` is the kind of loss to
        report, or None if only the size changes. `errors` contains the ERROR frames of the lost
        ranks."""
        observations = await self.observe()
        furthest_step = max((one.status.step for one in observations), default=0)
        self.state = self.state.begin([end.rank for end in lost], began_at, furthest_step)
        if kind is not None:
            why_slow = self._speed.why()
            spares = min(len(lost), sum(map(self.may_take_over, self._group.spares)))
            report = recovery_rules.loss_report(
                *(lost, kind, self.state.round, self._traits, why_slow, errors), num_spares=spares
            )
            self._reporter.report(report)

    async def observe(self) -> Sequence[RankObservation]:
        """Observe all processes, to find the spares and idle members that can get a rank."""
        observations = await self._nodes.observations()
        limit_s = self._speed.stretched(self._timings.spare_limit_s)
        self._responding = spare_rules.responding(observations, limit_s, self.positions.idle)
        return observations

    # The next round.

    async def resize(self, change: GroupChange) -> None:
        """Form a round that changes the number of workers or the batch size, without the loss of a
        worker."""
        await self.begin([], time.time())
        await self.form(change)

    async def form(self, change: GroupChange) -> bool:
        """Form the round that results from a change, and announce it unless the group has to wait
        for workers. Returns False if the group can't continue. Raises one of NOT_STARTED."""
        limit_s = self._timings.replace_limit_s
        found, is_smaller = await self._speed.within(limit_s, self._make_ready(change))
        if isinstance(found, str):
            print(f"not recovered in place: {found}", flush=True)  # noqa: T201
            return False
        self._assign(found, change)
        if change.ready:
            self.workers_added.set()
        if change.how is not None:
            self.report_size(change.how)
        if is_smaller:
            self._goes_on_smaller()
        self.state = self.state.lack(found.num_awaited, self._speed.time())
        if found.is_whole:
            members = self._members(found.members)
            self.positions.announced(members)
            await self._group.announce(self.state.round, members, self.state.batch_size)
            self.state = replace(self.state, announced_at=self._speed.time())
        if change.leaving:
            slots = [member.slots for member in change.leaving]
            await self._group.release_slots([each for each in self._group.slots if each in slots])
        for member in self._members(found.rejoining):
            self.do(self._rejoin(member))
        return True

    async def _make_ready(self, change: GroupChange) -> tuple[NextRound | str, bool]:
        """Start the processes that the next round needs. Returns the round (or the reason why there
        is none), and whether workers were abandoned because their nodes are dead.

        Each iteration performs the first remaining action, and then determines the roster and the
        remaining actions again, because nodes can die and ranks can exit during the action.
        """
        is_smaller = False
        while True:
            found = next_round(self._roster(change), self._traits)
            if isinstance(found, str):
                return found, is_smaller
            if found.takeovers:
                self._take_over(found.takeovers)
            elif change.dead_nodes:
                is_smaller |= bool(await self._lose(change.dead_nodes))
                change = replace(change, dead_nodes=frozenset())
            elif found.restarted:
                members = self._members(found.restarted)
                if dead := await self._preparation.restart(members, self.state.round):
                    change = replace(change, dead_nodes=dead)
                else:
                    change = replace(change, lost=[m for m in change.lost if m not in members])
            else:
                return found, is_smaller

    def _roster(self, change: GroupChange) -> GroupRoster:
        workers = [
            Worker(
                *(member.index, member.rank, member.node_id, self._state_of(member, change)),
                position=self.positions.of(member),
                since=self.positions.since(member),
            )
            for member in self._group.members
        ]
        leaving = {member.index for member in change.leaving}
        return GroupRoster(workers, self.least, change.dead_nodes, leaving)

    def _state_of(self, member: Member, change: GroupChange) -> WorkerState:
        is_idle = member.is_running and member.index in self._responding and self._is_idle(member)
        if member in change.lost and not member.is_spare:
            return WorkerState.LOST
        if self.may_take_over(member):
            return WorkerState.SPARE
        if not (member.is_placed or is_idle or member in change.ready):
            return WorkerState.STARTING
        if not member.is_running:
            return WorkerState.ENDED
        return WorkerState.ACTIVE if member.is_placed else WorkerState.READY

    def _is_idle(self, member: Member) -> bool:
        """Whether the member waits without a rank until there is another replica."""
        return member.index in self.positions.idle and member not in self._rejoining

    def may_take_over(self, member: Member) -> bool:
        """Whether the member is a spare that can get a rank now."""
        is_waiting = member.is_spare and member.is_ready and member.is_running
        return is_waiting and member.index in self._responding

    def _take_over(self, takeovers: Sequence[tuple[int, int]]) -> None:
        """Give each spare the rank of the worker with which it is paired; this worker becomes a
        spare."""
        for spare, lost in (self._members(pair) for pair in takeovers):
            spare.rank, spare.is_placed, spare.is_spare = lost.rank, True, False
            lost.is_placed, lost.is_spare, lost.is_ready = False, True, False
        self.workers_added.set()

    def _members(self, indices: Sequence[int]) -> list[Member]:
        by_index = {member.index: member for member in self._group.members}
        return [by_index[index] for index in indices]

    def _assign(self, found: NextRound, change: GroupChange) -> None:
        """Assign ranks to the members of the round, and remove the ranks of all other members.
        Existing ranks are kept until the round is announced. Idle members that do not respond are
        restarted, and join a later round."""
        indices = set(found.members)
        silent = [member for member in self._group.members if self._is_idle(member)]
        self.positions.idle = found.idle
        for member in silent:
            if member.index not in indices.union(found.idle) and member not in change.leaving:
                self.do(self._rejoin(member))
        for member in self._group.placed:
            member.is_placed = member.index in indices
        rank = max((member.rank for member in self._group.placed), default=-1)
        for member in self._members(found.members):
            if not member.is_placed:
                rank += 1
                member.rank, member.is_placed = rank, True

    async def _lose(self, dead: Set[str]) -> list[Member]:
        """Release the slots on dead nodes. Returns the members that had these slots."""
        gone = await self._group.lose_nodes(dead)
        self._nodes.forget(dead)
        return gone

    def _goes_on_smaller(self) -> None:
        waits = self._num_lacking > 0 and not self._traits.goes_on_without_lost
        goes_on = "continues without the workers of a lost node"
        self.report_size("lost the workers of a node" if waits else goes_on)
        if self._traits.goes_on_without_lost:
            self._asks_until = self._speed.time() + self._timings.standby_limit_s
            self.do(self._ask_no_more())

    async def _ask_no_more(self) -> None:
        """If no slots become available in time, continue without the missing workers, because the
        service withholds slots from the entire queue while a group lacks workers."""
        while (
            self._speed.time() < self._asks_until
            or self.state.grants
            or self.state.is_adding_workers
        ):
            await asyncio.sleep(self._timings.ready_period_s)
        if self._num_lacking:
            self.least = len(self._group.members)
            self.report_size("continues with fewer workers, because no slots became available")

    def confirm(self, ranks: Collection[RankStatus]) -> RegroupedReport | None:
        """If the group was recovering and has resumed training, report this. `ranks` contains the
        latest statuses of the group's ranks."""
        regrouping = self.state.regrouping
        if regrouping is None:
            return None
        self.state = replace(self.state, regrouping=None, without_a_step=0)
        self._speed.caught_up()
        if not regrouping.ranks:
            return None
        about = (regrouping, ranks, self.state.round, self._traits, len(self._group.placed))
        report = recovery_rules.regrouped_report(*about, time.time())
        self._reporter.report(report)
        return report

    # Lost members that rejoin.

    def restart_idle(self) -> None:
        """Restart members that have exited and that have no rank. The monitor does not see their
        exits."""
        if not self.positions.idle or self.state.regrouping is not None:
            return
        for member in self._group.members:
            if self._is_idle(member) and not member.is_running:
                self.do(self._rejoin(member))

    async def _rejoin(self, member: Member) -> None:
        """Start a replacement process for a lost member; the process joins a later round when it is
        ready."""
        self._rejoining.append(member)
        try:
            for _ in range(recovery_rules.MOST_STARTS):
                if await self._has_rejoined(member) or member not in self._group.members:
                    return
                await asyncio.sleep(self._timings.release_rest_pause_s)
        finally:
            self._rejoining.remove(member)
        self.positions.idle = [index for index in self.positions.idle if index != member.index]
        self.report_size("continues without a lost worker, whose process can't be restarted")

    async def _has_rejoined(self, member: Member) -> bool:
        """Make one attempt to restart the member. Returns True if the member has a rank again, or
        was abandoned because its node is dead."""
        try:
            dead = await self._preparation.restart_until_ready(member, self.state.round)
        except Exception:  # no caller awaits this task, so the error would be lost
            traceback.print_exc()
            return False
        async with self.one_at_a_time:
            if dead:
                await self._go_on_without_nodes(dead)
            elif not member.is_running:
                return False
            elif member in self._group.members and member.index not in self.positions.idle:
                how = "adds a replacement for a lost worker"
                await self.resize(GroupChange(ready=[member], how=how))
            return True

    async def _go_on_without_nodes(self, dead: Set[str]) -> None:
        """Release the slots on dead nodes. If members on these nodes had ranks, report their loss,
        and form a round in which spares take their ranks. The monitor does not observe the exits of
        workers that have left the group."""
        self._nodes.forget(dead)
        if ranks := [member.rank for member in self._group.placed if member.node_id in dead]:
            ends = [RankExit.of(rank, None) for rank in ranks]
            await self.begin(ends, time.time(), LossKind.LOST)
            await self.form(GroupChange(dead_nodes=dead))
        elif await self._lose(dead):
            self._goes_on_smaller()

    async def lose_spares(self, dead: Set[str]) -> None:
        """Release the slots on dead nodes, on which a spare could not be started."""
        async with self.one_at_a_time:
            await self._go_on_without_nodes(dead)

    def do(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run `work` as a task while the group trains. The task is cancelled when the attempt
        ends."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def stop(self) -> None:
        """Cancel the tasks that run while the group trains, because the attempt is ending."""
        while tasks := tuple(self._tasks):  # a task can start another one when it ends
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    # Reports.

    @property
    def _num_lacking(self) -> int:
        """Number of workers for which the group needs slots."""
        present = self._group.members if self._traits.goes_on_without_lost else self._group.placed
        return max(0, self.least - len(present))

    def report_size(self, what: str) -> None:
        """Report the size of the group, and why it has or has not changed."""
        self.on_resize()
        num = len(self._group.running)
        lacking = self._num_lacking
        members = self._group.members
        message = recovery_rules.size_message(
            f"{what}: {counted(num, 'worker')}",
            num_spares=len(self._group.spares),
            num_coming=sum(one in members and not one.is_placed for one in self._rejoining),
            num_idle=sum(map(self._is_idle, members)),
            num_lacking=lacking,
            waits=not self._traits.goes_on_without_lost,
        )
        self._reporter.report(
            ResizedReport(
                world_size=num,
                slices=[slots.part for slots in self._group.held],
                lacking=lacking,
                grants=self.settled_command,
                message=message,
            )
        )
