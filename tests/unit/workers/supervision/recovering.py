"""Groups that recover, played by a test, and the nodes that observe them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from ray_workers.shared.contracts import AttemptSpec, Frame, Slice
from ray_workers.shared.frames import LossKind
from ray_workers.shared.heartbeat import RankPhase
from ray_workers.shared.processes.machine_pace import MachinePace
from ray_workers.supervision.fault_injection import FaultInjector
from ray_workers.supervision.group_monitor import GroupMonitor
from ray_workers.supervision.recovery import RecoveryController
from ray_workers.supervision.rules.failure_attribution import RankExit
from ray_workers.supervision.rules.timings import Timings
from ray_workers.supervision.slots import SlotsUnavailable
from tests.unit.workers.supervision.observed import Reports, observation
from tests.wire import attempt_spec, traits

PATIENCE_S = 60.0
SPEC = attempt_spec(
    spec={"recipe": "image_classification", "resources": {"num_workers": 2}},
    slices=(Slice("n", 2),),
)


def of(document: dict[str, Any]) -> AttemptSpec:
    """The same attempt of another job."""
    return replace(SPEC, spec=document, traits=traits(document))


QUICK = Timings(
    look_period_s=0.001,
    quick_look_period_s=0.001,
    ask_again_pause_s=0.001,
    give_back_pause_s=0.001,
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

    async def stacks(self, seats: Any) -> dict[int, str]:
        return {}

    async def signal(self, node_id: str, seat: int, number: int) -> bool:
        self.killed.append(seat)
        return True

    def forget(self, node_ids: Any) -> None:
        pass


ON_M = (Slice("m", 1),)


class SlowGroup:
    """A group whose rank 1 of two is lost; its replacement takes as long as the test wants."""

    def __init__(self) -> None:
        lost, survivor = (
            SimpleNamespace(
                seat=seat,
                incarnation=0,
                rank=seat,
                node_id="n",
                end=RankExit.of(seat, -9),
                exit=asyncio.get_running_loop().create_future(),
                is_running=seat == 0,
            )
            for seat in (1, 0)
        )
        self.lost: Any = lost
        self.running = [survivor]
        self.placed = [survivor, lost]
        self.slots: list[Any] = []
        self.lost_with_nodes: list[Any] = []
        self.asked = asyncio.Event()
        self.replaced = asyncio.Event()
        self.announced: list[int] = []
        self.batch_sizes: list[int | None] = []
        self.adds: asyncio.Event | None = None
        """What new slots wait for; None if Ray has none to give."""

    def ended(self) -> list[RankExit]:
        return [member.end for member in self.placed if member not in self.running]

    async def lose_nodes(self, node_ids: Any) -> list[Any]:
        return self.lost_with_nodes

    async def replace(self, members: Any, round_number: int) -> None:
        self.asked.set()
        await self.replaced.wait()
        self.running = self.placed

    async def announce(self, round_number: int, batch_size: int | None) -> None:
        self.announced.append(round_number)
        self.batch_sizes.append(batch_size)

    async def add(self, slices: Any, round_number: int) -> None:
        if self.adds is None:
            raise SlotsUnavailable
        await self.adds.wait()

    async def store_is_lost(self) -> None:
        await asyncio.Event().wait()


class Recovering:
    """A group that has just lost rank 1, and the monitor that watches it."""

    def __init__(
        self, slowness: float = 1.0, spec: AttemptSpec = SPEC, group: SlowGroup | None = None
    ) -> None:
        self.now = 0.0
        self.pace = MachinePace(lambda: self.now)
        self.pace.learn(slowness)
        self.group = SlowGroup() if group is None else group
        self.nodes, self.reports = Nodes(), Reports()
        self.prepared: list[list[str]] = []
        self.unprepared: Exception | None = None
        parts: Any = (spec, self.group, self.nodes, self.reports)
        self.recovery = RecoveryController(*parts, lambda: None, self.prepare, self.pace, QUICK)
        drills: Any = FaultInjector(parts[-1])
        self.monitor = GroupMonitor(*parts, drills, self.recovery, self.pace, QUICK)

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
        """Time passes until it is so."""
        async with asyncio.timeout(PATIENCE_S):
            while not probe():
                self.now += 0.1
                await asyncio.sleep(0.001)


def stands_by(rank: int, *, round_number: int = 0, incarnation: int = 0) -> Any:
    return observation(
        *(rank, RankPhase.STAND_BY),
        round_number=round_number,
        incarnation=incarnation,
        first_at=0.0,
    )


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not holds():
            await asyncio.sleep(0.001)
