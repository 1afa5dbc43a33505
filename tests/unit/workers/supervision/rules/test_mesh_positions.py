"""Workers that divide a model keep their parts when a group is renumbered."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import pytest

from ray_workers.shared.mesh_shape import MeshPosition, MeshShape
from ray_workers.supervision.rules.membership import (
    GroupRoster,
    NextRound,
    Worker,
    WorkerState,
    next_round,
)
from ray_workers.supervision.rules.mesh_positions import Seated, arranged
from tests.wire import traits

RECIPE: dict[str, Any] = {"recipe": "image_classification", "resources": {"num_workers": 4}}
SHARDED = MeshShape(2, 1)
STAGES = MeshShape(2, 2)
A, L, R = WorkerState.ACTIVE, WorkerState.LOST, WorkerState.READY


def as_torch_orders(shape: MeshShape, num_replicas: int) -> list[MeshPosition]:
    """Return the positions of all ranks, by nested loops over the axes."""
    per_stage = shape.num_parts // shape.num_stages
    return [
        MeshPosition(replica, stage * per_stage + within)
        for stage in range(shape.num_stages)
        for replica in range(num_replicas)
        for within in range(per_stage)
    ]


@pytest.mark.parametrize("shape", [MeshShape(1, 1), SHARDED, STAGES, MeshShape(6, 3)], ids=str)
@pytest.mark.parametrize("num_replicas", [1, 2, 5])
def test_positions_are_in_the_order_of_the_device_mesh(shape: MeshShape, num_replicas: int) -> None:
    expected = as_torch_orders(shape, num_replicas)
    world_size = len(expected)
    assert [shape.position(rank, world_size) for rank in range(world_size)] == expected
    assert [shape.rank(each, world_size) for each in expected] == list(range(world_size))
    for rank, position in enumerate(expected):
        same = [other for other, each in enumerate(expected) if each.part == position.part]
        assert shape.with_same_part(rank, world_size) == same


def of_two_replicas(*states: WorkerState, shape: MeshShape, **fields: Any) -> GroupRoster:
    """Four workers by rank, each on its own node, and then more workers without a position."""
    workers = [
        Worker(at, at, f"n{at}", state, shape.position(at, 4) if at < 4 else None)
        for at, state in enumerate(states)
    ]
    return GroupRoster(workers, **{"least": 2, **fields})


def members(roster: GroupRoster, shape: MeshShape) -> tuple[tuple[int, ...], tuple[int, ...]]:
    found = next_round(roster, replace(traits(RECIPE), mesh=shape))
    assert isinstance(found, NextRound)
    return found.members, found.idle


def test_a_replacement_fills_the_hole_even_if_it_comes_later() -> None:
    roster = of_two_replicas(A, A, A, A, R, shape=SHARDED, dead_nodes={"n1"}, least=4)
    assert members(roster, SHARDED) == ((0, 4, 2, 3), ())


def test_a_worker_without_a_whole_replica_is_idle() -> None:
    roster = of_two_replicas(A, A, A, A, shape=SHARDED, dead_nodes={"n1"})
    assert members(roster, SHARDED) == ((2, 3), (0,)), "2 and 3 are a complete replica"
    roster = of_two_replicas(A, A, A, A, shape=STAGES, dead_nodes={"n0"})
    assert members(roster, STAGES) == ((1, 3), (2,))


def test_parts_of_broken_replicas_form_a_complete_one() -> None:
    roster = of_two_replicas(A, A, A, A, shape=SHARDED, dead_nodes={"n0", "n3"})
    assert members(roster, SHARDED) == ((2, 1), ())


def test_a_whole_column_leaves_and_the_stages_of_the_other_one_are_renumbered() -> None:
    roster = of_two_replicas(A, A, A, A, shape=STAGES, leaving={0, 2})
    assert members(roster, STAGES) == ((1, 3), ())
    grown = of_two_replicas(A, A, A, A, R, R, shape=STAGES, leaving={0, 2})
    assert members(grown, STAGES) == ((4, 1, 5, 3), ())


def test_lost_processes_are_replaced_with_the_same_ranks() -> None:
    assert members(of_two_replicas(A, L, L, A, shape=STAGES), STAGES) == ((0, 1, 2, 3), ())


def test_a_new_process_does_not_displace_one_that_has_the_state() -> None:
    """Worker 0 was replaced in round 1, and the next round has a single replica."""
    workers = [
        Seated(0, MeshPosition(0, 0), since=1),
        Seated(2, MeshPosition(1, 0)),
        Seated(3, MeshPosition(1, 1)),
    ]
    assert arranged(workers, SHARDED) == ((2, 3), (0,))


def test_a_group_that_waits_keeps_all_members() -> None:
    roster = of_two_replicas(A, A, A, A, shape=SHARDED, dead_nodes={"n1"}, least=4)
    found = next_round(roster, replace(traits(RECIPE), mesh=SHARDED))
    assert isinstance(found, NextRound)
    assert (found.members, found.num_awaited, found.is_whole) == ((0, 2, 3), 1, False)


class Simulated:
    """A group whose workers have the state of a part, which they get only from a worker with the
    same part. Positions are found by nested loops."""

    def __init__(self, chance: Random, shape: MeshShape) -> None:
        self.chance, self.shape, self.round = chance, shape, 0
        positions = as_torch_orders(shape, chance.randint(1, 4))
        self.part = {index: each.part for index, each in enumerate(positions)}
        """The part whose state a worker has."""
        self.workers = [Seated(index, each) for index, each in enumerate(positions)]

    def change(self) -> None:
        self.round += 1
        left = [one for one in self.workers if self.chance.random() > 0.2]
        num = len(self.part) + 100 * self.round
        more = [Seated(num + at, None, self.round) for at in range(self.chance.randint(0, 4))]
        self.workers = [*left, *more]

    def form(self) -> None:
        """Form a round, and check that no part was lost that a worker had."""
        ranks, idle = arranged(self.workers, self.shape)
        num_replicas = len(self.workers) // self.shape.num_parts
        assert sorted((*ranks, *idle)) == sorted(one.index for one in self.workers)
        assert len(idle) == len(self.workers) % self.shape.num_parts
        positions = as_torch_orders(self.shape, num_replicas)
        had = {self.part[one.index] for one in self.workers if one.index in self.part}
        if not num_replicas:
            return
        keeping = {
            position.part
            for index, position in zip(ranks, positions, strict=True)
            if self.part.get(index) == position.part
        }
        assert keeping == had, "a worker that had the only copy of a part got another part"
        for part in had:
            holders = [i for i, p in self.part.items() if p == part and i in (*ranks, *idle)]
            kept = [i for i, p in zip(ranks, positions, strict=True) if p.part == part]
            assert len(set(holders) & set(kept)) == min(len(holders), num_replicas)
        # Parts that are lost come from a checkpoint.
        self.part = {i: each.part for i, each in zip(ranks, positions, strict=True)}
        since = {one.index: one.since for one in self.workers}
        placed = [
            Seated(index, each, since[index]) for index, each in zip(ranks, positions, strict=True)
        ]
        self.workers = [*placed, *(Seated(index, None, since[index]) for index in idle)]


@pytest.mark.parametrize("seed", range(60))
def test_no_worker_gives_up_the_only_copy_of_its_part(seed: int) -> None:
    chance = Random(seed)
    stages, per_stage = chance.randint(1, 3), chance.randint(1, 3)
    group = Simulated(chance, MeshShape(stages * per_stage, stages))
    for _ in range(8):
        group.change()
        group.form()


@pytest.mark.parametrize("seed", range(60))
def test_spares_fill_the_positions_of_lost_workers_and_move_no_part(seed: int) -> None:
    """Workers are lost with and without their nodes, and some spares are ready."""
    chance = Random(seed)
    stages, per_stage = chance.randint(1, 3), chance.randint(1, 3)
    shape = MeshShape(max(2, stages * per_stage), stages if stages * per_stage > 1 else 1)
    positions = as_torch_orders(shape, chance.randint(1, 4))
    group, lost, dead = replace(traits(RECIPE), mesh=shape), set[int](), set[str]()
    workers = []
    for rank, position in enumerate(positions):
        state = chance.choice([A, A, A, L])
        if state is L:
            lost.add(rank)
            dead |= {f"n{rank}"} if chance.random() < 0.5 else set()
        workers.append(Worker(rank, rank, f"n{rank}", state, position))
    num_spares = chance.randint(0, 3)
    for index in range(len(positions), len(positions) + num_spares):
        workers.append(Worker(index, 0, f"n{index}", WorkerState.SPARE))
    if len(lost) == len(positions):
        return
    found = next_round(GroupRoster(workers, 1, dead), group)
    assert isinstance(found, NextRound)
    num_used = min(num_spares, len(lost))
    assert [taken for _, taken in found.takeovers] == sorted(lost)[:num_used]
    replaced = {taken for _, taken in found.takeovers}
    num_left = len(positions) - sum(f"n{rank}" in dead for rank in lost - replaced)
    num_replicas = num_left // shape.num_parts
    assert len(found.members) == num_replicas * shape.num_parts
    assert len(found.idle) == num_left % shape.num_parts
    of_ranks = as_torch_orders(shape, num_replicas)
    for part in range(shape.num_parts):
        holders = {r for r, each in enumerate(positions) if each.part == part and r not in lost}
        keeping = {i for i, p in zip(found.members, of_ranks, strict=True) if p.part == part}
        assert len(holders & keeping) == min(len(holders), num_replicas)
    if num_left == len(positions):
        stay = [index for index in found.members if index < len(positions) and index not in lost]
        assert all(found.members[rank] == rank for rank in stay), "no worker moves"
        assert not {spare for spare, _ in found.takeovers} - set(found.members)
