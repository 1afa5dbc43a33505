"""Elastic groups in the plan: they start with the free slots, and grow into the remaining ones."""

from __future__ import annotations

import random
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from dray.spec import Elastic, Resources
from ray_workers.shared.slices import Slice
from service.domain.scheduling.placement.shared_gpus import parts_on, with_shared_gpus
from service.domain.scheduling.placement.slots import count, held_on, offered, request_of
from service.domain.scheduling.policy import (
    Decision,
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
    Stay,
    Wait,
    WaitingJob,
    can_ever_fit,
    plan,
)
from tests.unit.service.domain.scheduling.policy.test_policy import NOW, decide, job, node, started
from tests.unit.service.domain.scheduling.snapshots import busy

CPU = {"CPU": 1.0}


def elastic(name: str, least: int, most: int, *, seq: int = 0, priority: int = 50) -> WaitingJob:
    return WaitingJob(name, 0, priority, seq, Request(most, CPU, least))


def group(
    name: str,
    most: int,
    *slices: Slice,
    lacking: int = 0,
    seq: int = 0,
    priority: int = 50,
    least: int | None = 1,
) -> Growing:
    return Growing(name, 1, priority, seq, Request(most, CPU, least), slices, lacking)


def planned(
    *jobs: WaitingJob, nodes: list[Node], growing: tuple[Growing, ...], **more: Any
) -> list[Decision]:
    holders = tuple(Holder(g.job_id, g.slices, CPU) for g in growing)
    return plan(Snapshot(jobs, tuple(nodes), True, holders, growing=growing, **more), NOW)


def test_an_elastic_job_starts_whole_where_it_can() -> None:
    nodes = [node("n1", CPU=2.0), node("n2", CPU=4.0)]
    assert decide(elastic("a", 1, 4), nodes=nodes) == [Start("a", (Slice("n2", 4),))]


@pytest.mark.parametrize(("free", "workers"), [(3, 3), (2, 2), (1, None)])
def test_else_it_starts_with_what_there_is_from_its_least_number_on(
    free: int, workers: int | None
) -> None:
    (decision,) = decide(elastic("a", 2, 4), nodes=[node("n", free, CPU=4.0)])
    if workers is None:
        assert isinstance(decision, Wait)
        assert decision.reason.message.startswith("needs at least 2 workers of 1 CPU; 1 is free")
    else:
        assert decision == Start("a", (Slice("n", workers),))


def test_it_passes_nobody_who_waits_for_the_same_slots() -> None:
    ahead, behind = job("ahead", 4, seq=1), elastic("behind", 1, 4, seq=2)
    nodes = [node("n", 2, CPU=4.0)]
    first, second = decide(ahead, behind, nodes=nodes, running=busy(nodes))
    assert isinstance(first, Wait)
    assert isinstance(second, Wait)
    assert (second.reason.code, second.blocked_by) == ("behind_in_queue", ("ahead",))


def test_while_it_waits_nobody_passes_it_on_the_slots_of_its_minimum() -> None:
    nodes = [node("n", 1, CPU=2.0)]
    jobs = elastic("ahead", 2, 4, seq=1), job("behind", 1, seq=2)
    assert started(decide(*jobs, nodes=nodes, running=busy(nodes))) == []


def test_its_least_number_must_fit_the_cluster_and_not_the_whole() -> None:
    nodes = [node("n", CPU=4.0)]
    assert decide(elastic("a", 4, 9), nodes=nodes) == [Start("a", (Slice("n", 4),))]
    (decision,) = decide(elastic("a", 5, 9), nodes=nodes)
    assert isinstance(decision, Impossible)
    assert "needs at least 5 workers of 1 CPU, but" in decision.reason.message
    resources = Resources(num_workers=9)
    assert can_ever_fit(request_of(resources, Elastic(min_workers=4)), nodes) is None
    assert can_ever_fit(request_of(resources), nodes) is not None


def test_a_group_grows_with_what_is_free() -> None:
    running = group("a", 4, Slice("n1", 1))
    nodes = [node("n1", 1, CPU=2.0), node("n2", 1, CPU=1.0)]
    assert planned(nodes=nodes, growing=(running,)) == [Grow("a", (Slice("n1", 1), Slice("n2", 1)))]
    nodes = [node("n1", 6, CPU=8.0)]
    assert planned(nodes=nodes, growing=(running,)) == [Grow("a", (Slice("n1", 3),))]


