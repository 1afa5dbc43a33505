"""Spares in the plan: they count as workers of the gang, and are placed on other nodes."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest

from ray_workers.shared.slices import Slice
from service.domain.scheduling.placement.slots import spares_last
from service.domain.scheduling.policy import (
    Grow,
    Growing,
    Holder,
    Impossible,
    Node,
    Request,
    RunningJob,
    Shrink,
    Snapshot,
    Start,
    Wait,
    WaitingJob,
    plan,
)
from service.domain.scheduling.rules.queues import Queue
from tests.unit.service.domain.scheduling.policy.test_policy import NOW, decide, node

CPU = {"CPU": 1.0}


def with_spares(name: str, ranks: int, spares: int, least: int | None = None) -> WaitingJob:
    return WaitingJob(name, 0, 50, 0, Request(ranks + spares, CPU, least, num_spares=spares))


def test_a_spare_is_placed_on_another_node_than_the_ranks() -> None:
    nodes = [node("n1", CPU=3.0), node("n2", CPU=1.0)]
    started = decide(with_spares("a", 2, 1), nodes=nodes)
    assert started == [Start("a", (Slice("n1", 2), Slice("n2", 1)))]


def test_spares_are_placed_next_to_the_ranks_if_there_is_no_other_node() -> None:
    nodes = [node("n1", CPU=5.0)]
    started = decide(with_spares("a", 2, 2), nodes=nodes)
    assert started == [Start("a", (Slice("n1", 2), Slice("n1", 1), Slice("n1", 1)))]


def test_a_gang_waits_for_the_slots_of_its_spares() -> None:
    nodes = [node("n1", 2.0, CPU=3.0)]
    (wait,) = decide(with_spares("a", 2, 1), nodes=nodes)
    assert isinstance(wait, Wait)
    assert "needs 3 workers, 1 of them spare, of 1 CPU" in wait.reason.message
    (never,) = decide(with_spares("a", 2, 2), nodes=nodes)
    assert isinstance(never, Impossible)


def test_an_elastic_gang_starts_without_spares_and_gives_all_slots_to_its_ranks() -> None:
    nodes = [node("n1", CPU=2.0)]
    assert decide(with_spares("a", 2, 1, least=1), nodes=nodes) == [Start("a", (Slice("n1", 2),))]


def test_spares_count_in_the_limits_of_their_queue() -> None:
    nodes, queue = [node("n1", CPU=8.0)], Queue("default", limit={"CPU": 3.0})
    jobs = [with_spares("a", 2, 1), with_spares("b", 1, 0)]
    found = decide(*jobs, nodes=nodes, queues=(queue,))
    assert isinstance(found[0], Start)
    assert isinstance(found[1], Wait)
    assert "limit" in found[1].reason.message


def holding(*slices: Slice, ranks: int = 2, spares: int = 1) -> Growing:
    request = Request(ranks + spares, CPU, num_spares=spares)
    return Growing("g", 1, 50, 0, request, slices)


def grown(group: Growing, nodes: list[Node], *queue: WaitingJob) -> list[Any]:
    holders = (Holder(group.job_id, group.slices, CPU),)
    return plan(Snapshot(queue, tuple(nodes), True, holders, growing=(group,)), NOW)


def test_a_group_that_lost_a_spares_slot_gets_another_on_another_node() -> None:
    nodes = [node("n1", 2.0, CPU=4.0), node("n2", CPU=4.0)]
    found = grown(holding(Slice("n1", 2)), nodes)
    assert found == [Grow("g", (Slice("n2", 1),), None)]
    found = grown(holding(Slice("n1", 2)), nodes[:1])
    assert found == [Grow("g", (Slice("n1", 1),), None)]


def test_a_waiting_job_comes_before_a_spare() -> None:
    nodes = [node("n1", 1.0, CPU=3.0)]
    found = grown(holding(Slice("n1", 2)), nodes, with_spares("a", 1, 0))
    assert Start("a", (Slice("n1", 1),)) in found
    assert not any(isinstance(one, Grow) for one in found)


def test_a_spare_is_released_for_a_waiting_job_before_any_job_leaves() -> None:
    slices = (Slice("n1", 2), Slice("n1", 1))
    running = RunningJob(
        *("g", 10, 1),
        Request(3, CPU),
        slices,
        held_s=1e6,
        left_s=3600.0,
        yields=True,
        spare=slices[1:],
    )
    nodes = (node("n1", 0.0, CPU=3.0),)
    holders = (Holder("g", slices, CPU),)
    urgent = WaitingJob("a", 0, 90, 9, Request(1, CPU))
    found = plan(Snapshot((urgent,), nodes, True, holders, running=(running,)), NOW)
    (shrink,) = [one for one in found if isinstance(one, Shrink)]
    assert shrink.slices == slices[1:]


@pytest.mark.parametrize("seed", range(100))
def test_spares_of_random_gangs_are_apart_as_far_as_there_is_room(seed: int) -> None:
    """An obvious count of the free slots is the reference."""
    chance = random.Random(seed)
    free = {f"n{at}": chance.randint(0, 4) for at in range(chance.randint(1, 5))}
    ranks, spares = chance.randint(2, 6), chance.randint(0, 4)
    nodes = [node(name, float(size), CPU=16.0) for name, size in free.items()]
    (found,) = decide(with_spares("a", ranks, spares), nodes=nodes)
    if sum(free.values()) < ranks + spares:
        assert isinstance(found, Wait)
        return
    assert isinstance(found, Start)
    of_spares = found.slices[len(found.slices) - spares :]
    of_ranks = found.slices[: len(found.slices) - spares]
    assert [part.num_workers for part in of_spares] == [1] * spares
    assert sum(part.num_workers for part in of_ranks) == ranks
    used = Counter[str]()
    for part in found.slices:
        used[part.node_id] += part.num_workers
    assert all(number <= free[name] for name, number in used.items())
    with_ranks = {part.node_id for part in of_ranks}
    room_elsewhere = sum(size for name, size in free.items() if name not in with_ranks)
    num_apart = sum(part.node_id not in with_ranks for part in of_spares)
    assert num_apart == min(spares, room_elsewhere)
    alone = decide(with_spares("a", ranks, 0), nodes=nodes)
    assert alone == [Start("a", tuple(_joined(of_ranks)))], "spares don't move the ranks"


def _joined(slices: tuple[Slice, ...]) -> list[Slice]:
    """Join the slices of a node."""
    found = Counter[str]()
    for part in slices:
        found[part.node_id] += part.num_workers
    return [Slice(name, number) for name, number in found.items()]


def test_each_spare_has_a_slice_of_its_own() -> None:
    given = [Slice("a", 3), Slice("b", 2)]
    assert spares_last(given, 0) == (*given,)
    assert spares_last(given, 1) == (Slice("a", 3), Slice("b", 1), Slice("b", 1))
    assert spares_last(given, 3) == (
        Slice("a", 2),
        Slice("a", 1),
        Slice("b", 1),
        Slice("b", 1),
    )
