"""Starts processes for members of a group, and waits until the processes are ready to get a
rank."""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Awaitable, Callable, Collection, Sequence, Set

from ray.exceptions import RayActorError

from ray_workers.node import placement_groups
from ray_workers.node.forkserver.client import ForkFailed
from ray_workers.shared.heartbeat import RankPhase
from ray_workers.shared.processes.machine_speed import MachineSpeed
from ray_workers.shared.slices import Slice
from ray_workers.supervision.member import Member
from ray_workers.supervision.node_clients import NodeClients
from ray_workers.supervision.rules.recovery_rules import MOST_STARTS
from ray_workers.supervision.rules.timings import Timings
from ray_workers.supervision.slots import SlotsUnavailable
from ray_workers.supervision.worker_group import WorkerGroup

NOT_STARTED = (ForkFailed, RayActorError, SlotsUnavailable, TimeoutError)
"""Errors that are raised if a process can't be started."""


class Preparation:
    """Prepares members of a group for their next round."""

    def __init__(
        self,
        group: WorkerGroup,
        nodes: NodeClients,
        prepare: Callable[[Collection[str]], Awaitable[None]],
        speed: MachineSpeed,
        timings: Timings,
    ) -> None:
        """`prepare` is a function that prepares nodes for ranks, and can raise CodeUnavailable or
        CodeUnfetchable."""
        self._group = group
        self._nodes = nodes
        self._prepare = prepare
        self._speed = speed
        self._timings = timings

    async def dead_nodes(self, members: Sequence[Member] = ()) -> Set[str]:
        """Return the nodes of the group and of `members` that are dead. `members` can include
        members that have left the group."""
        alive = await asyncio.to_thread(placement_groups.alive_nodes)
        slots = [*self._group.slots, *(member.slots for member in members)]
        return {each.part.node_id for each in slots} - alive

    async def restart(self, members: Sequence[Member], round_number: int) -> Set[str]:
        """Start another process for each member, in up to MOST_STARTS attempts. Returns the nodes
        that turned out to be dead, or an empty set if all processes are running. Raises one of
        NOT_STARTED."""
        for _ in range(MOST_STARTS - 1):
            try:
                return await self._restart_once(members, round_number)
            except (ForkFailed, RayActorError):  # for example, it was killed while it was starting
                traceback.print_exc()
                members = [member for member in members if not member.is_running]
        return await self._restart_once(members, round_number)

    async def _restart_once(self, members: Sequence[Member], round_number: int) -> Set[str]:
        # If a process is still running, treat it as vanished: it did not become ready in time.
        vanished = any(m.is_running or m.has_vanished for m in members)
        starting = asyncio.ensure_future(self._group.replace(members, round_number))
        try:
            while not starting.done():
                await asyncio.wait({starting}, timeout=self._timings.dead_node_period_s)
                if vanished and not starting.done() and (dead := await self.dead_nodes(members)):
                    return dead
            await starting
        finally:
            starting.cancel()
        return set()

    async def restart_until_ready(self, member: Member, round_number: int) -> Set[str]:
        """Like `restart`, but make only one attempt, and wait until the process is ready to get a
        rank."""
        starting = self._restart_once([member], round_number)
        if dead := await self._speed.within(self._timings.replace_limit_s, starting):
            return dead
        await self.until_ready([member])
        return set()

    async def add(self, slices: Sequence[Slice], round_number: int) -> list[Member]:
        """Add members in these slots. If this fails, the slots are released, and one of
        NOT_STARTED, CodeUnavailable, CodeUnfetchable or ValueError is raised."""
        node_ids = [part.node_id for part in slices]
        await self._nodes.know(node_ids)
        await self._prepare(node_ids)
        # Limit the time, because a rank actor that is suspended while it is starting never
        # responds.
        limit_s = self._timings.grow_limit_s + self._timings.replace_limit_s
        return await self._speed.within(limit_s, self._group.add(slices, round_number))

    async def until_ready(self, members: Sequence[Member]) -> None:
        """Wait until all members are ready to get a rank. Raises ForkFailed or TimeoutError."""
        await self._speed.within(self._timings.ready_limit_s, self._until_ready(members))

    async def _until_ready(self, members: Sequence[Member]) -> None:
        waiting = {(member.index, member.incarnation) for member in members}
        while waiting:
            if not all(member.is_running for member in members):
                raise ForkFailed("a new worker exited before it was ready")
            await asyncio.sleep(self._timings.ready_period_s)
            for observation in await self._nodes.observations():
                if observation.status.phase is RankPhase.STANDBY:
                    waiting.discard((observation.rank, observation.incarnation))
