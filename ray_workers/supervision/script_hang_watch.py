"""Detects hangs of scripts, whose ranks do not report phases."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from ray_workers.shared.contracts import AttemptSpec
from ray_workers.shared.heartbeat import RankObservation
from ray_workers.shared.processes.machine_speed import MachineSpeed
from ray_workers.supervision.node_clients import NodeClients
from ray_workers.supervision.rules import script_hangs
from ray_workers.supervision.rules.hang_detector import Hang
from ray_workers.supervision.rules.script_hangs import ScriptLook, ScriptMemory, Signs
from ray_workers.supervision.rules.timings import Timings
from ray_workers.supervision.worker_group import WorkerGroup


class ScriptHangWatch:
    """Periodically observes the ranks of a script, following the rules in `script_hangs`."""

    def __init__(
        self,
        spec: AttemptSpec,
        group: WorkerGroup,
        nodes: NodeClients,
        speed: MachineSpeed,
        timings: Timings,
        *,
        newest: Callable[[], list[RankObservation]],
        is_expected_to_stand: Callable[[], bool],
    ) -> None:
        """`newest` returns the latest observations of the ranks. `is_expected_to_stand` returns
        whether the ranks wait for each other because of a recovery."""
        self._group = group
        self._nodes = nodes
        self._speed = speed
        self._timings = timings
        self._limit_s = spec.traits.hang_limit_s
        self._newest = newest
        self._is_expected_to_stand = is_expected_to_stand
        self._memory = ScriptMemory()

    async def next(self) -> tuple[Hang, Sequence[RankObservation]]:
        """Wait for the next hang, and return the hang with the observations of the ranks."""
        while True:
            await asyncio.sleep(self._timings.script_look_period_s)
            look = None if self._is_expected_to_stand() else await self._look()
            if look is None:
                self._memory = ScriptMemory()
                continue
            self._memory = self._memory.after(look)
            signs = script_hangs.signs_of(self._memory, self._limit_s, self._timings)
            if not signs.is_suspect:
                continue
            hang = await self._judge(look, signs)
            if hang is not None:
                return hang, look.ranks
            await asyncio.sleep(signs.limit_s / 4)  # a single sign can last for hours

    async def _look(self) -> ScriptLook | None:
        """Observe the ranks. Returns None if a rank was not observed or is starting."""
        activity = await self._nodes.activity()
        ranks = tuple(self._newest())
        if not ranks or len(ranks) != len(self._group.placed):
            return None
        own = {(m.index, m.incarnation): m.rank for m in self._group.running}
        done = {own[key]: each for key, each in activity.items() if key in own}
        return ScriptLook(self._speed.time(), ranks, done)

    async def _judge(self, look: ScriptLook, signs: Signs) -> Hang | None:
        """Return the hang if there are enough signs; otherwise, None. This method reads the stacks
        of all ranks twice."""
        earlier = await self._stacks_by_rank()
        has_reported = any(one.status.first_at for one in look.ranks)
        has_limit = self._limit_s is not None
        if has_limit and script_hangs.is_over_limit(signs, has_reported=has_reported):
            return script_hangs.blame(look, signs, earlier)
        if not script_hangs.is_worth_a_second_look(signs, earlier):
            return None
        await asyncio.sleep(self._timings.script_stacks_apart_s)
        now = await self._look()
        if (
            now is None
            or not script_hangs.same_processes(look.ranks, now.ranks)
            or any(
                one.status.since != other.status.since
                for one, other in zip(look.ranks, now.ranks, strict=True)
            )
        ):
            return None  # a rank reported or was replaced
        idle = script_hangs.idle_ranks(look, now)
        return script_hangs.hang_of(look, signs, earlier, await self._stacks_by_rank(), idle)

    async def _stacks_by_rank(self) -> dict[int, str]:
        rank_of = {member.index: member.rank for member in self._group.running}
        stacks = await self._nodes.stacks(list(rank_of))
        return {rank_of[index]: text for index, text in stacks.items() if index in rank_of}
