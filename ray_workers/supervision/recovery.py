"""Recovery of a group in place, and changes of its size, by the rules of `recovery_rules`.

A group comes into its next rendezvous round in three ways. A lost rank is replaced in its slot. A
lost node is done without, or its workers get slots elsewhere while the others stand by with the
whole state. And slots that are granted are taken in once the workers in them are ready, so that no
rank waits for them. Where ranks need no other in particular (gossip), they go on without the lost
ones at once, and take the replacements in like these.

Ranks of a script that are in no group with the others are started again alone, and there is no
round.
"""

from __future__ import annotations

import asyncio
import time
import traceback
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Coroutine, Sequence, Set
from dataclasses import replace
from typing import Any

from ray.exceptions import RayActorError

from ray_workers.node import placement_groups
from ray_workers.node.forkserver.client import ForkFailed
from ray_workers.shared.commands import Grant, Recall
from ray_workers.shared.contracts import AttemptSpec
from ray_workers.shared.frames import LossKind, RegroupedReport, RegroupingReport, ResizedReport
from ray_workers.shared.heartbeat import RankObservation, RankPhase
from ray_workers.shared.processes.machine_pace import MachinePace
from ray_workers.supervision.node_clients import CodeUnavailable, CodeUnfetchable, NodeClients
from ray_workers.supervision.reporter import Reporter
from ray_workers.supervision.rules import recovery_rules
from ray_workers.supervision.rules.failure_attribution import RankExit, errors_of
from ray_workers.supervision.rules.recovery_rules import RESTARTS_WITHIN_S, RecoveryState
from ray_workers.supervision.rules.timings import Timings
from ray_workers.supervision.slots import SlotsUnavailable
from ray_workers.supervision.worker_group import Member, WorkerGroup

_NOT_STARTED = (ForkFailed, RayActorError, SlotsUnavailable, TimeoutError)


