"""Recovering groups, simulated by a test, and the nodes that observe them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence, Set
from dataclasses import replace
from typing import Any

import pytest

from ray_workers.node import placement_groups
from ray_workers.shared.contracts import AttemptSpec, Frame, Outcome
from ray_workers.shared.heartbeat import RankPhase
from ray_workers.shared.processes.machine_speed import MachineSpeed
from ray_workers.shared.slices import Slice
from ray_workers.shared.supervisor_frames import LossKind
from ray_workers.supervision.fault_injection import FaultInjector
from ray_workers.supervision.group_monitor import GroupMonitor
from ray_workers.supervision.member import Member
from ray_workers.supervision.preparation import Preparation
from ray_workers.supervision.recovery import RecoveryController
from ray_workers.supervision.resizing import Resizing
from ray_workers.supervision.rules.failure_attribution import RankExit
from ray_workers.supervision.rules.timings import Timings
from ray_workers.supervision.slots import Slots, SlotsUnavailable
from ray_workers.supervision.spares import Spares
from ray_workers.supervision.worker_group import WorkerGroup
from tests.unit.workers.supervision.observed import Reports, observation
from tests.wire import attempt_spec, traits

PATIENCE_S = 60.0
SPEC = attempt_spec(
    spec={"recipe": "image_classification", "resources": {"num_workers": 2}},
    slices=(Slice("n", 2),),
)


def of(document: dict[str, Any]) -> AttemptSpec:
    """The spec of the same attempt, of another job."""
    return replace(SPEC, spec=document, traits=traits(document))


QUICK = Timings(
    look_period_s=0.001,
    quick_look_period_s=0.001,
    ask_again_pause_s=0.001,
    release_rest_pause_s=0.001,
    dead_node_period_s=0.001,
)


class Nodes:
    """Observations that a test sets."""

    def __init__(self) -> None:
        self.seen: list[Any] = []
        self.killed: list[int] = []
        self.left: list[Frame] = []
        """ERROR frames."""
        self.num_observed = 0

    async def know(self, node_ids: Any) -> None:
        pass

    async def observations(self) -> list[Any]:
        self.num_observed += 1
        return self.seen

    async def errors(self) -> list[Frame]:
        return self.left

    async def stacks(self, indices: Any) -> dict[int, str]:
        return {}

    async def signal(self, node_id: str, index: int, number: int) -> bool:
        self.killed.append(index)
        return True

    def forget(self, node_ids: Any) -> None:
        pass


ON_M = (Slice("m", 1),)


def member_of(index: int, node_id: str = "n") -> Member:
    slots: Any = Slots(Slice(node_id, 1), None, {})  # type: ignore[arg-type]
    exit_: Any = asyncio.get_running_loop().create_future()
    return Member(index, index, 0, 0, slots, 0, 1, None, exit=exit_)


def ends(member: Member, code: int | None = -9) -> None:
    if member.exit is not None and not member.exit.done():
        member.exit.set_result(RankExit.of(member.rank, code))


class SlowGroup(WorkerGroup):
    """A group that has lost a rank; the test decides how long its replacement takes."""

    def __init__(self, num_ranks: int = 2, lost: int | None = 1) -> None:
        """lost: None for a complete group."""
        super().__init__(SPEC, "n", "127.0.0.1", MachineSpeed(), QUICK)
        self.members = [member_of(index) for index in range(num_ranks)]
        if lost is not None:
            self.lost = self.members[lost]
            ends(self.lost)
        self.asked = asyncio.Event()
        self.replaced = asyncio.Event()
        self.announced: list[int] = []
        self.indices: list[list[int]] = []
        """The members of each announced round, by rank."""
        self.batch_sizes: list[int | None] = []
        self.adds: asyncio.Event | None = None
        """The event for which new slots wait; None if Ray has no free slots."""

    def vanish(self, *members: Member, monkeypatch: pytest.MonkeyPatch) -> None:
        """These members are lost with their node."""
        for member in members:
            member.slots.part = Slice("dead", 1)
            member.exit = asyncio.get_running_loop().create_future()
            ends(member, None)
        self.slots[:] = [member.slots for member in self.members]
        monkeypatch.setattr(placement_groups, "alive_nodes", lambda: {"n"})

    async def lose_nodes(self, node_ids: Set[str]) -> list[Member]:
        gone = [member for member in self.members if member.node_id in node_ids]
        self.members = [member for member in self.members if member not in gone]
        for member in gone:
            ends(member, None)
        return gone

    async def replace(self, members: Sequence[Member], round_number: int) -> None:
        self.asked.set()
        await self.replaced.wait()
        for member in members:
            member.exit = asyncio.get_running_loop().create_future()

    async def announce(
        self, round_number: int, members: Sequence[Member], batch_size: int | None
    ) -> None:
        self.announced.append(round_number)
        self.indices.append([member.index for member in members])
        self.batch_sizes.append(batch_size)
        for rank, member in enumerate(members):
            member.rank = rank

    async def add(self, slices: Sequence[Slice], round_number: int) -> list[Member]:
        if self.adds is None:
            raise SlotsUnavailable
        await self.adds.wait()
        return []

    async def store_is_lost(self) -> Outcome:
        await asyncio.Event().wait()
        raise AssertionError("the store is never lost")


def recovery_of(
    parts: Any, prepare: Any, speed: MachineSpeed, timings: Timings
) -> tuple[RecoveryController, Resizing, Spares]:
    """parts: the attempt's spec, its group, nodes and reporter."""
    spec, group, nodes, _ = parts
    starts = Preparation(group, nodes, prepare, speed, timings)
    recovery = RecoveryController(*parts, lambda: None, starts, speed, timings)
    resizing = Resizing(spec, group, nodes, recovery, starts, timings)
    return recovery, resizing, Spares(*parts, recovery, starts, speed, timings)


class Recovering:
    """A group that has just lost rank 1, and the monitor that watches it."""

    def __init__(
        self, slowness: float = 1.0, spec: AttemptSpec = SPEC, group: SlowGroup | None = None
    ) -> None:
        self.now = 0.0
        self.speed = MachineSpeed(lambda: self.now)
        self.speed.learn(slowness)
        self.group = SlowGroup() if group is None else group
        self.nodes, self.reports = Nodes(), Reports()
        self.prepared: list[list[str]] = []
        self.unprepared: Exception | None = None
        parts: Any = (spec, self.group, self.nodes, self.reports)
        changes = recovery_of(parts, self.prepare, self.speed, QUICK)
        self.recovery, self.resizing, self.spares = changes
        drills = FaultInjector(parts[-1])
        self.monitor = GroupMonitor(*parts, drills, *changes, self.speed, QUICK)

    async def prepare(self, node_ids: Any) -> None:
        self.prepared.append(list(node_ids))
        if self.unprepared is not None:
            raise self.unprepared

    async def recover(self, lost: Any = None) -> bool:
        lost = self.group.lost if lost is None else lost
        return await self.recovery.recover([lost], kind=LossKind.KILLED, began_at=5.0)

    def watch(self) -> asyncio.Future[Any]:
        return asyncio.ensure_future(self.monitor.watch())

    async def until(self, probe: Callable[[], bool]) -> None:
        """Let time pass until this is true."""
        async with asyncio.timeout(PATIENCE_S):
            while not probe():
                self.now += 0.1
                await asyncio.sleep(0.001)


def stands_by(rank: int, *, round_number: int = 0, incarnation: int = 0) -> Any:
    return observation(
        *(rank, RankPhase.STANDBY),
        round_number=round_number,
        incarnation=incarnation,
        first_at=0.0,
    )


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not holds():
            await asyncio.sleep(0.001)
