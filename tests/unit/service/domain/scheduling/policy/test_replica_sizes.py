"""Elastic jobs whose workers divide a model have a size that is a multiple of a replica's size."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from random import Random

import pytest

from ray_workers.shared.slices import Slice
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


def test_spares_are_released_first_and_one_by_one() -> None:
    """A group of four workers, in replicas of two, and two spares."""
    held = (C2, B2, A1, Slice("d", 1))
    assert spare(held, 2, 2, 4) == (Slice("d", 1), A1, B2)
    assert released_together((Slice("d", 1), A1, B2), 6, 2, 4) == [(Slice("d", 1),), (A1,), (B2,)]
    assert spare(held, 4, 1, 4) == (Slice("d", 1), A1), "the number of workers is fixed"


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


def test_a_job_does_not_keep_a_spare_as_an_incomplete_replica() -> None:
    """The waiting job needs only the last four slots of a group of eight workers, in replicas of
    four, and a spare. Without these slots, the spare would be one worker of a replica of four."""
    held = (Slice("a", 4), Slice("b", 4), Slice("c", 1))
    request = Request(9, GPU, 4, num_spares=1, num_parts=4)
    running = RunningJob(
        *("held", 50, 0, request.of_size(9), held, MIN_RUN_S), spare=spare(held, 4, 4, 8)
    )
    nodes = tuple(
        Node(part.node_id, {"GPU": float(part.num_workers)}, {"GPU": 0.0}) for part in held
    )
    waiting = WaitingJob("asks", 0, 90, 1, Request(4, GPU, required_level="node"), yields=False)
    holders = (Holder("held", held, GPU),)
    found = plan(Snapshot((waiting,), nodes, True, holders, running=(running,)), NOW)
    (shrink,) = [one for one in found if isinstance(one, Shrink)]
    assert shrink.slices == (held[2], held[1])


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
        self.num_submitted = self.num_spares_released = 0

    def submit(self) -> None:
        size, num_spares = self.chance.choice([1, 2, 2, 3, 4]), self.chance.choice([0, 0, 1, 2, 3])
        least = size * self.chance.randint(1, 2)
        most = least + size * self.chance.randint(0, 3)
        self.num_submitted += 1
        name, spares = f"j{self.num_submitted}", {"num_spares": num_spares}
        if num_spares and self.chance.random() < 0.3:  # of a fixed size
            self.requests[name] = Request(least + num_spares, GPU, **spares)
        else:
            self.requests[name] = Request(most + num_spares, GPU, least, **spares, num_parts=size)

    def sizes(self, name: str, *, starts: bool = False) -> list[int]:
        """Return the numbers of slots that the job can use."""
        request = self.requests[name]
        ranks = request.num_workers - request.num_spares
        if request.min_workers is None:
            sizes = list(range(ranks, request.num_workers + 1))
            return sizes[-1:] if starts else sizes
        of_ranks = range(request.min_workers, ranks + 1, request.num_parts)
        return [*of_ranks, *range(ranks + 1, request.num_workers + 1)]

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
        lacking = max(0, self.sizes(name)[0] - count(slices))
        return Growing(name, 1, 50, 0, self.requests[name], slices, lacking)

    def _running(self, name: str, slices: tuple[Slice, ...]) -> RunningJob:
        request = self.requests[name]
        is_whole, num_ranks = count(slices) >= self.sizes(name)[0], request.num_ranks
        size = self.sizes(name)[0], request.num_parts, num_ranks
        return RunningJob(
            *(name, 50, 0, request.of_size(count(slices)), slices, MIN_RUN_S),
            yields=True,
            spare=spare(slices, *size) if is_whole else (),
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
                self.check_shrink(name, made.slices)
                rest = list(self.held[name])
                for part in made.slices:
                    rest.remove(part)
                self.held[name] = tuple(rest)
            elif isinstance(made, Preempt):
                del self.held[name]
            else:
                continue
            if name in self.held:
                assert count(self.held[name]) in self.sizes(name), (name, made)

    def check_start(
        self, name: str, slices: tuple[Slice, ...], before: dict[str, tuple[Slice, ...]]
    ) -> None:
        """Check that the only job that starts on otherwise empty nodes gets the largest size."""
        if before or len(self.held) > 1:
            return
        free, request = int(sum(self.nodes.values())), self.requests[name]
        fitting = [size for size in self.sizes(name, starts=True) if size <= free]
        assert count(slices) == max(fitting)
        num_spares = max(0, count(slices) - request.num_ranks)
        of_spares = slices[len(slices) - num_spares :]
        assert all(part.num_workers == 1 for part in of_spares)
        of_ranks = {part.node_id for part in slices[: len(slices) - num_spares]}
        elsewhere = sum(free for node, free in self.nodes.items() if node not in of_ranks)
        num_apart = sum(part.node_id not in of_ranks for part in of_spares)
        assert num_apart == min(num_spares, elsewhere)

    def check_shrink(self, name: str, slices: tuple[Slice, ...]) -> None:
        """Check that a group that keeps all its workers only releases the slots of spares."""
        held, num_ranks = self.held[name], self.requests[name].num_ranks
        left = count(held) - count(slices)
        of_spares = held[len(held) - max(0, count(held) - num_ranks) :]
        if left >= num_ranks and all(part.num_workers == 1 for part in of_spares):
            assert not Counter(slices) - Counter(of_spares)
            self.num_spares_released += len(slices)


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
