"""Parts of GPUs in the plan: workers of different jobs can share a GPU, but workers of the same job
can't."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest

from ray_workers.shared.slices import Slice
from service.domain.scheduling.elastic.resizing import spare
from service.domain.scheduling.placement.gangs import Gangs
from service.domain.scheduling.placement.pools import Pool
from service.domain.scheduling.placement.shared_gpus import Fractions, parts_on, with_shared_gpus
from service.domain.scheduling.placement.slots import add, fits, held_on, offered
from service.domain.scheduling.placement.stock import Stock, When
from service.domain.scheduling.placement.topology import Topology
from service.domain.scheduling.policy import (
    Decision,
    Holder,
    Node,
    Preempt,
    Request,
    RunningJob,
    Shrink,
    Snapshot,
    Start,
    Wait,
    WaitingJob,
    can_ever_fit,
    plan,
)
from service.domain.scheduling.rules.eviction import MIN_RUN_S
from tests.unit.service.domain.scheduling.rules.test_limits import NOW

HALF = {"GPU": 0.5}
WHOLE = {"GPU": 1.0}


def job(name: str, workers: int, bundle: dict[str, float], seq: int = 0) -> WaitingJob:
    return WaitingJob(name, 0, 50, seq, Request(workers, bundle))


def holder(name: str, workers: int, bundle: dict[str, float]) -> Holder:
    return Holder(name, (Slice("n", workers),), bundle)


def decide(*jobs: WaitingJob, gpus: int, holders: Sequence[Holder] = ()) -> list[Decision]:
    total = {"GPU": float(gpus)}
    free = offered(total, total, held_on("n", holders))
    free = with_shared_gpus(free, parts_on("n", holders))
    node = Node("n", total, free)
    return plan(Snapshot(jobs, (node,), connected=True, holders=tuple(holders)), NOW)


def started(decisions: Sequence[Decision]) -> list[str]:
    return [each.job_id for each in decisions if isinstance(each, Start)]


def test_a_node_carries_as_many_workers_of_a_job_as_it_has_gpus() -> None:
    assert started(decide(job("a", 2, HALF), gpus=2)) == ["a"]
    assert started(decide(job("a", 1, HALF), gpus=1)) == ["a"]
    reason = can_ever_fit(Request(2, HALF), [Node("n", WHOLE, WHOLE)])
    assert reason is not None
    assert reason.message == (
        "needs 2 workers of 0.5 GPU, but the whole cluster has room for 1 at once, "
        "each on a different GPU"
    )


@pytest.mark.parametrize("first", [0.15, 0.35])
def test_parts_that_start_together_are_counted_on_one_gpu(first: float) -> None:
    parts = [job("a", 1, {"GPU": first}, 1), job("b", 1, {"GPU": 0.5 - first}, 2)]
    assert started(decide(*parts, job("w", 2, WHOLE, 3), gpus=3)) == ["a", "b", "w"]
    assert started(decide(*parts, job("w", 3, WHOLE, 3), gpus=3)) == ["a", "b"]


def test_parts_that_fit_only_when_they_are_spread_leave_room_for_another() -> None:
    """If they were packed on the fullest GPUs in order of decreasing size, they would need four
    GPUs."""
    sizes = [(0.45, 1), (0.45, 1), (0.2, 3), (0.2, 2)]
    held = [holder(f"h{at}", number, {"GPU": size}) for at, (size, number) in enumerate(sizes)]
    assert started(decide(job("a", 1, {"GPU": 0.1}), gpus=3, holders=held)) == ["a"]
    assert started(decide(job("w", 1, WHOLE), gpus=3, holders=held)) == []
    assert started(decide(job("w", 1, WHOLE), gpus=5, holders=held)) == ["w"]


def running(name: str, part: float, nodes: str, least: int | None = None) -> RunningJob:
    """Return a job with a slice of one worker on each of these nodes, which can be asked to leave,
    or to release slots down to `least` workers."""
    slices = tuple(Slice(node, 1) for node in nodes)
    spares = () if least is None else spare(slices, least)
    request = Request(len(nodes), {"GPU": part}, least)
    return RunningJob(name, 50, 1, request, slices, MIN_RUN_S, yields=True, spare=spares)


def decide_for_two(
    gpus: Mapping[str, int], there: Sequence[RunningJob], others: Sequence[RunningJob] = ()
) -> list[Decision]:
    """Make a plan for a job of priority 60 that needs two whole GPUs. others: jobs that must not be
    asked."""
    holders = [Holder(j.job_id, j.slices, j.request.bundle) for j in (*there, *others)]
    nodes = []
    for name, number in gpus.items():
        total = {"GPU": float(number)}
        free = offered(total, total, held_on(name, holders))
        nodes.append(Node(name, total, with_shared_gpus(free, parts_on(name, holders))))
    queue = (WaitingJob("w", 0, 60, 9, Request(2, WHOLE)),)
    return plan(Snapshot(queue, tuple(nodes), True, tuple(holders), running=tuple(there)), NOW)


def test_slots_that_are_released_one_by_one_belong_to_one_job() -> None:
    """The group keeps one GPU, and the other job has two of the three, so asking only the group
    does not help."""
    jobs = [running("a", 0.2, "nn"), running("group", 0.25, "nnn", least=1)]
    _, *asked = decide_for_two({"n": 3}, jobs)
    assert [(type(each), each.job_id) for each in asked] == [(Shrink, "group"), (Preempt, "a")]
    assert isinstance(asked[0], Shrink)
    assert asked[0].slices == (Slice("n", 1),) * 2


def test_a_job_starts_beside_one_that_leaves() -> None:
    """0.25 and 0.3 GPUs are free, so the first two jobs are on different GPUs, and stay there after
    the running job has left."""
    leaving = replace(running("leaving", 0.75, "n"), is_leaving=True)
    holders = [Holder("leaving", leaving.slices, {"GPU": 0.75}), holder("stays", 1, {"GPU": 0.7})]
    sizes = [(1, 0.15), (1, 0.15), (2, 0.1)]
    jobs = [job(f"j{at}", number, {"GPU": size}, at) for at, (number, size) in enumerate(sizes)]
    total = {"GPU": 2.0}
    free = offered(total, total, held_on("n", holders))
    node = Node("n", total, with_shared_gpus(free, parts_on("n", holders)))
    facts = Snapshot(tuple(jobs), (node,), True, tuple(holders), running=(leaving,))
    assert started(plan(facts, NOW)) == ["j0", "j1", "j2"]


def test_a_group_leaves_where_its_spare_slots_are_too_few() -> None:
    """After slots were tentatively returned and taken again, the parts are packed as before."""
    others = [running("a", 0.7, "n"), running("b", 0.3, "n")]
    group = running("group", 0.5, "nm", least=1)
    wait, *asked = decide_for_two({"n": 2, "m": 1}, [group], others)
    assert [(type(each), each.job_id) for each in asked] == [(Preempt, "group")]
    assert isinstance(wait, Wait)
    assert set(wait.slices) == {Slice("m", 1), Slice("n", 1)}


def test_silos_on_one_node_are_on_gpus_of_their_own() -> None:
    home = ("label:home=a",)
    total = {"GPU": 4.0, home[0]: 1.0}
    silos = WaitingJob("a", 0, 50, 0, Request(3, {"GPU": 0.15}, homes=(home, home)))
    queue = (silos, job("w", 2, WHOLE, 1))
    facts = Snapshot(queue, (Node("n", total, total),), connected=True)
    assert started(plan(facts, NOW)) == ["a"]


def test_two_jobs_share_the_gpus() -> None:
    both = decide(job("a", 2, HALF, 1), job("b", 2, HALF, 2), gpus=2)
    assert started(both) == ["a", "b"]
    assert started(decide(job("b", 2, HALF), gpus=2, holders=[holder("a", 2, HALF)])) == ["b"]
    full = [holder("a", 2, HALF), holder("b", 2, HALF)]
    assert started(decide(job("c", 1, {"GPU": 0.25}), gpus=2, holders=full)) == []


def test_parts_do_not_start_for_a_gpu_that_another_has_whole() -> None:
    held = [holder("w", 1, WHOLE)]
    assert started(decide(job("a", 2, HALF), gpus=2, holders=held)) == []
    assert started(decide(job("a", 1, HALF), gpus=2, holders=held)) == ["a"]


def test_jobs_of_one_plan_count_beside_each_other() -> None:
    halves, whole = job("a", 2, HALF, 1), job("w", 2, WHOLE, 2)
    assert started(decide(halves, whole, gpus=3)) == ["a"]
    assert started(decide(halves, whole, gpus=4)) == ["a", "w"]


def test_a_whole_gpu_is_one_of_which_nobody_has_a_part() -> None:
    spread = [holder("a", 2, HALF)]
    (waits,) = decide(job("w", 1, WHOLE), gpus=2, holders=spread)
    assert isinstance(waits, Wait), "a GPU's worth is free, half of each"
    assert started(decide(job("w", 1, WHOLE), gpus=3, holders=spread)) == ["w"]
    assert started(decide(job("w", 2, WHOLE), gpus=3, holders=spread)) == []
    packed = [holder(name, 1, HALF) for name in "ab"]
    assert started(decide(job("w", 1, WHOLE), gpus=2, holders=packed)) == ["w"]
    beside = [holder("a", 1, WHOLE), holder("b", 1, HALF)]
    assert started(decide(job("w", 1, WHOLE), gpus=2, holders=beside)) == []


@pytest.mark.parametrize(
    ("free", "parts", "whole"),
    [
        (4.0, [], 4),
        (3.0, [Fractions(0.5, 2)], 2),
        (3.7, [Fractions(0.1, 3)], 1),
        (0.0, [Fractions(0.5, 2), Fractions(0.5, 2)], 0),
        (2.0, [Fractions(0.5, 1), Fractions(0.5, 1), Fractions(0.25, 4)], 0),
    ],
)
def test_whole_gpus_are_counted(free: float, parts: list[Fractions], whole: int) -> None:
    shared = with_shared_gpus({"GPU": free}, parts)
    assert fits(WHOLE, shared) == whole


def test_a_gpu_whose_parts_all_leave_is_one_whole_gpu_soon() -> None:
    total = {"GPU": 3.0}
    holders = [holder("spread", 2, HALF), holder("a", 1, HALF), holder("b", 1, HALF)]
    free = offered(total, total, held_on("n", holders))
    node = Node("n", total, with_shared_gpus(free, parts_on("n", holders)))
    gangs = Gangs(total)
    halves, whole = gangs.of(Request(1, HALF)).kind, gangs.of(Request(1, WHOLE)).kind
    gangs.name_all()
    stock = Stock([node], gangs, Topology((), [node]), holders)
    soon = Pool(stock, When.SOON)
    assert soon.capacity(whole) == 1
    stock.expect("a", halves, (Slice("n", 1),))
    stock.expect("b", halves, (Slice("n", 1),))
    assert soon.capacity(whole) == 1, "the halves of one job are still on two of the three"
    stock.expect("spread", halves, (Slice("n", 2),))
    assert soon.capacity(whole) == 3


def test_what_is_taken_and_returned_leaves_the_same() -> None:
    free = with_shared_gpus({"GPU": 4.0}, [])
    before = dict(free)
    add(free, HALF, -2)
    assert (fits(WHOLE, free), fits(HALF, free)) == (2, 4)
    add(free, WHOLE, -1)
    assert fits(WHOLE, free) == 1
    add(free, WHOLE, 1)
    add(free, HALF, 2)
    assert free == before


def test_gpus_that_nobody_shares_are_counted_as_before() -> None:
    assert fits(WHOLE, {"GPU": 3.5}) == 3
    assert fits({"GPU": 2.0}, {"GPU": 3.5}) == 1
    assert fits(HALF, {"GPU": 1.0}) == 1
    assert fits({"CPU": 1.0}, {"CPU": 2.0}) == 2
