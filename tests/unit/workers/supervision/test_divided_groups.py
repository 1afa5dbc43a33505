"""Groups that divide a model into replicas, after the loss of a node and after a recall."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from ray_workers.node.forkserver.client import ForkFailed
from ray_workers.shared.commands import Recall
from ray_workers.shared.heartbeat import RankPhase
from ray_workers.shared.slices import Slice
from ray_workers.shared.supervisor_frames import LossKind
from ray_workers.supervision.member import GroupChange
from ray_workers.supervision.slots import Slots
from tests.unit.workers.supervision.observed import observation
from tests.unit.workers.supervision.recovering import (
    QUICK,
    Recovering,
    SlowGroup,
    ends,
    member_of,
    of,
    stands_by,
    until,
)

DOCUMENT: dict[str, Any] = {
    "recipe": "image_classification",
    "resources": {"num_workers": 8},
    "parallel": {"shard": 2},
}


def divided(*slices: Slice, min_workers: int | None = 2) -> Any:
    return replace(of(DOCUMENT), slices=slices, min_workers=min_workers)


def without_rank_1(monkeypatch: pytest.MonkeyPatch, min_workers: int | None) -> Recovering:
    """Two replicas of two workers, of which rank 1 is lost with its node."""
    job = Recovering(
        spec=divided(Slice("n", 3), Slice("dead", 1), min_workers=min_workers), group=SlowGroup(4)
    )
    job.group.vanish(job.group.lost, monkeypatch=monkeypatch)
    job.group.replaced.set()
    return job


async def test_complete_replicas_continue_and_the_rest_joins_the_next_newcomer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job = without_rank_1(monkeypatch, 2)
    assert await job.recover()
    job.nodes.seen = [stands_by(0)]
    assert job.group.indices == [[2, 3]]
    _, report = job.reports.all[-1]
    assert (report["world_size"], report["lacking"]) == (2, 0)
    assert "leaves 1 idle until there are enough for another replica" in report["message"]
    newcomer = member_of(4)
    newcomer.is_placed = False
    job.group.members.append(newcomer)
    await job.recovery.resize(GroupChange(ready=[newcomer], how="grows by 1"))
    assert job.group.indices[-1] == [2, 3, 0, 4]
    _, report = job.reports.all[-1]
    assert report["message"] == "grows by 1: 4 workers"


async def test_an_idle_worker_that_has_exited_does_not_join(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job = without_rank_1(monkeypatch, 2)
    assert await job.recover()
    ends(next(member for member in job.group.members if member.index == 0))
    newcomer = member_of(4)
    newcomer.is_placed = False
    job.group.members.append(newcomer)
    await job.recovery.resize(GroupChange(ready=[newcomer]))
    assert job.group.indices[-1] == [2, 3]


@pytest.mark.parametrize(
    ("idle", "joins"),
    [
        ({}, True),
        ({"phase": RankPhase.COMPUTE, "age_s": 60.0}, True),
        ({"state": "T"}, False),
        ({"phase": RankPhase.COMPUTE, "state": "T"}, False),
        ({"age_s": QUICK.spare_limit_s + 1.0}, False),
        (None, False),
    ],
    ids=["waiting", "leaving", "suspended", "suspended while leaving", "hanging", "unobserved"],
)
async def test_an_idle_worker_gets_a_rank_only_if_it_responds_when_the_group_grows(
    idle: dict[str, Any] | None, joins: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise, it is restarted, and joins with the newcomer, which waits for it without a
    rank."""
    job = without_rank_1(monkeypatch, 2)
    assert await job.recover()
    job.recovery.confirm([])
    member = next(one for one in job.group.members if one.index == 0)
    page = {"phase": RankPhase.STANDBY, "first_at": 0.0, **(idle or {})}
    job.nodes.seen = [] if idle is None else [observation(0, **page)]
    job.group.asked.clear()
    newcomer = member_of(4)
    newcomer.is_placed = False
    job.group.members.append(newcomer)
    await job.recovery.resize(GroupChange(ready=[newcomer], how="grows by 1"))
    assert job.group.indices[-1] == ([2, 3, 0, 4] if joins else [2, 3])
    job.nodes.seen = [stands_by(0), stands_by(4)]
    await until(
        lambda: job.group.indices[-1] == [2, 3, 0, 4] or job.group.indices[-1][2:] == [4, 0]
    )
    assert job.group.asked.is_set() == (not joins), "its process was started anew"
    assert member.is_placed
    await job.recovery.stop()


