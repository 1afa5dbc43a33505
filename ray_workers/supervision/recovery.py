"""Recovery of a group in place, and changes of its size, by the rules of `recovery_rules`.

A group comes into its next generation in three ways. A lost rank is replaced in its slot. A lost
node is done without, or its workers get slots elsewhere while the others stand by with the whole
state. And slots that are granted are taken in once what runs in them is ready, so that nobody waits
for it.
"""

from __future__ import annotations

import asyncio
import time
import traceback
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, replace

from ray.exceptions import RayActorError

from ray_workers.node import placement_groups
from ray_workers.node.forkserver_client import ForkFailed
from ray_workers.shared.contracts import AttemptSpec, Cause, Grant, Outcome
from ray_workers.shared.frames import HeldSlots, RegroupedReport, RegroupingReport, ResizedReport
from ray_workers.shared.heartbeat import RankObservation, RankPhase
from ray_workers.shared.machine_pace import MachinePace
from ray_workers.supervision import recovery_rules
from ray_workers.supervision.failure_attribution import RankExit
from ray_workers.supervision.fault_injection import FaultInjector
from ray_workers.supervision.node_clients import NodeClients
from ray_workers.supervision.reporter import Reporter
from ray_workers.supervision.worker_group import Member, SlotsUnavailable, WorkerGroup

REPLACE_LIMIT_S = 30.0
"""Longest that a replacement may take to run."""
DEAD_NODE_LOOK_S = 0.5
STAND_BY_S = 30.0
"""How long a group that lacks workers waits for slots; then it goes on from its checkpoint, when
there are some."""
READY_LIMIT_S = 180.0
"""How long a newcomer may take to be ready for its place: it reads the data first."""
READY_LOOK_S = 0.05
WHOLE_LIMIT_S = 150.0
"""Longest from the announcement of a group to its first step: a replacement may have to read the
data anew."""

_NOT_TO_BE = (ForkFailed, RayActorError, SlotsUnavailable, TimeoutError)


@dataclass(frozen=True)
class Regrouping:
    """A group on its way into its next generation."""

    ranks: tuple[int, ...]
    """Who was lost; nobody, if it only changes its size."""
    began_at: float
    """Unix seconds at which the loss was seen."""
    furthest_step: int
    """That anybody had committed before."""


