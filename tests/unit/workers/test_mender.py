"""A group that is being mended is given its time, and brought together until it is whole."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ray_workers.shared.contracts import Slice
from ray_workers.shared.heartbeat import RankObservation, RankPhase, RankStatus, TimeCategory
from ray_workers.shared.machine_pace import MachinePace
from ray_workers.supervision import group_monitor as guarding
from ray_workers.supervision.failure_attribution import RankExit
from ray_workers.supervision.fault_injection import FaultInjector
from ray_workers.supervision.group_monitor import GroupMonitor
from ray_workers.supervision.recovery import WHOLE_LIMIT_S, RecoveryController
from ray_workers.supervision.reporter import Reporter
from tests.wire import attempt_spec

pytestmark = pytest.mark.anyio

PATIENCE_S = 60.0
SPEC = attempt_spec(
    spec={"recipe": "image_classification", "resources": {"num_workers": 2}},
    slices=(Slice("n", 2),),
    recovers_in_place=True,
)


class Nodes:
    """Where nothing can be seen but what a test says."""

    def __init__(self) -> None:
        self.seen: list[Any] = []
        self.killed: list[int] = []

    async def know(self, node_ids: Any) -> None:
        pass

    async def observations(self) -> list[Any]:
        return self.seen

    async def errors(self) -> dict[int, Any]:
        return {}

    async def stacks(self, seats: Any) -> dict[int, str]:
        return {}

    async def signal(self, node_id: str, seat: int, number: int) -> bool:
        self.killed.append(seat)
        return True

    def forget(self, node_ids: Any) -> None:
        assert not node_ids


class SlowGroup:
    """Rank 1 of two is lost, and its replacement takes as long as the test wants."""

    def __init__(self) -> None:
        self.lost = SimpleNamespace(seat=1, incarnation=0, rank=1, end=RankExit(1, -9))
        survivor = SimpleNamespace(seat=0, incarnation=0, rank=0, end=RankExit(0, -9), node_id="n")
        self.running = [survivor]
        self.placed = [survivor, self.lost]
        self.slots: list[Any] = []
        self.asked = asyncio.Event()
        self.replaced = asyncio.Event()
        self.announced: list[int] = []

    async def lose_nodes(self, node_ids: Any) -> list[Any]:
        return []

    async def replace(self, members: Any, generation: int) -> None:
        self.asked.set()
        await self.replaced.wait()
        self.running = self.placed

    async def announce(self, generation: int) -> None:
        self.announced.append(generation)

    async def store_is_lost(self) -> None:
        await asyncio.Event().wait()


@pytest.mark.parametrize("slowness", [1.0, 20.0])
async def test_a_replacement_that_is_not_there_yet_is_not_overdue(
    tmp_path: Path, slowness: float
) -> None:
    hands = SimpleNamespace(now=0.0)
    pace = MachinePace(lambda: hands.now)
    pace.learn(slowness)
    reporter = Reporter(tmp_path / "spool", 1 << 20)
    group = SlowGroup()
    nodes: Any = Nodes()
    told: tuple[Any, Any, Reporter, FaultInjector] = (
        group,
        nodes,
        reporter,
        FaultInjector(reporter),
    )
    recovery = RecoveryController(SPEC, *told, lambda: None, pace)
    lost: Any = group.lost
    mending = asyncio.ensure_future(recovery.mend([lost], code="killed"))
    await asyncio.wait_for(group.asked.wait(), PATIENCE_S)
    assert await recovery.look([]) is None
    group.replaced.set()
    assert await mending
    assert group.announced == [1]
    assert await recovery.look([]) is None
    hands.now += slowness * (WHOLE_LIMIT_S - 1)
    assert await recovery.look([]) is None
    assert pace.overrun == 1.0
    hands.now += slowness * 2
    outcome = await recovery.look([])
    assert outcome is not None
    assert "not whole again" in outcome.message
    assert pace.overrun == slowness


async def test_a_next_group_that_could_not_be_formed_is_followed_by_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guarding, "STRAY_S", 0.05)
    group, nodes = SlowGroup(), Nodes()
    recovery, watching = await _watched_and_mended(group, nodes, tmp_path)
    nodes.seen = [_observation(0, generation=0), _observation(1, generation=0)]

    while group.announced != [1, 2]:
        await asyncio.sleep(0.01)
    nodes.seen = [
        _observation(rank, generation=2, phase=RankPhase.COMPUTE, first_at=1.0) for rank in (0, 1)
    ]
    while recovery.regrouping is not None:
        await asyncio.sleep(0.01)
    assert group.announced == [1, 2]

    nodes.seen = [_observation(rank, generation=2) for rank in (0, 1)]  # and it is over, in the end
    outcome = await asyncio.wait_for(watching, PATIENCE_S)
    assert outcome is not None
    assert "could not be brought together again" in outcome.message
    assert group.announced == [1, 2, 3, 4, 5]


async def test_who_is_not_told_that_its_connection_broke_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guarding, "SEVERING_S", 0.05)
    group, nodes = SlowGroup(), Nodes()
    recovery, watching = await _watched_and_mended(group, nodes, tmp_path)
    newcomer = _observation(1, phase=RankPhase.JOINING, age_s=10.0)
    nodes.seen = [_observation(0, phase=RankPhase.EXCHANGE, age_s=3.0), newcomer]
    await asyncio.sleep(0.2)
    assert nodes.killed == [], "it may still be computing"
    nodes.seen = [_observation(0, phase=RankPhase.EXCHANGE, age_s=100.0), newcomer]
    while nodes.killed != [0]:
        await asyncio.sleep(0.01)
    nodes.seen = []
    group.placed[0].exit.set_result(group.placed[0].end)
    assert await asyncio.wait_for(watching, PATIENCE_S) is None, "the only one that held the state"
    assert recovery.generation == 1


async def _watched_and_mended(
    group: SlowGroup, nodes: Nodes, folder: Path
) -> tuple[RecoveryController, asyncio.Future[Any]]:
    """A group that has just been told its next generation, and the guard that watches it."""
    reporter = Reporter(folder / "spool", 1 << 20)
    ends = [asyncio.get_running_loop().create_future() for _ in group.placed]
    for member, end in zip(group.placed, ends, strict=True):
        member.exit = end
    parts: tuple[Any, Any, Reporter, FaultInjector] = (
        group,
        nodes,
        reporter,
        FaultInjector(reporter),
    )
    pace = MachinePace()
    recovery = RecoveryController(SPEC, *parts, lambda: None, pace)
    watching = asyncio.ensure_future(GroupMonitor(SPEC, *parts, recovery, pace).watch())
    lost: Any = group.lost
    group.replaced.set()
    nodes.seen = [_observation(0, phase=RankPhase.EXCHANGE)]
    assert await recovery.mend([lost], code="killed")
    return recovery, watching


def _observation(
    rank: int,
    *,
    generation: int = 0,
    phase: RankPhase = RankPhase.STAND_BY,
    first_at: float = 0.0,
    age_s: float = 1.0,
) -> RankObservation:
    """A process that has done five steps; `first_at` of its first one in this generation."""
    look = RankStatus(
        5, phase, 0, 0.0, generation, 4, first_at, 100 + rank, TimeCategory.RECOVERING, {}
    )
    return RankObservation(rank, 0, look, age_s, "S")