def test_a_group_grows_after_the_queue_and_only_with_what_nobody_there_has_a_claim_to() -> None:
    running = group("a", 4, Slice("n", 1))
    start, stay = planned(job("b", 2), nodes=[node("n", 2, CPU=4.0)], growing=(running,))
    assert start == Start("b", (Slice("n", 2),))
    assert isinstance(stay, Stay)
    nodes, there = [node("n", 2, CPU=4.0)], busy([node("n", 3, CPU=4.0)])
    wait, stay = planned(job("b", 4), nodes=nodes, growing=(running,), running=there)
    assert isinstance(wait, Wait)
    assert isinstance(stay, Stay)
    assert (stay.reason.code, stay.blocked_by) == ("behind_in_queue", ("b",))
    assert stay.reason.message == (
        "could grow by 3 workers of 1 CPU; 2 are free, but job b comes first and "
        "could use the same slots"
    )


def test_a_group_does_not_grow_into_what_a_job_that_backs_off_could_use() -> None:
    early = job("b", 2, not_before=NOW + timedelta(seconds=5))
    wait, stay = planned(
        early, nodes=[node("n", 2, CPU=3.0)], growing=(group("a", 4, Slice("n", 1)),)
    )
    assert isinstance(wait, Wait)
    assert wait.reason.code == "backing_off"
    assert isinstance(stay, Stay)
    assert stay.blocked_by == ("b",)
    grow = planned(early, nodes=[node("n", 3, CPU=4.0)], growing=(group("a", 4, Slice("n", 1)),))[1]
    assert grow == Grow("a", (Slice("n", 1),))


def test_of_two_groups_the_more_urgent_grows_first_and_then_the_earlier() -> None:
    urgent = group("urgent", 2, Slice("n", 1), seq=3, priority=90)
    late, early = group("late", 2, Slice("n", 1), seq=2), group("early", 2, Slice("n", 1), seq=1)
    decisions = planned(nodes=[node("n", 2, CPU=5.0)], growing=(late, urgent, early))
    assert decisions[:2] == [Grow("urgent", (Slice("n", 1),)), Grow("early", (Slice("n", 1),))]
    stay = decisions[2]
    assert isinstance(stay, Stay)
    assert stay.job_id == "late"
    assert stay.reason.message == (
        "could grow by 1 worker of 1 CPU; 0 are free, and jobs urgent, early hold 4 slots "
        "on suitable nodes"
    )


def test_a_group_that_has_all_there_is_says_so() -> None:
    (stay,) = planned(nodes=[node("n", 0, CPU=2.0)], growing=(group("a", 4, Slice("n", 2)),))
    assert isinstance(stay, Stay)
    assert stay.reason.message.endswith(
        "0 are free, and the job already holds all suitable slots of the cluster"
    )
    (stay,) = planned(nodes=[node("n", 0, CPU=3.0)], growing=(group("a", 4, Slice("n", 2)),))
    assert isinstance(stay, Stay)
    assert stay.reason.message.endswith(
        "0 are free, and other programs use the rest of the cluster"
    )


def test_a_group_that_lost_slots_and_waits_is_served_before_the_queue() -> None:
    """A group that keeps its size also gets slots, even before more urgent jobs."""
    lost = group("a", 2, Slice("n1", 1), lacking=1, least=None)
    nodes = [node("n1", 0, CPU=1.0), node("n2", 1, CPU=1.0)]
    wait, grow = planned(job("b", 1, priority=90), nodes=nodes, growing=(lost,))
    assert isinstance(wait, Wait)
    assert wait.blocked_by == ("a",)
    assert grow == Grow("a", (Slice("n2", 1),))


def test_a_waiting_group_gets_the_workers_that_it_lacks_and_no_more() -> None:
    lost = group("a", 4, Slice("n", 1), lacking=1, least=2)
    decisions = planned(job("b", 2), nodes=[node("n", 3, CPU=4.0)], growing=(lost,))
    assert decisions == [Start("b", (Slice("n", 2),)), Grow("a", (Slice("n", 1),))]