class RecoveryController:
    """See the module's docstring."""

    def __init__(
        self,
        spec: AttemptSpec,
        group: WorkerGroup,
        nodes: NodeClients,
        reporter: Reporter,
        on_resize: Callable[[], None],
        prepare: Callable[[Collection[str]], Awaitable[None]],
        pace: MachinePace,
        timings: Timings,
    ) -> None:
        """on_resize: called whenever the attempt holds more or fewer slots than before. prepare:
        has nodes ready for ranks, or raises CodeUnavailable or CodeUnfetchable."""
        self._group = group
        self._nodes = nodes
        self._reporter = reporter
        self._on_resize = on_resize
        self._prepare = prepare
        self._pace = pace
        self._timings = timings
        self._least = least_ranks(spec)
        self.state = RecoveryState()
        self._one_at_a_time = asyncio.Lock()
        self._newest_grant = 0
        self._settled_grant = 0
        self._taking_in: asyncio.Task[None] | None = None
        self._giving_back: asyncio.Task[None] | None = None
        self._giving_rest: asyncio.Task[None] | None = None
        self._beside: set[asyncio.Task[None]] = set()
        """The work for lost members while the others train on."""
        self._coming: list[Member] = []
        """Lost members for which another process is started beside the training."""
        self._asks_until = 0.0
        """By the pace's time: for so long slots instead of those on lost nodes are asked for."""
        self.taken_in = asyncio.Event()
        """Set when members have got a place that they did not have, whose ends matter from then."""
        self._traits = spec.traits
        self._restarts: list[tuple[float, int]] = []
        """Of late: when, by the pace's time, and which rank."""

    async def recover(self, lost: Sequence[Member], *, kind: LossKind, began_at: float) -> bool:
        """Have the group go on without the lost members, or with others in their place.

        False if it does not recover. lost: members whose process has ended; without any, the living
        ranks are brought together again. began_at: Unix seconds of the loss.
        """
        async with self._one_at_a_time:
            # Asked only where a whole worker vanished: Ray's answer takes a while.
            vanished = any(member.end.exit_code is None for member in lost)
            dead = await self._dead_nodes() if vanished else set()
            self._nodes.forget(dead)
            ranks = {(member.seat, member.incarnation): member.rank for member in lost}
            ends = [member.end for member in lost]
            why_not = recovery_rules.refused(
                ends,
                errors_of(await self._nodes.errors(), ranks),
                num_holders=await self._num_holders(),
                without_a_step=self.state.without_a_step,
                servers=self._traits.state_holders,
                replicas=self._traits.replicas,
                recovering=() if self.state.regrouping is None else self.state.regrouping.ranks,
            )
            if why_not is not None:
                print(f"not recovered in place: {why_not}", flush=True)  # noqa: T201
                return False
            self.state = replace(self.state, without_a_step=self.state.without_a_step + 1)
            await self._begin([end.rank for end in ends], began_at)
            self._report_loss(ends, kind)
            try:
                if self._traits.goes_on_without_lost:
                    return await self._go_on_without(lost, dead)
                return await self._make_whole(lost, dead)
            except _NOT_STARTED:
                traceback.print_exc()
                return False

    async def restart(
        self, lost: Sequence[Member], *, kind: LossKind, began_at: float
    ) -> RegroupedReport | None:
        """Start ranks again, in their slots and at their addresses, that are in no group with the
        others; None if it can't be done, or is not to be. lost: members whose process has ended."""
        now, ends = self._pace.time(), [member.end for member in lost]
        self._restarts = [one for one in self._restarts if now - one[0] < RESTARTS_WITHIN_S]
        earlier = Counter(rank for _, rank in self._restarts)
        if not recovery_rules.may_restart(ends, self._traits.restarted_alone, earlier):
            return None
        self._restarts += ((now, end.rank) for end in ends)
        self._report_loss(ends, kind)
        try:
            await self._pace.within(self._timings.replace_limit_s, self._group.replace(lost, 0))
        except _NOT_STARTED:
            traceback.print_exc()
            return None
        report = RegroupedReport(
            generation=self.state.round,
            ranks=[end.rank for end in ends],
            world_size=len(self._group.placed),
            step=None,
            steps_lost=None,
            recovery_s=max(0.0, time.time() - began_at),
        )
        self._reporter.report(report)
        return report

    async def _num_holders(self) -> int:
        """How many of the running ranks can hand over the state.

        Where no rank is known that can, a node whose answer is late is waited for.
        """
        # The observations of the processes on a lost node are gone with it.
        regrouping = self.state.regrouping
        furthest_step = 0 if regrouping is None else regrouping.furthest_step
        began = self._pace.time()
        while True:
            observations = await self._nodes.observations()
            running = {(member.seat, member.incarnation) for member in self._group.running}
            num = recovery_rules.num_holders(observations, running, furthest_step=furthest_step)
            observed = {(one.rank, one.incarnation) for one in observations}
            if num or running <= observed:
                return num
            if self._pace.is_over(began, self._timings.holders_limit_s):
                return 0
            await asyncio.sleep(self._timings.ask_again_pause_s)

    async def _begin(self, ranks: Sequence[int], began_at: float) -> None:
        observations = await self._nodes.observations()
        furthest_step = max((one.status.step for one in observations), default=0)
        self.state = self.state.begin(ranks, began_at, furthest_step)

    async def _make_whole(self, lost: Sequence[Member], dead: Set[str]) -> bool:
        """Replace the members that can be replaced, release the others, and announce the round;
        False if no rank is left. dead: the nodes that are known to be gone."""
        limit_s = self._timings.replace_limit_s
        if await self._pace.within(limit_s, self._replace_or_release(lost, dead)):
            if self._traits.keeps_numbers:
                return False  # the ranks that are left would have other numbers, and other roles
            self._report_size("goes on without the workers of a lost node")
        return await self._go_on()

    async def _go_on_without(self, lost: Sequence[Member], dead: Set[str]) -> bool:
        """Have the others go on at once, and replace the lost members beside their training."""
        for member in lost:
            member.is_placed = False
        await self._lose(dead)
        if not await self._go_on():
            return False
        for member in lost:
            if member in self._group.members:
                self._do_beside(self._replace_beside(member))
        return True

    def _do_beside(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._beside.add(task)
        task.add_done_callback(self._beside.discard)

    async def _lose(self, dead: Set[str]) -> list[Member]:
        """Give up the slots on nodes that are gone, and ask for others for a while."""
        if gone := await self._group.lose_nodes(dead):
            self._report_size("goes on without the workers of a lost node")
            self._asks_until = self._pace.time() + self._timings.stand_by_limit_s
            self._do_beside(self._ask_no_more())
        self._nodes.forget(dead)
        return gone

    async def _ask_no_more(self) -> None:
        """Do without workers for which no slots came in time: for a group that lacks workers, slots
        are held back from the whole queue."""
        while self._pace.time() < self._asks_until or self.state.grants or self.state.is_taking_in:
            await asyncio.sleep(self._timings.ready_period_s)
        if self._num_lacking:
            self._least = len(self._group.members)
            self._report_size("goes on without workers for which no slots came")

    async def _replace_beside(self, member: Member) -> None:
        """Have a lost member come back with another process, once that is ready for its place."""
        self._coming.append(member)
        try:
            is_settled = await self._comes_back(member)
        finally:
            self._coming.remove(member)
        if not is_settled:
            how = "goes on without a lost worker, for which no process can be started"
            self._report_size(how)

    async def _comes_back(self, member: Member) -> bool:
        """Whether the member has a place again, or is gone with its node."""
        for _ in range(recovery_rules.MOST_STARTS):
            try:
                if not await self._restart(member):
                    return True
            except Exception:  # nobody waits for this work, so that no error would be heard of
                traceback.print_exc()
            else:
                async with self._one_at_a_time:
                    if member.is_running:
                        # Rank 0, which reports and saves, stays with a process that does so.
                        member.rank = 1 + max((m.rank for m in self._group.placed), default=-1)
                        await self._place([member], "takes in the replacement of a lost worker")
                        return True
            await asyncio.sleep(self._timings.give_back_pause_s)
        return False

    async def _restart(self, member: Member) -> bool:
        """Whether the member has a process that is ready for a place; False if its node is gone."""
        limit_s = self._timings.replace_limit_s
        if dead := await self._pace.within(limit_s, self._replace([member])):
            async with self._one_at_a_time:
                await self._go_on_without_nodes(dead)
            return False
        limit_s = self._timings.ready_limit_s
        await self._pace.within(limit_s, self._wait_until_ready([member]))
        return True

    async def _go_on_without_nodes(self, dead: Set[str]) -> None:
        """Give up nodes that turned out dead. Other ranks there may have got a place since, in a
        round that they never come into, and nobody finds their ends once they are out of the
        group."""
        ends = [member.end for member in await self._lose(dead) if member.is_placed]
        if ends:
            await self._begin([end.rank for end in ends], time.time())
            self._report_loss(ends, LossKind.LOST)
            await self._go_on()

    async def _place(self, newcomers: Sequence[Member], how: str) -> None:
        """Give members that are ready a place in the next round."""
        await self._begin([], time.time())
        for member in newcomers:
            member.is_placed = True
        self.taken_in.set()
        self._report_size(how)
        await self._go_on()

    async def _replace_or_release(self, lost: Sequence[Member], dead: Set[str]) -> bool:
        """Whether the group is smaller now."""
        shrunk = False
        while True:
            gone = await self._group.lose_nodes(dead)
            self._nodes.forget(dead)
            shrunk = shrunk or bool(gone)
            lost = [member for member in lost if member not in gone]
            dead = await self._replace(lost)
            if not dead:
                return shrunk

    async def _dead_nodes(self, members: Sequence[Member] = ()) -> Set[str]:
        """Nodes of the group, and of members that may have left it, that are gone."""
        alive = await asyncio.to_thread(placement_groups.alive_nodes)
        slots = [*self._group.slots, *(member.slots for member in members)]
        return {each.part.node_id for each in slots} - alive

    async def _replace(self, members: Sequence[Member]) -> Set[str]:
        """Replace these members; empty if that was done, else the nodes that turned out dead."""
        # A process that runs there still did not answer.
        vanished = any(m.is_running or m.end.exit_code is None for m in members)
        replacing = asyncio.ensure_future(self._group.replace(members, self.state.round))
        try:
            while not replacing.done():
                await asyncio.wait({replacing}, timeout=self._timings.dead_node_period_s)
                if vanished and not replacing.done() and (dead := await self._dead_nodes(members)):
                    return dead
            await replacing
        finally:
            replacing.cancel()
        return set()

    @property
    def _num_lacking(self) -> int:
        """Workers for which the group needs slots."""
        there = self._group.members if self._traits.goes_on_without_lost else self._group.running
        return max(0, self._least - len(there))

    async def _go_on(self) -> bool:
        """Announce the round, or stand by for the workers that are lacking; False if no rank is
        left."""
        if not self._group.running:
            return False
        if self._traits.is_tied_to_nodes and self._num_lacking:
            return False  # no other node has the data of those that are lacking
        num_awaited = 0 if self._traits.goes_on_without_lost else self._num_lacking
        self.state = self.state.lack(num_awaited, self._pace.time())
        # Ranks that have just been lost are recovered next, and the round is announced then.
        if not self.state.num_lacking and len(self._group.running) == len(self._group.placed):
            await self._group.announce(self.state.round, self.state.batch_size)
            self.state = replace(self.state, announced_at=self._pace.time())
        return True

    def confirm(self, ranks: Sequence[RankObservation]) -> RegroupedReport | None:
        """Report that the group trains again, if it was recovering. ranks: as it does now."""
        regrouping = self.state.regrouping
        if regrouping is None:
            return None
        self.state = replace(self.state, regrouping=None, without_a_step=0)
        self._pace.caught_up()
        if not regrouping.ranks:
            return None
        resumed = max((rank.status.resumed_step for rank in ranks), default=0)
        first_at = max((rank.status.first_at for rank in ranks), default=0.0)
        if first_at < regrouping.began_at:  # nothing is left to do, or others go on as before
            first_at = time.time()
        # A silo's part of an open round counts, and so does each gradient that servers have.
        is_kept = bool(self._traits.state_holders)
        steps_lost = 0 if is_kept else max(0, regrouping.furthest_step - resumed)
        report = RegroupedReport(
            generation=self.state.round,
            ranks=list(regrouping.ranks),
            world_size=len(self._group.placed),
            step=resumed,
            steps_lost=steps_lost,
            recovery_s=max(0.0, first_at - regrouping.began_at),
        )
        self._reporter.report(report)
        return report

    # Growing.

    def grow(self, grant: Grant) -> None:
        """Have these slots taken in as soon as may be; once by the grant's number."""
        if grant.number > self._newest_grant:
            self._newest_grant = grant.number
            self.state = replace(self.state, grants=(*self.state.grants, grant))

    def take_in(self, grant: Grant) -> None:
        """Start workers in the slots of the first grant, and give them a place once they are
        ready."""

        def is_done(_: asyncio.Task[None]) -> None:
            self.state = replace(self.state, is_taking_in=False)

        self.state = replace(self.state, grants=self.state.grants[1:], is_taking_in=True)
        self._taking_in = asyncio.create_task(self._take_in(grant))
        self._taking_in.add_done_callback(is_done)

    async def _take_in(self, grant: Grant) -> None:
        try:
            newcomers = await self._start_newcomers(grant)
        except (*_NOT_STARTED, CodeUnavailable, CodeUnfetchable, ValueError) as error:
            self._settled_grant = grant.number
            self._report_size(f"could not take more slots in ({error})")
            self._give_rest_back()
            return
        async with self._one_at_a_time:
            self._change_batch(grant)
            grows = f"grows by {len(newcomers)}" if newcomers else "goes on with another batch"
            await self._place(newcomers, grows)

    async def _start_newcomers(self, grant: Grant) -> list[Member]:
        """Members in these slots that are ready for a place; nothing is held if that fails. None of
        a grant without slots, which changes the batch alone."""
        if not grant.slices:
            self._settled_grant = grant.number
            return []
        node_ids = [part.node_id for part in grant.slices]
        await self._nodes.know(node_ids)
        await self._prepare(node_ids)
        # A rank actor that is stopped while it starts never answers.
        limit_s = self._timings.grow_limit_s + self._timings.replace_limit_s
        adding = self._group.add(grant.slices, self.state.round + 1)
        newcomers = await self._pace.within(limit_s, adding)
        self._settled_grant = grant.number
        self._on_resize()
        try:
            limit_s = self._timings.ready_limit_s
            await self._pace.within(limit_s, self._wait_until_ready(newcomers))
        except BaseException:
            await self._group.give_back([m.slots for m in newcomers])
            raise
        return newcomers

    async def _wait_until_ready(self, newcomers: Sequence[Member]) -> None:
        waiting = {(member.seat, member.incarnation) for member in newcomers}
        while waiting:
            if not all(member.is_running for member in newcomers):
                raise ForkFailed("a new worker ended before it was ready")
            await asyncio.sleep(self._timings.ready_period_s)
            for observation in await self._nodes.observations():
                if observation.status.phase is RankPhase.STAND_BY:
                    waiting.discard((observation.rank, observation.incarnation))

    # Giving slots back.

    def recall(self, recall: Recall) -> None:
        """Have these slots given back as soon as may be; once by the recall's number."""
        if recall.number > self._newest_grant:
            self._newest_grant = recall.number
            self._giving_back = asyncio.create_task(self._give_back(recall))

    async def _give_back(self, recall: Recall) -> None:
        """Announce a round without the ranks in these slots, and end these then: the others leave
        the group between two steps, and need nothing of those that go."""
        async with self._one_at_a_time:
            held = [slots for slots in self._group.slots if slots.is_held and not slots.is_going]
            places = recovery_rules.recalled([s.part for s in held], recall.slices, self._least)
            going = [held[at] for at in places]
            may_go = going and self.state.regrouping is None and await self._goes_on_without()
            self._settled_grant = recall.number
            if not may_go:
                self._report_size("keeps its slots, and goes on")
                return
            await self._begin([], time.time())
            self._change_batch(recall)
            members = [member for member in self._group.members if member.slots in going]
            for member in members:
                member.is_placed = False
            try:
                await self._go_on()
                await self._group.give_back(going)
            finally:
                self._report_size(f"gives {len(members)} back")
                self._give_rest_back()

    async def _goes_on_without(self) -> bool:
        """Whether the group can form without some of its ranks, which need hand nothing over."""
        if not self._traits.recovers_in_place or not await self._num_holders():
            return False
        if not self._traits.is_script:
            return True
        running = {(member.seat, member.incarnation) for member in self._group.running}
        return recovery_rules.are_prepared(await self._nodes.observations(), running)

    def _change_batch(self, asked: Grant | Recall) -> None:
        """Have the next round announce the batch that comes with a change of the size."""
        if asked.batch_size is not None:
            self.state = replace(self.state, batch_size=asked.batch_size)

    def _give_rest_back(self) -> None:
        """Have slots given back later whose processes are not gone yet: they stay the group's."""
        is_at_it = self._giving_rest is not None and not self._giving_rest.done()
        if not is_at_it and any(slots.is_going for slots in self._group.slots):
            self._giving_rest = asyncio.create_task(self._give_rest_back_later())

    async def _give_rest_back_later(self) -> None:
        while any(slots.is_going for slots in self._group.slots):
            await asyncio.sleep(self._timings.give_back_pause_s)
            try:
                was_given = await self._group.give_back_rest()
            except Exception:
                traceback.print_exc()  # Ray may be busy
                continue
            if was_given:
                self._report_size("gave slots back whose processes are gone now")

    async def stop(self) -> None:
        """The attempt ends: nothing more is taken in or given back."""
        for task in tuple(self._beside):
            await _end(task)
        await _end(self._taking_in)
        await _end(self._giving_back)
        await _end(self._giving_rest)  # the others may begin it as they end

    # Reporting.

    def _report_loss(self, lost: Sequence[RankExit], kind: LossKind) -> None:
        if lost:
            how = "; ".join(recovery_rules.how(rank, self._traits.role_names) for rank in lost)
        else:
            how = "ranks lost each other, though all of them live"
        goes_on = (self._traits.goes_on_without_lost or self._traits.restarted_alone) and lost
        others = f"{'the others' if lost else 'they'} {'go on' if goes_on else 'keep their state'}"
        self._reporter.report(
            RegroupingReport(
                generation=self.state.round,
                ranks=[rank.rank for rank in lost],
                code=kind,
                message=f"{how}; {others}{self._pace.why()}",
            )
        )

    def _report_size(self, what: str) -> None:
        self._on_resize()
        held = [slots.part for slots in self._group.slots if slots.is_held]
        num = len(self._group.running)
        lacking = self._num_lacking
        message = f"{what}: {num} worker{'' if num == 1 else 's'}"
        if coming := sum(not m.is_placed and m in self._group.members for m in self._coming):
            message += f", and starts {coming} more"
        if lacking:
            verb = "asks" if self._traits.goes_on_without_lost else "waits"
            message += f", and {verb} for {lacking} more"
        self._reporter.report(
            ResizedReport(
                world_size=num,
                slices=held,
                lacking=lacking,
                grants=self._settled_grant,
                message=message,
            )
        )


def least_ranks(spec: AttemptSpec) -> int:
    """With how few the group may go on where no replacement is to be had."""
    fewest = spec.min_workers if spec.traits.quorum is None else spec.traits.quorum
    return spec.world_size if fewest is None else fewest


async def _end(task: asyncio.Task[None] | None) -> None:
    if task is not None:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
