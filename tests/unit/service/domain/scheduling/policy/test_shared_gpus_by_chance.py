"""Random queues and holders of parts of GPUs, compared with a search for a GPU for each worker.

The search shares no code with the policy. It tries one GPU after another, using exact fractions.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from fractions import Fraction

import pytest

from ray_workers.shared.slices import Slice
from service.domain.scheduling.placement.shared_gpus import parts_on, with_shared_gpus
from service.domain.scheduling.placement.slots import held_on, offered
from service.domain.scheduling.policy import (
    Decision,
    Holder,
    Node,
    Request,
    RunningJob,
    Snapshot,
    Start,
    Wait,
    WaitingJob,
    plan,
)
from tests.marks import SOAK
from tests.unit.service.domain.scheduling.snapshots import HOUR, NOW

SIZES = (0.1, 0.2, 0.25, 0.3, 0.4, 0.5, 0.6, 0.7, 0.75, 0.9, 1.0, 1.0, 2.0)
Worker = tuple[str, Fraction]
"""A job, and the part of a GPU or the number of GPUs that each worker has."""


def fits_on(gpus: int, workers: Sequence[Worker]) -> bool:
    """Whether the workers fit on this number of GPUs: no whole GPU is shared, and no two workers
    of a job share a GPU."""
    left = [Fraction(1)] * gpus
    jobs: list[set[str]] = [set() for _ in range(gpus)]

    def place(at: int) -> bool:
        if at == len(workers):
            return True
        job, size = workers[at]
        if size >= 1:
            empty = [number for number in range(gpus) if left[number] == 1][: int(size)]
            if len(empty) < size:
                return False
            for number in empty:
                left[number] = Fraction(0)
            if place(at + 1):
                return True
            for number in empty:
                left[number] = Fraction(1)
            return False
        tried = set()
        for number in range(gpus):
            state = left[number], tuple(sorted(jobs[number]))
            if left[number] < size or job in jobs[number] or state in tried:
                continue
            tried.add(state)
            left[number] -= size
            jobs[number].add(job)
            if place(at + 1):
                return True
            left[number] += size
            jobs[number].discard(job)
        return False

    return place(0)


def workers_on(node: str, jobs: Sequence[tuple[str, float, Sequence[Slice]]]) -> list[Worker]:
    found = [
        (name, Fraction(str(size)))
        for name, size, slices in jobs
        for part in slices
        if part.node_id == node
        for _ in range(part.num_workers)
    ]
    return sorted(found, key=lambda each: -each[1])


class Case:
    """Return holders that fit on their GPUs, and a queue."""

    def __init__(self, seed: int) -> None:
        dice = random.Random(seed)
        self.gpus = {f"n{number}": dice.randint(1, 4) for number in range(dice.randint(1, 3))}
        self.held: list[tuple[str, float, tuple[Slice, ...]]] = []
        for number in range(dice.randint(0, 6)):
            node, size = dice.choice(list(self.gpus)), dice.choice(SIZES)
            one = (f"h{number}", size, (Slice(node, dice.randint(1, 2)),))
            if fits_on(self.gpus[node], workers_on(node, [*self.held, one])):
                self.held.append(one)
        self.queue = [
            WaitingJob(
                *(f"q{number}", 0, dice.choice((10, 50, 90)), 100 + number),
                Request(dice.randint(1, 3), {"GPU": dice.choice(SIZES)}),
                yields=dice.random() < 0.5,
            )
            for number in range(dice.randint(1, 6))
        ]
        self.running = [
            RunningJob(
                job_id=name,
                request=Request(sum(part.num_workers for part in slices), {"GPU": size}),
                slices=slices,
                priority=dice.choice((10, 50, 90)),
                seq=1,
                held_s=HOUR,
                left_s=HOUR,
                yields=True,
                is_leaving=dice.random() < 0.3,
            )
            for name, size, slices in self.held
            if dice.random() < 0.7
        ]

    def plan(self) -> list[Decision]:
        holders = [Holder(name, slices, {"GPU": size}) for name, size, slices in self.held]
        nodes = []
        for name, gpus in self.gpus.items():
            total = {"GPU": float(gpus)}
            free = offered(total, total, held_on(name, holders))
            nodes.append(Node(name, total, with_shared_gpus(free, parts_on(name, holders))))
        facts = Snapshot(
            tuple(self.queue), tuple(nodes), True, tuple(holders), running=tuple(self.running)
        )
        return plan(facts, NOW)


def check(seed: int) -> None:
    case = Case(seed)
    decisions = case.plan()
    of_queue = {one.job_id: one for one in decisions if one.job_id.startswith("q")}
    assert of_queue.keys() == {job.job_id for job in case.queue}, seed
    starts = []
    for job in case.queue:
        decision = of_queue[job.job_id]
        if isinstance(decision, Start):
            placed = sum(part.num_workers for part in decision.slices)
            assert placed == job.request.num_workers, (seed, "a gang is whole")
            starts.append((job.job_id, job.request.bundle["GPU"], decision.slices))
        elif isinstance(decision, Wait):
            assert decision.reason.message, seed
    for node, gpus in case.gpus.items():
        there = workers_on(node, [*case.held, *starts])
        assert fits_on(gpus, there), (seed, node, gpus, there)


@pytest.mark.parametrize("first", [0, *(pytest.param(n, marks=SOAK) for n in range(1, 60))])
def test_what_a_plan_starts_fits_on_the_gpus(first: int) -> None:
    for seed in range(first * 500, first * 500 + 500):
        check(seed)


def test_parts_above_a_half_have_a_gpu_each() -> None:
    holders = [Holder(f"h{n}", (Slice("n", 1),), {"GPU": 0.6}) for n in range(8)]
    total = {"GPU": 8.0}
    free = with_shared_gpus(offered(total, total, held_on("n", holders)), parts_on("n", holders))

    def started(size: float) -> int:
        queue = [WaitingJob(f"q{n}", 0, 50, n, Request(1, {"GPU": size})) for n in range(3)]
        facts = Snapshot(tuple(queue), (Node("n", total, free),), True, tuple(holders))
        return sum(isinstance(one, Start) for one in plan(facts, NOW))

    assert [started(size) for size in (1.0, 0.5, 0.4)] == [0, 0, 3]
