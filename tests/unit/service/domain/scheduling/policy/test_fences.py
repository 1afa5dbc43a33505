"""Fences are compared with a loop over nodes and reservations that knows only the definitions."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from datetime import timedelta

import pytest

from service.domain.scheduling.placement.gangs import Gangs
from service.domain.scheduling.placement.pools import Offer
from service.domain.scheduling.placement.slots import Node, Request, fits
from service.domain.scheduling.placement.stock import Stock
from service.domain.scheduling.placement.topology import Topology
from service.domain.scheduling.policy import Snapshot, WaitingJob
from service.domain.scheduling.policy.windows import Windows
from service.domain.scheduling.rules.order import SETTLING_S
from service.domain.scheduling.rules.reservations import Reservation
from tests.unit.service.domain.scheduling.snapshots import NOW, change

USERS, QUEUES = ("ann", "ben", "cy"), ("default", "night")
TOTALS = ({"CPU": 8.0, "GPU": 4.0}, {"CPU": 4.0}, {"CPU": 4.0, "GPU": 8.0})
BUNDLES = ({"GPU": 1.0}, {"CPU": 2.0, "GPU": 1.0}, {"CPU": 1.0}, {"GPU": 4.0})
LEAVE_S, MIN_RUN_S = 45.0, 300.0


def drawn(chance: random.Random) -> Snapshot:
    totals = [chance.choice(TOTALS) for _ in range(8)]
    nodes = tuple(Node(f"n{at}", total, total) for at, total in enumerate(totals))
    windows = tuple(a_window(chance, at) for at in range(chance.randint(1, 12)))
    queue = tuple(a_job(chance, at, [each.name for each in windows]) for at in range(20))
    facts = {"reservations": windows, "leave_s": LEAVE_S, "min_run_s": MIN_RUN_S}
    return Snapshot(queue, nodes, True, **facts)


def a_window(chance: random.Random, number: int) -> Reservation:
    begins_at = NOW + timedelta(seconds=chance.randrange(-3000, 9000))
    return Reservation(
        f"w{number}",
        begins_at,
        begins_at + timedelta(seconds=chance.randrange(100, 6000)),
        frozenset(f"n{chance.randrange(9)}" for _ in range(chance.randint(0, 4))),
        all_nodes=chance.random() < 0.05,
        users=tuple(chance.sample(USERS, chance.randint(0, 2))),
        queues=tuple(chance.sample(QUEUES, chance.choice((0, 0, 1)))),
        accepts_unnamed=chance.random() < 0.5,
        flex=chance.random() < 0.3,
        at_begin=chance.choice(("preempt", "wait", "cancel")),
        at_end=chance.choice(("continue", "preempt")),
    )


def a_job(chance: random.Random, number: int, names: list[str]) -> WaitingJob:
    return WaitingJob(
        *(f"j{number}", 0, 50, number, Request(1, chance.choice(BUNDLES))),
        ends_within_s=chance.choice((None, 60.0, 900.0, chance.random() * 9000)),
        yields=chance.random() < 0.5,
        owner=chance.choice(USERS),
        queue=chance.choice(QUEUES),
        reservation=chance.choice((None, None, *names)),
    )


def seconds(one: Reservation) -> tuple[float, float]:
    return (one.begins_at - NOW).total_seconds(), (one.ends_at - NOW).total_seconds()


def admits(one: Reservation, job: WaitingJob) -> bool:
    if job.reservation != one.name and not (one.accepts_unnamed and job.reservation is None):
        return False
    return job.owner in one.users or job.queue in one.queues


def is_closed(job: WaitingJob, node: str, one: Reservation, in_s: float = 0.0) -> bool:
    """Whether a job that starts after `in_s` would be on the node during another's reservation."""
    begins_s, ends_s = seconds(one)
    stays_s = math.inf if job.ends_within_s is None else job.ends_within_s + SETTLING_S
    if job.yields and one.at_begin == "preempt":
        stays_s = min(stays_s, MIN_RUN_S)
    there = one.all_nodes or node in one.node_ids
    return there and not admits(one, job) and begins_s < in_s + stays_s + LEAVE_S and in_s < ends_s


def may_use(job: WaitingJob, node: str, known: tuple[Reservation, ...]) -> bool:
    """Whether the job can start on the node now."""
    limit_s = math.inf if job.ends_within_s is None else job.ends_within_s + SETTLING_S
    least_s = LEAVE_S + (min(limit_s, MIN_RUN_S) if job.yields else 0.0)
    for one in known:
        there = one.all_nodes or node in one.node_ids
        _, ends_s = seconds(one)
        if ends_s <= 0:
            continue
        if one.name == job.reservation and not one.flex and not there:
            return False
        if is_closed(job, node, one):
            return False
        too_short = there and admits(one, job) and one.at_end == "preempt" and ends_s <= least_s
        if too_short and is_closed(replace(job, owner="nobody", queue="none"), node, one):
            return False
    return True


@pytest.mark.parametrize("seed", range(40))
def test_fences_contain_the_nodes_that_a_job_can_not_use(seed: int) -> None:
    seen = drawn(random.Random(seed))
    windows = Windows(seen, NOW)
    for job, fenced in zip(seen.queue, windows.apply().queue, strict=True):
        if fenced.not_yet is not None:
            continue
        usable = {node.id for node in seen.nodes if may_use(job, node.id, seen.reservations)}
        fence = fenced.request.fence
        closed = frozenset[str]() if fence is None else fence.nodes
        assert {node.id for node in seen.nodes} - closed == usable, job
        for in_s in (0.0, 700.0, 4000.0):
            later = windows.closed_in(fenced, in_s)
            there = [one for one in seen.reservations if seconds(one)[1] > 0]
            assert later == {
                n for n in usable if any(is_closed(job, n, one, in_s) for one in there)
            }


@pytest.mark.parametrize("seed", range(20))
def test_the_capacity_is_what_fits_outside_of_the_fence(seed: int) -> None:
    chance = random.Random(seed)
    seen = Windows(drawn(chance), NOW).apply()
    gangs = Gangs({})
    kinds = [gangs.of(job.request).kind for job in seen.queue]
    gangs.name_all()
    stock = Stock(seen.nodes, gangs, Topology((), seen.nodes))
    offer = Offer(stock)
    for kind in kinds:
        closed = frozenset[str]() if kind.fence is None else kind.fence.nodes
        sizes = [fits(kind.bundle, node.total) for node in seen.nodes if node.id not in closed]
        assert stock.kinds.whole(kind) == sum(sizes)
        assert stock.kinds.largest(kind) == max(sizes, default=0)
    for _ in range(60):
        change(chance, stock, offer, chance.choice(kinds), chance.choice(seen.nodes).id)
        for pool in (offer.now, offer.soon):
            asked = chance.choice(kinds)
            closed = frozenset[str]() if asked.fence is None else asked.fence.nodes
            there = [node.id for node in seen.nodes if node.id not in closed]
            capacity = sum(asked.anywhere.fits(*(pool.at(name) or ((),))) for name in there)
            assert pool.has(asked, max(1, capacity)) == (capacity > 0)
            assert not pool.has(asked, capacity + 1)
            assert pool.capacity(asked) == capacity
            packed = pool.pack_most(asked, 1, 100) or ()
            assert sum(part.num_workers for part in packed) == capacity
            assert closed.isdisjoint(part.node_id for part in packed)