def test_the_more_urgent_of_two_waiting_groups_is_served_first_and_then_the_earlier() -> None:
    nodes = [node("n", free=1.0, CPU=3.0)]
    late = group("late", 2, Slice("n", 1), lacking=1, seq=2)
    for first in (
        group("first", 2, Slice("n", 1), lacking=1, seq=1),
        group("first", 2, Slice("n", 1), lacking=1, seq=3, priority=60),
    ):
        found = planned(nodes=nodes, growing=(late, first))
        assert [each.job_id for each in found if isinstance(each, Grow)] == ["first"]


def test_a_group_that_gets_what_it_lacks_leaves_for_nobody_in_the_same_plan() -> None:
    lacks = group("lacks", 2, Slice("n", 1), lacking=1, least=None)
    runs = RunningJob(
        *("lacks", 50, 0, Request(1, CPU), lacks.slices, 1000.0), left_s=9e4, yields=True
    )
    urgent = elastic("urgent", 2, 2, priority=60)
    nodes = [node("n", free=2.0, CPU=3.0)]
    wait, grow = planned(urgent, nodes=nodes, growing=(lacks,), running=(runs,))
    assert grow == Grow("lacks", (Slice("n", 1),))
    assert isinstance(wait, Wait)
    assert wait.reason.code == "waiting_for_slots"


def test_a_group_that_is_asked_for_slots_gets_none_in_the_same_plan() -> None:
    small = group("small", 3, Slice("n", 1), Slice("n", 1))
    runs = RunningJob(
        *("small", 50, 0, Request(2, CPU), small.slices, 1000.0),
        yields=True,
        spare=(Slice("n", 1),),
    )
    nodes = [node("n", free=1.0, CPU=3.0), node("m", free=1.0, CPU=1.0, GPU=1.0)]
    wide = WaitingJob("wide", 0, 50, 9, Request(2, CPU, required_level="node"))
    wait, stay, shrink = planned(wide, nodes=nodes, growing=(small,), running=(runs,))
    assert isinstance(wait, Wait)
    assert isinstance(shrink, Shrink)
    assert isinstance(stay, Stay)
    assert (stay.reason.code, stay.blocked_by) == ("asked_for_slots", ("wide",))


@pytest.mark.parametrize(("gpus", "more"), [(1, 0), (2, 1), (3, 2)])
def test_a_group_on_parts_of_gpus_grows_on_others_of_its_node(gpus: int, more: int) -> None:
    part = {"GPU": 0.25}
    small = Growing("g", 1, 50, 0, Request(3, part, 1), (Slice("n", 1),))
    holders = (Holder("g", small.slices, part),)
    total = {"GPU": float(gpus)}
    free = with_shared_gpus(offered(total, total, held_on("n", holders)), parts_on("n", holders))
    there = (Node("n", total, free),)
    (found,) = plan(Snapshot((), there, True, holders, growing=(small,)), NOW)
    assert isinstance(found, Grow if more else Stay)
    assert not more or found == Grow("g", (Slice("n", more),))


def test_a_group_does_not_grow_onto_a_gpu_that_is_promised() -> None:
    """The leaving job is on two GPUs, one of them shared with the group. The waiting job will use
    all GPUs that the group does not use."""
    part, request = {"GPU": 0.35}, Request(2, {"GPU": 0.4})
    small = Growing("g", 1, 50, 0, Request(2, part, 1), (Slice("n", 1),))
    leaving = RunningJob("a", 50, 1, request, (Slice("n", 2),), 0.0, is_leaving=True)
    holders = (Holder("g", small.slices, part), Holder("a", leaving.slices, request.bundle))
    total = {"GPU": 4.0}
    free = with_shared_gpus(offered(total, total, held_on("n", holders)), parts_on("n", holders))
    waiting = (WaitingJob("w", 0, 60, 9, Request(3, {"GPU": 0.7})),)
    nodes = (Node("n", total, free),)
    facts = Snapshot(waiting, nodes, True, holders, growing=(small,), running=(leaving,))
    wait, stay = plan(facts, NOW)
    assert isinstance(wait, Wait)
    assert wait.slices == (Slice("n", 3),)
    assert isinstance(stay, Stay)
    assert stay.blocked_by == ("w",)


