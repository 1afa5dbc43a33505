"""A group that is being mended is given its time."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ray_workers.contracts import AttemptSpec, Slice
from ray_workers.drills import Drills
from ray_workers.mender import WHOLE_LIMIT_S, Mender
from ray_workers.telling import Teller
from ray_workers.verdict import RankExit

pytestmark = pytest.mark.anyio

SPEC = AttemptSpec(
    deployment_id="d",
    job_id="j",
    attempt=1,
    spec={"recipe": "image_classification", "resources": {"num_workers": 2}},
    slices=(Slice("n", 2),),
    bundle={"CPU": 1.0},
    storage_url="file:///nowhere",
)


class Nodes:
    """Where nothing can be seen."""

    async def sights(self) -> list[Any]:
        return []

    async def errors(self) -> dict[int, Any]:
        return {}

    def forget(self, node_ids: Any) -> None:
        assert not node_ids


class SlowGroup:
    """Rank 1 of two is lost, and its replacement takes as long as the test wants."""

    def __init__(self) -> None:
        self.lost = SimpleNamespace(seat=1, incarnation=0, rank=1, end=RankExit(1, -9))
        survivor = SimpleNamespace(seat=0, incarnation=0, rank=0)
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


async def test_a_replacement_that_is_not_there_yet_is_not_overdue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    teller = Teller(tmp_path / "spool", 1 << 20)
    group = SlowGroup()
    nodes: Any = Nodes()
    mender = Mender(SPEC, group, nodes, teller, Drills(teller), lambda: None)  # type: ignore[arg-type]
    lost: Any = group.lost
    mending = asyncio.ensure_future(mender.mend([lost], code="killed"))
    await asyncio.wait_for(group.asked.wait(), 10)
    assert await mender.look([]) is None
    group.replaced.set()
    assert await mending
    assert group.announced == [1]
    assert await mender.look([]) is None
    later = time.monotonic() + WHOLE_LIMIT_S + 1
    monkeypatch.setattr(time, "monotonic", lambda: later)
    outcome = await mender.look([])
    assert outcome is not None
    assert "not whole again" in outcome.message