@pytest.mark.parametrize("is_ready", [True, False])
async def test_an_idle_worker_that_has_exited_is_restarted_and_joins_once_it_is_ready(
    is_ready: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = without_rank_1(monkeypatch, 2)
    assert await job.recover()
    job.recovery.confirm([])
    idle = next(member for member in job.group.members if member.index == 0)
    ends(idle)
    job.spares.look([])
    job.spares.look([])
    await until(lambda: idle.is_running)
    if is_ready:
        job.nodes.seen = [stands_by(0)]
        await until(lambda: not job.recovery._rejoining)
    assert job.group.indices == [[2, 3]], "the others train on"
    newcomer = member_of(4)
    newcomer.is_placed = False
    job.group.members.append(newcomer)
    await job.recovery.resize(GroupChange(ready=[newcomer]))
    assert job.group.indices[-1] == ([2, 3, 0, 4] if is_ready else [2, 3])
    await job.recovery.stop()


async def test_an_idle_worker_that_can_not_be_restarted_is_reported_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job = without_rank_1(monkeypatch, 2)
    assert await job.recover()
    job.recovery.confirm([])
    ends(next(member for member in job.group.members if member.index == 0))

    async def fails(members: object, round_number: int) -> None:
        raise ForkFailed("it did not start")

    monkeypatch.setattr(job.group, "replace", fails)
    num = len(job.reports.all)
    job.spares.look([])
    await until(lambda: len(job.reports.all) > num)
    job.spares.look([])
    await asyncio.sleep(0)
    assert not job.recovery._rejoining
    _, report = job.reports.all[-1]
    assert report["message"].startswith("continues without a lost worker, whose process can't")


async def test_a_group_of_fixed_size_waits_and_the_newcomer_gets_the_lost_part(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Otherwise, workers 2 and 3 would be ranks 1 and 2, and would have each other's part."""
    job = without_rank_1(monkeypatch, None)
    assert await job.recover()
    assert job.group.indices == [], "it waits"
    newcomer = member_of(4)
    newcomer.is_placed = False
    job.group.members.append(newcomer)
    await job.recovery.resize(GroupChange(ready=[newcomer]))
    assert job.group.indices == [[0, 4, 2, 3]]


async def test_a_second_loss_before_the_round_is_formed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers 0 and 1 are lost one after the other, and their processes are replaced."""
    job = Recovering(spec=divided(Slice("n", 4)), group=SlowGroup(4))
    job.group.replaced.set()
    assert await job.recover()
    assert job.group.indices == [[0, 1, 2, 3]]
    ends(job.group.members[0])
    assert await job.recovery.recover([job.group.members[0]], kind=LossKind.KILLED, began_at=6.0)
    assert job.group.indices[-1] == [0, 1, 2, 3]


class SlicedGroup(SlowGroup):
    """A whole group of eight workers in four slices."""

    def __init__(self) -> None:
        super().__init__(8, lost=None)
        parts = [Slice(f"n{at}", 2) for at in range(4)]
        self.slots[:] = [Slots(part, None, {}) for part in parts]  # type: ignore[arg-type]
        for member in self.members:
            member.slots = self.slots[member.index // 2]
        self.ended: list[str] = []

    async def release_slots(self, slots: Any) -> None:
        self.members = [member for member in self.members if member.slots not in slots]
        self.ended += [each.part.node_id for each in slots]
        self.slots[:] = [each for each in self.slots if each not in slots]

    async def release_rest(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("asked", "released"),
    [
        ((2, 3), ["n2", "n3"]),
        ((0, 3), ["n0", "n3"]),
        ((1, 3), []),  # parts 2 and 3 of both replicas
        ((3,), []),  # two workers would be left over
    ],
)
async def test_slots_are_released_only_if_whole_replicas_with_all_parts_are_left(
    asked: tuple[int, ...], released: list[str]
) -> None:
    """Two replicas of four workers, each on two nodes."""
    document = DOCUMENT | {"parallel": {"shard": 4}}
    group = SlicedGroup()
    slices = tuple(each.part for each in group.slots)
    spec = replace(of(document), slices=slices, min_workers=4)
    job = Recovering(spec=spec, group=group)
    job.nodes.seen = [observation(index) for index in range(8)]
    job.resizing.recall(Recall(1, tuple(slices[at] for at in asked), None))
    await until(lambda: bool(job.reports.all))
    await asyncio.sleep(0)
    assert sorted(group.ended) == released
    _, report = job.reports.all[-1]
    assert report["world_size"] == (4 if released else 8)
    if asked == (0, 3):
        assert group.indices[-1] == [4, 5, 2, 3], "each worker keeps its part"
