"""Slots that are asked back of a group, and batches that come with them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from ray_workers.shared.commands import Grant, Recall
from ray_workers.shared.contracts import FrameKind, Slice
from ray_workers.shared.frames import LossKind
from ray_workers.shared.processes.machine_pace import MachinePace
from ray_workers.supervision.recovery import RecoveryController
from tests.unit.workers.supervision.observed import Reports, observation
from tests.unit.workers.supervision.recovering import (
    ON_M,
    PATIENCE_S,
    QUICK,
    SPEC,
    Nodes,
    SlowGroup,
    until,
)
from tests.wire import traits


class SpreadGroup(SlowGroup):
    """A whole group of three workers in two slices."""

    def __init__(self) -> None:
        super().__init__()
        parts = (Slice("n", 2), Slice("m", 1))
        self.slots = [SimpleNamespace(part=p, is_held=True, is_going=False) for p in parts]
        self.members = [
            SimpleNamespace(seat=seat, incarnation=0, slots=self.slots[seat // 2], is_placed=True)
            for seat in range(3)
        ]
        self.events: list[Any] = []
        self.stuck = asyncio.Event()
        """Whether processes that were ended are gone."""
        self.stuck.set()

    @property
    def placed(self) -> list[Any]:
        return [member for member in self.members if member.is_placed]

    @placed.setter
    def placed(self, _: Any) -> None:
        pass

    @property
    def running(self) -> list[Any]:
        return self.placed

    @running.setter
    def running(self, _: Any) -> None:
        pass

    async def announce(self, round_number: int, batch_size: int | None) -> None:
        self.batch_sizes.append(batch_size)
        self.events.append(("announced to", [member.seat for member in self.running]))

    async def give_back(self, slots: Any) -> None:
        self.events.append(("ended in", [each.part for each in slots]))
        for each in slots:
            each.is_going = True
        if self.stuck.is_set():
            await self.give_back_rest()

    async def give_back_rest(self) -> bool:
        await self.stuck.wait()
        self.slots = [each for each in self.slots if not each.is_going]
        return True


def spread(
    seen: Sequence[Any] = (), **spec: Any
) -> tuple[RecoveryController, SpreadGroup, Reports]:
    """seen: observations of the ranks."""
    group, reports, nodes = SpreadGroup(), Reports(), Nodes()
    nodes.seen = list(seen)
    slices = tuple(each.part for each in group.slots)
    elastic = replace(SPEC, **{"slices": slices, "min_workers": 1, **spec})

    async def prepare(node_ids: Any) -> None:
        raise AssertionError("nothing starts")

    parts: Any = (elastic, group, nodes, reports, lambda: None, prepare)
    return RecoveryController(*parts, MachinePace(lambda: 0.0), QUICK), group, reports


async def settled(reports: Reports) -> Any:
    await until(lambda: bool(reports.all))
    return reports.all[-1]


async def test_slots_that_are_asked_back_go_once_the_others_know_of_a_round_without_them() -> None:
    recovery, group, reports = spread()
    recovery.recall(Recall(1, (Slice("n", 2),), None))
    recovery.recall(Recall(1, ON_M, None))
    kind, body = await settled(reports)
    assert kind is FrameKind.RESIZED
    assert group.events == [("announced to", [2]), ("ended in", [Slice("n", 2)])]
    assert (body["world_size"], body["grants"], body["lacking"]) == (1, 1, 0)
    assert body["slices"] == [{"node_id": "m", "num_workers": 1}]
    assert recovery.state.regrouping is not None


async def test_the_batch_of_a_recall_is_announced_with_its_round_and_all_later_ones() -> None:
    recovery, group, reports = spread([observation(seat) for seat in range(3)])
    recovery.recall(Recall(1, ON_M, 128))
    await settled(reports)
    assert group.batch_sizes == [128]
    recovery.recall(Recall(2, (Slice("n", 2),), 64))
    await until(lambda: len(reports.all) == 2)
    assert group.batch_sizes == [128], "it keeps its slots, and its batch with them"
    group.replaced.set()
    async with asyncio.timeout(PATIENCE_S):
        assert await recovery.recover([], kind=LossKind.LOST, began_at=0.0)
    assert group.batch_sizes == [128, 128]


async def test_a_grant_without_slots_brings_the_group_together_with_another_batch() -> None:
    recovery, group, reports = spread([observation(seat) for seat in range(3)])
    grant = Grant(1, (), 256)
    recovery.grow(grant)
    recovery.take_in(grant)
    _, body = await settled(reports)
    assert (body["world_size"], body["grants"]) == (3, 1)
    assert body["message"] == "goes on with another batch: 3 workers"
    await until(lambda: bool(group.events))
    assert group.events == [("announced to", [0, 1, 2])]
    assert group.batch_sizes == [256]
    await recovery.stop()


async def test_slots_whose_processes_are_not_gone_stay_the_groups_until_they_are() -> None:
    recovery, group, reports = spread()
    group.stuck.clear()
    recovery.recall(Recall(1, (Slice("n", 2),), None))
    body = (await settled(reports))[1]
    both = [{"node_id": "n", "num_workers": 2}, {"node_id": "m", "num_workers": 1}]
    assert (body["world_size"], body["slices"]) == (1, both)
    recovery.recall(Recall(2, (Slice("n", 2),), None))
    await until(lambda: len(reports.all) == 2)
    assert reports.all[-1][1]["slices"] == both, "nothing is asked of those that go already"
    group.stuck.set()
    await until(lambda: len(reports.all) == 3)
    assert reports.all[-1][1]["slices"] == both[1:]
    await recovery.stop()


async def test_a_group_that_stops_looks_no_longer_after_slots_that_are_going() -> None:
    recovery, group, reports = spread()
    group.stuck.clear()
    recovery.recall(Recall(1, (Slice("n", 2),), None))
    await settled(reports)
    await recovery.stop()
    assert recovery._giving_rest is not None
    assert recovery._giving_rest.done()


SCRIPT = {"traits": traits({"script": {"entrypoint": "train.py"}, "resources": {"num_workers": 3}})}


async def test_a_script_gives_slots_back_once_it_is_prepared() -> None:
    seen = [observation(seat, is_prepared=True) for seat in range(3)]
    recovery, group, reports = spread(seen, **SCRIPT)
    recovery.recall(Recall(1, (Slice("n", 2),), None))
    await settled(reports)
    assert group.events[-1] == ("ended in", [Slice("n", 2)])


@pytest.mark.parametrize(
    ("changes", "asked"),
    [
        ({"traits": replace(SPEC.traits, recovers_in_place=False)}, Slice("m", 1)),
        ({}, Slice("n", 1)),
        ({"min_workers": 3}, Slice("m", 1)),
        (SCRIPT, Slice("m", 1)),
        ({**SCRIPT, "seen": [observation(seat) for seat in range(3)]}, Slice("m", 1)),
        ({"seen": [observation(9)] + [observation(s, step=0) for s in range(3)]}, Slice("m", 1)),
    ],
)
async def test_a_group_that_can_not_give_slots_back_says_what_it_holds(
    changes: dict[str, Any], asked: Slice
) -> None:
    recovery, group, reports = spread(**changes)
    recovery.recall(Recall(4, (asked,), None))
    _, body = await settled(reports)
    assert (body["world_size"], body["grants"]) == (3, 4)
    assert not group.events