def test_slots_that_are_not_free_yet_are_set_aside_for_a_waiting_group() -> None:
    lost = group("a", 3, Slice("n1", 1), lacking=2, least=3)
    nodes = [node("n1", 0, CPU=1.0), node("n2", 1, CPU=2.0)]
    wait, stay = planned(job("b", 1), nodes=nodes, growing=(lost,))
    assert isinstance(wait, Wait)
    assert (wait.reason.code, wait.blocked_by) == ("behind_in_queue", ("a",))
    assert isinstance(stay, Stay)
    assert stay.reason.message.startswith("waits for 2 workers of 1 CPU; 1 is free")


def test_a_group_that_trains_without_missing_workers_does_not_wait() -> None:
    lost = replace(group("a", 3, Slice("n1", 2), lacking=1, least=3), trains=True)
    (stay,) = planned(nodes=[node("n1", 0, CPU=2.0)], growing=(lost,))
    assert isinstance(stay, Stay)
    assert stay.reason.message.startswith("continues without 1 worker of 1 CPU; 0 are free")


def test_a_full_storage_keeps_groups_from_growing_but_not_from_being_mended() -> None:
    lost, small = group("a", 2, Slice("n", 1), lacking=1), group("b", 2, Slice("n", 1))
    decisions = planned(
        job("c"), nodes=[node("n", 2, CPU=4.0)], growing=(small, lost), storage_problem="it is full"
    )
    assert [type(decision) for decision in decisions] == [Wait, Grow, Stay]


def test_without_a_cluster_nobody_grows() -> None:
    growing = (group("a", 2, Slice("n", 1), lacking=1), group("b", 2, Slice("n", 1)))
    decisions = plan(Snapshot((), (node("n", CPU=4.0),), False, growing=growing), NOW)
    assert [type(decision) for decision in decisions] == [Stay, Stay]


def _storm(seed: int) -> tuple[list[Node], list[WaitingJob], tuple[Growing, ...]]:
    chance = random.Random(seed)
    cpus = {name: float(chance.randint(1, 8)) for name in "abc"}
    left = dict(cpus)
    growing = []
    for number in range(4):
        name = chance.choice("abc")
        if left[name] < 1:
            continue
        left[name] -= 1
        lacking = chance.choice((0, 0, 1, 2))
        growing.append(
            group(f"g{number}", chance.randint(2, 6), Slice(name, 1), lacking=lacking, seq=number)
        )
    nodes = [node(name, float(chance.randint(0, int(left[name]))), CPU=cpus[name]) for name in cpus]
    queue = []
    for number in range(5):
        most = chance.randint(1, 6)
        least = chance.randint(1, most)
        kind = chance.choice((elastic(f"j{number}", least, most, seq=number), None))
        queue.append(kind or job(f"j{number}", most, seq=number))
    return nodes, queue, tuple(growing)


def test_starts_and_growth_together_never_take_more_than_there_is() -> None:
    for seed in range(300):
        nodes, queue, growing = _storm(seed)
        decisions = planned(*queue, nodes=nodes, growing=growing)
        assert sorted(d.job_id for d in decisions) == sorted(
            [j.job_id for j in queue] + [g.job_id for g in growing]
        )
        given = [d for d in decisions if isinstance(d, Start | Grow)]
        taken = [Holder(d.job_id, d.slices, CPU) for d in given]
        for there in nodes:
            assert held_on(there.id, taken).get("CPU", 0.0) <= there.available_to_us["CPU"]
        wanted = {j.job_id: (j.request.least, j.request.num_workers) for j in queue}
        wanted |= {g.job_id: (g.lacking or 1, g.lacking or g.most) for g in growing}
        for decision in given:
            least, most = wanted[decision.job_id]
            assert least <= count(decision.slices) <= most


def test_no_growth_and_no_elastic_start_delays_who_waits_ahead() -> None:
    """When all earlier jobs have ended, the first job in the queue starts, regardless of which
    groups have grown."""
    for seed in range(300):
        nodes, queue, growing = _storm(seed)
        calm = tuple(g for g in growing if not g.lacking)
        decisions = planned(*queue, nodes=nodes, growing=calm, running=busy(nodes))
        if not isinstance(decisions[0], Wait):
            continue
        given = [d for d in decisions if isinstance(d, Start | Grow)]
        passed = [Holder(d.job_id, d.slices, CPU) for d in given]
        later = [
            Node(n.id, n.total, offered(n.total, n.total, held_on(n.id, passed))) for n in nodes
        ]
        assert started(decide(queue[0], nodes=later)) == [queue[0].job_id]
