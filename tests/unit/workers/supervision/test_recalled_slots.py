"""Slots that a group is asked to release, and batch sizes that come with the request."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from ray_workers.shared.commands import Grant, Recall
from ray_workers.shared.contracts import FrameKind
from ray_workers.shared.slices import Slice
from ray_workers.shared.supervisor_frames import LossKind
from ray_workers.supervision.member import Member
from ray_workers.supervision.slots import Slots
from tests.unit.workers.supervision.observed import Reports, observation
from tests.unit.workers.supervision.recovering import (
    ON_M,
    PATIENCE_S,
    SPEC,
    Recovering,
    SlowGroup,
    member_of,
    until,
)
from tests.wire import traits


class SpreadGroup(SlowGroup):
    """A whole group of three workers in two slices."""

    def __init__(self) -> None:
        super().__init__(3)
        parts = (Slice("n", 2), Slice("m", 1))
        self.slots[:] = [Slots(part, None, {}) for part in parts]  # type: ignore[arg-type]
        self.members = [member_of(index) for index in range(3)]
        for member in self.members:
            member.slots = self.slots[member.index // 2]
        self.events: list[Any] = []
        self.stuck = asyncio.Event()
        """Whether processes that were ended are gone."""
        self.stuck.set()

    async def announce(
        self, round_number: int, members: Sequence[Member], batch_size: int | None
    ) -> None:
        await super().announce(round_number, members, batch_size)
        self.events.append(("announced to", self.indices[-1]))

    async def release_slots(self, slots: Sequence[Slots]) -> None:
        self.members = [member for member in self.members if member.slots not in slots]
        self.events.append(("ended in", [each.part for each in slots]))
        for each in slots:
            each.is_going = True
        if self.stuck.is_set():
            await self.release_rest()

    async def release_rest(self) -> bool:
        await self.stuck.wait()
        self.slots[:] = [each for each in self.slots if not each.is_going]
        return True


def spread(seen: Sequence[Any] = (), **spec: Any) -> tuple[Recovering, SpreadGroup, Reports]:
    """seen: observations of the ranks."""
    group = SpreadGroup()
    slices = tuple(each.part for each in group.slots)
    elastic = replace(SPEC, **{"slices": slices, "min_workers": 1, **spec})
    job = Recovering(spec=elastic, group=group)
    job.nodes.seen = list(seen)
    job.unprepared = AssertionError("nothing starts")
    return job, group, job.reports


async def settled(reports: Reports) -> Any:
    await until(lambda: bool(reports.all))
    return reports.all[-1]


async def test_slots_that_are_asked_back_go_once_the_others_know_of_a_round_without_them() -> None:
    job, group, reports = spread()
    job.resizing.recall(Recall(1, (Slice("n", 2),), None))
    job.resizing.recall(Recall(1, ON_M, None))
    kind, body = await settled(reports)
    assert kind is FrameKind.RESIZED
    assert group.events == [("announced to", [2]), ("ended in", [Slice("n", 2)])]
    assert (body["world_size"], body["grants"], body["lacking"]) == (1, 1, 0)
    assert body["slices"] == [{"node_id": "m", "num_workers": 1}]
    assert job.recovery.state.regrouping is not None


async def test_the_batch_of_a_recall_is_announced_with_its_round_and_all_later_ones() -> None:
    job, group, reports = spread([observation(index) for index in range(3)])
    job.resizing.recall(Recall(1, ON_M, 128))
    await settled(reports)
    assert group.batch_sizes == [128]
    job.resizing.recall(Recall(2, (Slice("n", 2),), 64))
    await until(lambda: len(reports.all) == 2)
    assert group.batch_sizes == [128], "it keeps its slots, and its batch with them"
    group.replaced.set()
    async with asyncio.timeout(PATIENCE_S):
        assert await job.recovery.recover([], kind=LossKind.LOST, began_at=0.0)
    assert group.batch_sizes == [128, 128]


async def test_a_grant_without_slots_brings_the_group_together_with_another_batch() -> None:
    job, group, reports = spread([observation(index) for index in range(3)])
    grant = Grant(1, (), 256)
    job.resizing.grow(grant)
    job.resizing.add_workers(grant)
    _, body = await settled(reports)
    assert (body["world_size"], body["grants"]) == (3, 1)
    assert body["message"] == "continues with a different batch size: 3 workers"
    await until(lambda: bool(group.events))
    assert group.events == [("announced to", [0, 1, 2])]
    assert group.batch_sizes == [256]
    await job.recovery.stop()


async def test_slots_whose_processes_are_not_gone_stay_the_groups_until_they_are() -> None:
    job, group, reports = spread()
    group.stuck.clear()
    job.resizing.recall(Recall(1, (Slice("n", 2),), None))
    body = (await settled(reports))[1]
    both = [{"node_id": "n", "num_workers": 2}, {"node_id": "m", "num_workers": 1}]
    assert (body["world_size"], body["slices"]) == (1, both)
    job.resizing.recall(Recall(2, (Slice("n", 2),), None))
    await until(lambda: len(reports.all) == 2)
    assert reports.all[-1][1]["slices"] == both, "a recall ignores slots that are going"
    group.stuck.set()
    await until(lambda: len(reports.all) == 3)
    assert reports.all[-1][1]["slices"] == both[1:]
    await job.recovery.stop()


async def test_a_group_that_stops_looks_no_longer_after_slots_that_are_going() -> None:
    job, group, reports = spread()
    group.stuck.clear()
    job.resizing.recall(Recall(1, (Slice("n", 2),), None))
    await settled(reports)
    await job.recovery.stop()
    assert not job.recovery._tasks


SCRIPT = {"traits": traits({"script": {"entrypoint": "train.py"}, "resources": {"num_workers": 3}})}


async def test_a_script_gives_slots_back_once_it_is_prepared() -> None:
    seen = [observation(index, is_prepared=True) for index in range(3)]
    job, group, reports = spread(seen, **SCRIPT)
    job.resizing.recall(Recall(1, (Slice("n", 2),), None))
    await settled(reports)
    assert group.events[-1] == ("ended in", [Slice("n", 2)])


@pytest.mark.parametrize(
    ("changes", "asked"),
    [
        ({"traits": replace(SPEC.traits, recovers_in_place=False)}, Slice("m", 1)),
        ({}, Slice("n", 1)),
        ({"min_workers": 3}, Slice("m", 1)),
        (SCRIPT, Slice("m", 1)),
        ({**SCRIPT, "seen": [observation(index) for index in range(3)]}, Slice("m", 1)),
        ({"seen": [observation(9)] + [observation(s, step=0) for s in range(3)]}, Slice("m", 1)),
    ],
)
async def test_a_group_that_can_not_release_slots_reports_what_it_holds(
    changes: dict[str, Any], asked: Slice
) -> None:
    job, group, reports = spread(**changes)
    job.resizing.recall(Recall(4, (asked,), None))
    _, body = await settled(reports)
    assert (body["world_size"], body["grants"]) == (3, 4)
    assert not group.events
