"""Elastic jobs whose workers divide a model have a size that is a multiple of a replica's size."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from ray_workers.shared.contracts import Slice
from service.domain.scheduling.elastic.resizing import released_together, spare
from service.domain.scheduling.elastic.sizing import ElasticJob, sizes_of
from service.domain.scheduling.placement.slots import Holder, Request, count, held_on, offered
from service.domain.scheduling.policy import (
    Grow,
    Growing,
    Node,
    Preempt,
    RunningJob,
    Shrink,
    Snapshot,
    Start,
    WaitingJob,
    plan,
)
from service.domain.scheduling.rules.eviction import MIN_RUN_S
from tests.unit.service.domain.scheduling.snapshots import GPU, NOW

A1, B2, C2, D3 = Slice("a", 1), Slice("b", 2), Slice("c", 2), Slice("d", 3)


def test_slices_are_released_once_they_leave_whole_replicas() -> None:
    """A group of eight, in replicas of four."""
    assert spare((A1, B2, C2, D3), 4, 4) == (D3, A1), "after d and c, three would be left"
    assert spare((A1, D3, B2, C2), 4, 4) == (C2, B2)
    assert released_together((C2, B2), 8, 4) == [(C2, B2)]
    assert spare((A1, D3, B2, C2), 2, 2) == (C2, B2)
    assert released_together((C2, B2), 8, 2) == [(C2,), (B2,)]


def test_workers_without_a_replica_are_released_alone() -> None:
    """Five workers are left of a group in replicas of four."""
    assert spare((B2, C2, A1), 4, 4) == (A1,)


@pytest.mark.parametrize("seed", range(30))
def test_what_is_released_together_is_the_least_that_leaves_whole_replicas(seed: int) -> None:
    chance = Random(seed)
    size = chance.randint(1, 4)
    held = [Slice(f"n{n}", chance.randint(1, 4)) for n in range(chance.randint(1, 7))]
    least = size * chance.randint(1, 3)
    if count(held) < least:
        return
    found = spare(held, least, size)
    groups = released_together(found, count(held), size)
    assert [part for group in groups for part in group] == list(found), "no slice is left over"
    left = count(held)
    for group in groups:
        for part in group[:-1]:
            left -= part.num_workers
            assert left % size, "it could have stopped here"
        left -= group[-1].num_workers
        assert left % size == 0
        assert left >= least


@pytest.mark.parametrize("seed", range(30))
def test_the_sizes_to_compare_are_whole_replicas(seed: int) -> None:
    chance = Random(seed)
    size, least, most = chance.randint(2, 6), chance.randint(1, 3), chance.randint(3, 9)
    job = ElasticJob(size * least, size * most + chance.randrange(size), 8, 8, num_parts=size)
    found = sizes_of(replace(job, in_place=True), per_node=chance.randint(1, 16))
    assert all(each % size == 0 for each in found)
    assert (found[0], found[-1]) == (size * least, size * most)


class Cluster:
    """Jobs on nodes, and a slow simulation of what happens to them."""

    def __init__(self, seed: int) -> None:
        self.chance = chance = Random(seed)
        self.nodes = {f"n{n}": float(chance.randint(1, 6)) for n in range(chance.randint(2, 6))}
        self.requests: dict[str, Request] = {}
        self.held: dict[str, tuple[Slice, ...]] = {}
        self.has_changed = False

    def submit(self) -> None:
        size = self.chance.choice([1, 2, 2, 3, 4])
        least = size * self.chance.randint(1, 2)
        most = least + size * self.chance.randint(0, 3)
        name = f"j{len(self.requests)}"
        self.requests[name] = Request(most, GPU, least, num_parts=size)

    def snapshot(self) -> Snapshot:
        queue = tuple(
            WaitingJob(name, 0, 50, seq, request, waited_s=0.0, yields=True)
            for seq, (name, request) in enumerate(self.requests.items())
            if name not in self.held
        )
        holders = tuple(Holder(n, s, self.requests[n].bundle) for n, s in self.held.items())
        nodes = tuple(
            Node(n, {"GPU": most}, offered({"GPU": most}, {"GPU": most}, held_on(n, holders)))
            for n, most in self.nodes.items()
        )
        return Snapshot(
            queue,
            nodes,
            True,
            holders,
            growing=tuple(self._growing(*one) for one in self.held.items() if self._lacks(one[0])),
            running=tuple(self._running(*one) for one in self.held.items()),
        )

    def _lacks(self, name: str) -> bool:
        return count(self.held[name]) < self.requests[name].num_workers

    def _growing(self, name: str, slices: tuple[Slice, ...]) -> Growing:
        lacking = max(0, self.requests[name].least - count(slices))
        return Growing(name, 1, 50, 0, self.requests[name], slices, lacking)

    def _running(self, name: str, slices: tuple[Slice, ...]) -> RunningJob:
        request = self.requests[name]
        is_whole = count(slices) >= request.least
        return RunningJob(
            *(name, 50, 0, request.of_size(count(slices)), slices, MIN_RUN_S),
            yields=True,
            spare=spare(slices, request.least, request.num_parts) if is_whole else (),
        )

    def lose_a_node(self) -> None:
        node = self.chance.choice(list(self.nodes))
        for name, slices in list(self.held.items()):
            left = tuple(part for part in slices if part.node_id != node)
            self.held[name] = left
            if not left:
                del self.held[name]
        self.nodes[node] = float(self.chance.randint(0, 6))

    def tick(self) -> None:
        before = dict(self.held)
        for made in plan(self.snapshot(), NOW):
            name = made.job_id
            if isinstance(made, Start):
                self.held[name] = made.slices
                self.check_start(name, made.slices, before)
            elif isinstance(made, Grow):
                self.held[name] = (*self.held[name], *made.slices)
            elif isinstance(made, Shrink):
                rest = list(self.held[name])
                for part in made.slices:
                    rest.remove(part)
                self.held[name] = tuple(rest)
            elif isinstance(made, Preempt):
                del self.held[name]
            else:
                continue
            request = self.requests[name]
            if name in self.held:
                num = count(self.held[name])
                assert num % request.num_parts == 0, (name, made)
                assert request.least <= num <= request.num_workers

    def check_start(
        self, name: str, slices: tuple[Slice, ...], before: dict[str, tuple[Slice, ...]]
    ) -> None:
        """Check that the only job that starts on otherwise empty nodes gets the largest size."""
        if before or len(self.held) > 1:
            return
        free, request = int(sum(self.nodes.values())), self.requests[name]
        fitting = list(range(request.least, request.num_workers + 1))
        fitting = [n for n in fitting if n <= free and n % request.num_parts == 0]
        assert count(slices) == max(fitting)
        self.has_changed = True


@pytest.mark.parametrize("seed", range(40))
def test_a_group_has_whole_replicas_after_each_decision(seed: int) -> None:
    cluster = Cluster(seed)
    for _ in range(15):
        if cluster.chance.random() < 0.5:
            cluster.submit()
        if cluster.chance.random() < 0.2:
            cluster.lose_a_node()
        for name in list(cluster.held):
            if cluster.chance.random() < 0.1:
                del cluster.held[name], cluster.requests[name]
                cluster.requests[f"gone-{len(cluster.requests)}"] = Request(99, GPU)
        cluster.tick()
        free = sum(cluster.nodes.values()) - sum(map(count, cluster.held.values()))
        assert free >= 0
