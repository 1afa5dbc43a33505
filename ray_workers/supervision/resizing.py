"""Adds workers when the service grants slots to the attempt, and removes workers when the service
recalls slots."""

from __future__ import annotations

import asyncio
import traceback
from dataclasses import replace

from ray_workers.shared.commands import Grant, Recall
from ray_workers.shared.contracts import AttemptSpec
from ray_workers.supervision.member import GroupChange, Member
from ray_workers.supervision.node_clients import CodeUnavailable, CodeUnfetchable, NodeClients
from ray_workers.supervision.preparation import NOT_STARTED, Preparation
from ray_workers.supervision.recovery import RecoveryController
from ray_workers.supervision.rules import recovery_rules
from ray_workers.supervision.rules.spare_rules import counted
from ray_workers.supervision.rules.timings import Timings
from ray_workers.supervision.worker_group import WorkerGroup


class Resizing:
    """Carries out the grants and recalls of one attempt."""

    def __init__(
        self,
        spec: AttemptSpec,
        group: WorkerGroup,
        nodes: NodeClients,
        recovery: RecoveryController,
        preparation: Preparation,
        timings: Timings,
    ) -> None:
        self._traits = spec.traits
        self._is_fixed = spec.min_workers is None
        self._group = group
        self._nodes = nodes
        self._recovery = recovery
        self._preparation = preparation
        self._timings = timings
        self._newest = 0
        """The number of the latest grant or recall."""
        self._is_releasing_rest = False
        """Whether a task that releases the slots of ended processes is running."""

    def grow(self, grant: Grant) -> None:
        """Add workers in the granted slots as soon as possible. A repeated grant is ignored."""
        if grant.number > self._newest:
            self._newest = grant.number
            state = self._recovery.state
            self._recovery.state = replace(state, grants=(*state.grants, grant))

    def add_workers(self, grant: Grant) -> None:
        """Start workers in the slots of the first grant, and give them ranks once they are
        ready."""

        def is_done(_: asyncio.Task[None]) -> None:
            self._recovery.state = replace(self._recovery.state, is_adding_workers=False)

        state = self._recovery.state
        self._recovery.state = replace(state, grants=state.grants[1:], is_adding_workers=True)
        self._recovery.do(self._add_workers(grant)).add_done_callback(is_done)

    async def _add_workers(self, grant: Grant) -> None:
        try:
            newcomers = await self._start_newcomers(grant)
        except (*NOT_STARTED, CodeUnavailable, CodeUnfetchable, ValueError) as error:
            self._recovery.settled_command = grant.number
            self._recovery.report_size(f"could not add more slots ({error})")
            self._release_rest()
            return
        async with self._recovery.one_at_a_time:
            self._change_batch(grant)
            await self._recovery.observe()
            ranks, spares = self._ranks_and_spares(newcomers)
            for member in newcomers + ranks:
                member.is_spare = member in spares
            if spares and not ranks:
                self._recovery.report_size(f"adds {counted(len(spares), 'spare')}")
                return
            grows = f"grows by {len(ranks)}" if ranks else "continues with a different batch size"
            await self._recovery.resize(GroupChange(ready=ranks, how=grows))

    def _ranks_and_spares(self, newcomers: list[Member]) -> tuple[list[Member], list[Member]]:
        """Return the members that get a rank, and the newcomers that become spares. The first slots
        are for the group's ranks, and the remaining slots are for its spares. Spares only get ranks
        if the newcomers do not suffice for another replica of a divided model."""
        most, num_parts = self._traits.most_ranks, self._traits.mesh.num_parts
        if most is None:
            return newcomers, []
        present = [m for m in self._group.members if not m.is_spare and m not in newcomers]
        num_ranks = max(0, most - len(present))
        ranks, spares = newcomers[:num_ranks], newcomers[num_ranks:]
        ready = [member for member in self._group.spares if self._recovery.may_take_over(member)]
        num_missing = -(len(present) + len(ranks)) % num_parts
        if ranks and num_missing <= len(ready):
            ranks += ready[:num_missing]
        return ranks, spares

    async def _start_newcomers(self, grant: Grant) -> list[Member]:
        """Add members in the slots of the grant, and wait until the members are ready. If this
        fails, the slots are released. A grant without slots adds no members, because it only
        changes the batch size."""
        newcomers = []
        if grant.slices:
            newcomers = await self._preparation.add(grant.slices, self._recovery.state.round + 1)
            self._recovery.on_resize()
        self._recovery.settled_command = grant.number
        try:
            await self._preparation.until_ready(newcomers)
        except BaseException:
            await self._group.release_slots([m.slots for m in newcomers])
            raise
        return newcomers

    def recall(self, recall: Recall) -> None:
        """Release the recalled slots as soon as possible. A repeated recall is ignored."""
        if recall.number > self._newest:
            self._newest = recall.number
            self._recovery.do(self._release_slots(recall))

    async def _release_slots(self, recall: Recall) -> None:
        """Form a round without the workers in these slots, and end these workers. The other workers
        leave the current round between two steps, and need nothing from these workers."""
        async with self._recovery.one_at_a_time:
            held = [slots for slots in self._group.held if not slots.is_going]
            parts, least = [slots.part for slots in held], self._recovery.least
            going = [held[at] for at in recovery_rules.recalled(parts, recall.slices, least)]
            positions = self._recovery.positions
            while going and not positions.are_complete_without(going, self._group.members):
                going.pop()
            members = [member for member in self._group.members if member.slots in going]
            are_spares = all(member.is_spare for member in members)
            is_regrouping = self._recovery.state.regrouping is not None
            may_go = going and not is_regrouping
            may_go = may_go and (are_spares or await self._goes_on_without())
            self._recovery.settled_command = recall.number
            if not may_go:
                self._recovery.report_size("keeps its slots and continues")
                return
            self._change_batch(recall)
            num_before, spares_before = len(self._group.placed), len(self._group.spares)
            try:
                if are_spares:  # the group keeps its round
                    await self._group.release_slots(going)
                else:
                    await self._recovery.resize(GroupChange(leaving=members))
            finally:
                num_ranks = num_before - len(self._group.placed)
                num_spares = spares_before - len(self._group.spares)
                is_same_size = num_spares and not num_ranks  # spares may have taken ranks
                gone = counted(num_spares, "spare") if is_same_size else str(num_ranks)
                self._recovery.report_size(f"shrinks by {gone}")
                self._release_rest()

    async def _goes_on_without(self) -> bool:
        """Whether the group can form a round without some of its ranks."""
        if not self._traits.recovers_in_place or not await self._recovery.num_holders():
            return False
        if self._is_fixed and self._traits.mesh.num_parts > 1:
            return False  # the ranks do not agree after which step they leave
        if not self._traits.is_script:
            return True
        running = {(member.index, member.incarnation) for member in self._group.running}
        return recovery_rules.are_prepared(await self._nodes.observations(), running)

    def _change_batch(self, asked: Grant | Recall) -> None:
        """Starting with the next round, use the batch size of the grant or recall."""
        if asked.batch_size is not None:
            self._recovery.state = replace(self._recovery.state, batch_size=asked.batch_size)

    def _release_rest(self) -> None:
        """Schedule the release of slots whose processes have not ended yet."""
        if not self._is_releasing_rest and any(slots.is_going for slots in self._group.slots):
            self._is_releasing_rest = True
            self._recovery.do(self._release_rest_later())

    async def _release_rest_later(self) -> None:
        while any(slots.is_going for slots in self._group.slots):
            await asyncio.sleep(self._timings.release_rest_pause_s)
            try:
                was_released = await self._group.release_rest()
            except Exception:
                traceback.print_exc()  # for example, Ray is busy; the task tries again
                continue
            if was_released:
                self._recovery.report_size("released slots whose processes have ended")
        self._is_releasing_rest = False