class RecoveryController:
    """See the module's docstring."""

    def __init__(
        self,
        spec: AttemptSpec,
        group: WorkerGroup,
        nodes: NodeClients,
        reporter: Reporter,
        drills: FaultInjector,
        resized: Callable[[], None],
        pace: MachinePace,
    ) -> None:
        """resized: called whenever the attempt holds more or fewer slots than before."""
        self._spec = spec
        self._group = group
        self._nodes = nodes
        self._reporter = reporter
        self._drills = drills
        self._resized = resized
        self._pace = pace
        self._least = spec.world_size if spec.min_workers is None else spec.min_workers
        self.generation = 0
        """The newest of the group, that was announced or is about to be."""
        self._without_a_step = 0
        self._one_at_a_time = asyncio.Lock()
        self._grants: list[Grant] = []
        self._newest_grant = 0
        self._settled_grant = 0
        self._taking_in: asyncio.Task[None] | None = None
        self._lacking_since: float | None = None
        self.announced_at: float | None = None
        """By the pace's time; None until those who have a place in it are told."""
        self.regrouping: Regrouping | None = None

    async def mend(self, lost: Sequence[Member], *, code: str) -> bool:
        """Have the group go on without what was lost, or with others in its place.

        False if that is not to be. lost: members whose process has ended; without any, those who
        live are brought together again. code: how they were lost, as REGROUPING has it.
        """
        seen_at = time.time()
        async with self._one_at_a_time:
            # Asked only where a whole worker vanished: Ray's answer takes a while.
            vanished = any(member.end.exit_code is None for member in lost)
            dead = await self._dead_nodes() if vanished else set()
            self._nodes.forget(dead)
            errors = await self._nodes.errors()
            ends = [member.end for member in lost]
            why_not = recovery_rules.refused(
                ends,
                {end.rank: errors[end.rank] for end in ends if end.rank in errors},
                num_holders=await self._num_holders(),
                without_a_step=self._without_a_step,
            )
            if why_not is not None:
                print(f"not recovered in place: {why_not}", flush=True)  # noqa: T201
                return False
            self._without_a_step += 1
            await self._begin([end.rank for end in ends], seen_at)
            self._tell_loss(ends, code)
            try:
                return await self._make_whole(lost, dead)
            except _NOT_TO_BE:
                traceback.print_exc()
                return False

    async def _num_holders(self) -> int:
        """How many of those who run can hand over the state."""
        running = {(member.seat, member.incarnation) for member in self._group.running}
        # A node that is lost takes along what was seen of the processes on it.
        known = 0 if self.regrouping is None else self.regrouping.furthest_step
        return recovery_rules.num_holders(
            await self._nodes.observations(), running, furthest_step=known
        )

    async def _begin(self, ranks: Sequence[int], seen_at: float) -> None:
        before = self.regrouping
        observations = await self._nodes.observations()
        self.generation += 1
        self.announced_at = None
        furthest = max((observation.status.step for observation in observations), default=0)
        self.regrouping = Regrouping(tuple(ranks), self._drills.struck_at(ranks, seen_at), furthest)
        if before is not None:
            self.regrouping = replace(
                before,
                ranks=tuple(sorted({*before.ranks, *ranks})),
                furthest_step=max(before.furthest_step, furthest),
            )

    async def _make_whole(self, lost: Sequence[Member], dead: Set[str]) -> bool:
        """Replace who can be replaced, let go of the others, and bring those together who are
        there; False if nobody is. dead: the nodes that are known to be gone."""
        if await self._pace.within(REPLACE_LIMIT_S, self._replace_or_let_go(lost, dead)):
            self._tell_size("goes on without what lay on a lost node")
        return await self._go_on()

    async def _replace_or_let_go(self, lost: Sequence[Member], dead: Set[str]) -> bool:
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

    async def _dead_nodes(self) -> Set[str]:
        """Nodes of the group that are gone."""
        alive = await asyncio.to_thread(placement_groups.alive_nodes)
        return {slots.part.node_id for slots in self._group.slots} - alive

    async def _replace(self, members: Sequence[Member]) -> Set[str]:
        """Replace these members; empty if that was done, else the nodes that turned out dead."""
        vanished = any(member.end.exit_code is None for member in members)
        replacing = asyncio.ensure_future(self._group.replace(members, self.generation))
        try:
            while not replacing.done():
                await asyncio.wait({replacing}, timeout=DEAD_NODE_LOOK_S)
                if vanished and not replacing.done() and (dead := await self._dead_nodes()):
                    return dead
            await replacing
        finally:
            replacing.cancel()
        return set()

    @property
    def is_waiting_for_slots(self) -> bool:
        """Whether those who are there stand by until others come."""
        return self._lacking_since is not None

    @property
    def _num_lacking(self) -> int:
        return max(0, self._least - len(self._group.running))

    async def _go_on(self) -> bool:
        """Announce the generation, or stand by for as many workers as it lacks."""
        if not self._group.running:
            return False
        if self._num_lacking:
            if self._lacking_since is None:
                self._lacking_since = self._pace.time()
            return True
        self._lacking_since = None
        # Who has just been lost is mended next, and all are told then.
        if len(self._group.running) == len(self._group.placed):
            await self._group.announce(self.generation)
            self.announced_at = self._pace.time()
        return True

    # Growing.

    def grow(self, grant: Grant) -> None:
        """Take these slots in as soon as may be; once by the grant's number."""
        if grant.number > self._newest_grant:
            self._newest_grant = grant.number
            self._grants.append(grant)

    async def _take_in(self, grant: Grant) -> None:
        try:
            newcomers = await self._start_newcomers(grant)
        except (*_NOT_TO_BE, ValueError) as error:
            self._settled_grant = grant.number
            self._tell_size(f"could not take more slots in ({error})")
            return
        async with self._one_at_a_time:
            await self._begin([], time.time())
            for member in newcomers:
                member.is_placed = True
            self._tell_size(f"grows by {len(newcomers)}")
            await self._go_on()

    async def _start_newcomers(self, grant: Grant) -> list[Member]:
        """Members in these slots that are ready for a place; nothing is held if that fails."""
        await self._nodes.know(part.node_id for part in grant.slices)
        newcomers = await self._group.add(grant.slices, self.generation + 1)
        self._settled_grant = grant.number
        self._resized()
        try:
            await self._pace.within(READY_LIMIT_S, self._wait_until_ready(newcomers))
        except BaseException:
            await self._group.give_back([m.slots for m in newcomers])
            raise
        return newcomers

    async def _wait_until_ready(self, newcomers: Sequence[Member]) -> None:
        waiting = {(member.seat, member.incarnation) for member in newcomers}
        while waiting:
            if not all(member.is_running for member in newcomers):
                raise ForkFailed("a new worker ended before it was ready")
            await asyncio.sleep(READY_LOOK_S)
            for observation in await self._nodes.observations():
                if observation.status.phase is RankPhase.STAND_BY:
                    waiting.discard((observation.rank, observation.incarnation))

    # Looking.

    async def look(self, newest: Sequence[RankObservation]) -> Outcome | None:
        """See how far it is; an Outcome if it will not come to an end.

        newest: of those who have a place, as they are seen now.
        """
        if self._taking_in is not None and self._taking_in.done():
            self._taking_in = None
        if self._grants and self._taking_in is None:
            self._taking_in = asyncio.create_task(self._take_in(self._grants.pop(0)))
        if self._lacking_since is not None:
            return self._look_at_lack(self._lacking_since)
        if self.regrouping is None:
            return None
        looks = [observation.status for observation in newest]
        whole = len(looks) == len(self._group.running) == len(self._group.placed)
        here = whole and all(look.generation >= self.generation for look in looks)
        if here and all(look.first_at or look.phase is RankPhase.FINISH for look in looks):
            self.settle(newest)
        elif self.announced_at is not None and self._pace.is_over(self.announced_at, WHOLE_LIMIT_S):
            stand = "; ".join(f"rank {s.rank}: {s.status.phase.name.lower()}" for s in newest)
            message = f"the group was not whole again within {WHOLE_LIMIT_S:g} s ({stand})"
            return Outcome(Cause.WORKER_LOST, message)
        return None

    def _look_at_lack(self, since: float) -> Outcome | None:
        if self._taking_in is not None or not self._pace.is_over(since, STAND_BY_S):
            return None
        return Outcome(
            Cause.WORKER_LOST,
            f"no slots came within {STAND_BY_S:g} s for {self._num_lacking} workers that were lost",
        )

    def settle(self, newest: Sequence[RankObservation]) -> None:
        """Tell that the group trains again, if it was being mended and does."""
        mended, self.regrouping = self.regrouping, None
        if mended is None:
            return
        self._without_a_step = 0
        self._pace.caught_up()
        if not mended.ranks:
            return
        resumed = max((observation.status.resumed_step for observation in newest), default=0)
        first_at = (
            max((observation.status.first_at for observation in newest), default=0.0) or time.time()
        )
        report = RegroupedReport(
            generation=self.generation,
            ranks=list(mended.ranks),
            world_size=len(self._group.placed),
            step=resumed,
            steps_lost=max(0, mended.furthest_step - resumed),
            recovery_s=max(0.0, first_at - mended.began_at),
        )
        self._reporter.report(report)
        self._drills.passed(report)

    async def stop(self) -> None:
        """The attempt ends: nothing more is taken in."""
        if self._taking_in is not None:
            self._taking_in.cancel()
            await asyncio.gather(self._taking_in, return_exceptions=True)

    # Telling.

    def _tell_loss(self, lost: Sequence[RankExit], code: str) -> None:
        if lost:
            said = "; ".join(recovery_rules.how(rank) for rank in lost)
        else:
            said = "ranks lost each other, though all of them live"
        self._reporter.report(
            RegroupingReport(
                generation=self.generation,
                ranks=[rank.rank for rank in lost],
                code=code,
                message=f"{said}; the others keep their state{self._pace.why()}",
            )
        )

    def _tell_size(self, what: str) -> None:
        self._resized()
        held = [slots.part for slots in self._group.slots if slots.is_held]
        num = len(self._group.running)
        lacking = self._num_lacking
        message = f"{what}: {num} worker{'' if num == 1 else 's'}"
        if lacking:
            message += f", and waits for {lacking} more"
        self._reporter.report(
            ResizedReport(
                world_size=num,
                slices=[HeldSlots(part.node_id, part.num_workers) for part in held],
                lacking=lacking,
                grants=self._settled_grant,
                message=message,
            )
        )
