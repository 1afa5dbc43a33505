"""Requests to Ray's autoscaler: complete gangs that can start, in addition to all nodes in use."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from ray_workers.shared.slices import Slice
from service.config.node_types import NodeType
from service.domain.scheduling import autoscaling
from service.domain.scheduling.autoscaling import Demand, may_come
from service.domain.scheduling.placement.shared_gpus import parts_on, with_shared_gpus
from service.domain.scheduling.policy import (
    Growing,
    Holder,
    Impossible,
    Node,
    Request,
    RunningJob,
    Snapshot,
    Start,
    Wait,
    WaitingJob,
    plan,
)
from service.domain.scheduling.rules.dependencies import Dependency
from service.domain.scheduling.rules.queues import Queue

NOW = datetime(2026, 1, 1, 14, 3, 7, tzinfo=UTC)
SMALL = NodeType({"CPU": 4.0}, 3)
CPU = (("CPU", 1.0),)
WHOLE = (("CPU", 4.0),)


def job(name: str, workers: int, seq: int = 0, *, cpus: float = 1.0, **more: Any) -> WaitingJob:
    least = more.pop("least", None)
    request = Request(workers, {"CPU": cpus}, least)
    return replace(WaitingJob(name, 0, 50, seq, request, waited_s=0.0), **more)


def node(name: str, free: float = 4.0, total: float = 4.0, *, accepted: bool = True) -> Node:
    return Node(name, {"CPU": total}, {"CPU": free}, accepted)


def asked(
    *jobs: WaitingJob,
    nodes: Sequence[Node] = (),
    joining: Sequence[Node] = (),
    types: Sequence[NodeType] = (SMALL,),
    in_use: Sequence[str] | None = None,
    **snapshot: Any,
) -> Demand:
    """Return the demand after a plan. By default, a node is in use unless all of its resources are
    free."""
    present = (*nodes, *joining)
    new = may_come(types, present)
    found = Snapshot(jobs, tuple(nodes), connected=True, to_come=(*joining, *new), **snapshot)
    if in_use is None:
        in_use = [each.id for each in present if each.available_to_us != each.total]
    return autoscaling.demand(found, plan(found, NOW), present, new, in_use)


def test_a_gang_asks_for_the_workers_that_no_present_node_has_room_for() -> None:
    demand = asked(job("a", 6), nodes=[node("n")])
    assert demand.bundles == ((CPU, 2), (WHOLE, 1))
    assert (demand.num_nodes, demand.nodes_of, demand.needed) == (1, {"a": 1}, {"n"})


def test_nodes_in_use_are_asked_for_whole_since_the_request_is_a_floor() -> None:
    """Otherwise, Ray would find room on them, because it assumes that the cluster is empty."""
    demand = asked(job("a", 3, cpus=2.0), nodes=[node("m", free=3.0), node("n", free=1.0)])
    assert demand.bundles == (((("CPU", 2.0),), 2), (WHOLE, 2))
    assert demand.num_nodes == 1


def test_a_gpu_of_which_a_job_has_a_part_is_no_room_for_a_job_with_whole_gpus() -> None:
    total = {"GPU": 2.0}
    held = Holder("held", (Slice("n", 2),), {"GPU": 0.5})
    free = with_shared_gpus({"GPU": 1.0}, parts_on("n", [held]))
    waiting = WaitingJob("a", 0, 50, 0, Request(1, {"GPU": 1.0}), waited_s=0.0)
    nodes, types = [Node("n", total, free)], [NodeType(total, 3)]
    assert asked(waiting, nodes=nodes, types=types, holders=(held,)).num_nodes == 1


def test_nothing_is_asked_for_where_no_job_waits_for_room() -> None:
    assert asked(nodes=[node("n", free=1.0)]) == autoscaling.NOTHING
    demand = asked(job("starts", 2), nodes=[node("n")])
    assert (demand.bundles, demand.nodes_of) == ((), {})
    assert demand.needed == {"n"}


def test_a_cluster_without_a_node_asks_too() -> None:
    demand = asked(job("a", 8))
    assert (demand.bundles, demand.num_nodes) == (((CPU, 8),), 2)


def test_a_gang_is_asked_for_whole_or_not_at_all() -> None:
    """An autoscaler can ignore requests that it can't fulfill, so this request contains nothing
    else."""
    large, small = job("large", 12, 1), job("small", 6, 2)
    demand = asked(large, small, nodes=[node("n", free=0.0)])
    assert demand.nodes_of == {"small": 2}
    assert demand.without_hope == {"large"}
    assert demand.bundles == ((CPU, 6), (WHOLE, 1))


def test_a_long_queue_asks_for_no_more_than_the_types_of_nodes_allow() -> None:
    demand = asked(*(job(f"j{number}", 1, number) for number in range(10_000)))
    assert (demand.bundles, demand.num_nodes) == (((CPU, 12),), 3)
    assert list(demand.nodes_of) == [f"j{number}" for number in range(12)]
    assert len(demand.without_hope) == 10_000 - 12


GIB = float(2**30)


def test_a_type_has_no_more_memory_than_the_nodes_that_came_of_it() -> None:
    small, large = (NodeType({"CPU": n, "memory": n * GIB}, 2) for n in (4.0, 8.0))

    def of(name: str, cpus: float, gib: float) -> Node:
        return Node(name, {"CPU": cpus, "memory": gib * GIB}, {})

    types = (small, large, SMALL)
    seen = autoscaling.memory_seen(types, [of("a", 4.0, 2.0), of("b", 16.0, 1.0)], {})
    assert seen == {0: 2 * GIB}
    seen = autoscaling.memory_seen(types, [of("c", 4.0, 3.0), of("d", 8.0, 9.0)], seen)
    real = autoscaling.as_seen(types, seen)
    assert [each.resources.get("memory") for each in real] == [3 * GIB, 8 * GIB, None]
    assert autoscaling.as_seen(types, {}) == types


def test_why_nodes_whose_memory_was_promised_are_not_asked_for() -> None:
    promised = (NodeType({"CPU": 4.0, "GPU": 1.0, "memory": 4 * GIB}, 2), SMALL)
    real = autoscaling.as_seen(promised, {0: 3.5 * GIB})

    def why(gib: float) -> str | None:
        request = Request(1, {"CPU": 1.0, "memory": gib * GIB})
        return autoscaling.why_too_small(request, promised, real)

    assert (why(3.0), why(5.0)) == (None, None)
    assert why(4.0) == (
        "no nodes are requested: nodes with 4 CPU, 1 GPU have only 3.5 GiB of memory, "
        "but DRAY_AUTOSCALE_NODES specifies 4 GiB of memory"
    )


def test_a_waiting_group_requests_its_missing_workers_before_the_queue() -> None:
    slices = (Slice("n", 4),)
    group = Growing("group", 1, 50, 0, Request(7, {"CPU": 1.0}), slices, lacking=3)
    grows = replace(group, job_id="grows", lacking=0, request=Request(12, {"CPU": 1.0}, 1))
    demand = asked(
        job("a", 8),
        nodes=[node("n", free=0.0)],
        types=(replace(SMALL, most=3),),
        growing=(group, grows),
    )
    assert demand.nodes_of == {"group": 1}
    assert (demand.bundles, demand.num_nodes) == (((CPU, 3), (WHOLE, 1)), 1)
    assert demand.without_hope == {"a"}


def test_the_types_count_the_nodes_that_are_there() -> None:
    big = NodeType({"CPU": 8.0, "memory": 64.0}, 2)
    there = [node("n"), Node("m", {"CPU": 8.0, "memory": 63.0}, {"CPU": 8.0})]
    assert [new.total["CPU"] for new in may_come((SMALL, big), there)] == [4.0, 4.0, 8.0]
    assert may_come((replace(SMALL, most=1),), there) == ()
    assert may_come((replace(SMALL, most=1),), [node("n"), node("o")]) == ()


@pytest.mark.parametrize(
    "waits",
    [
        {"held": "ann"},
        {"queue": "full"},
        {"after": (Dependency("job-1", "success", "RUNNING"),)},
        {"not_before": NOW + timedelta(minutes=1)},
        {"preparing": "its environment is being prepared"},
    ],
    ids=lambda waits: next(iter(waits)),
)
def test_jobs_that_wait_for_something_else_ask_for_nothing(waits: dict[str, Any]) -> None:
    demand = asked(
        job("a", 8, **waits),
        nodes=[node("n", free=1.0)],
        queues=(Queue("default"), Queue("full", max_running=0)),
    )
    assert (demand.bundles, demand.nodes_of, demand.without_hope) == ((), {}, frozenset())


def test_nodes_where_a_job_is_about_to_start_stay() -> None:
    demand = asked(job("a", 2, preparing="it is built"), nodes=[node("n"), node("o", total=1.0)])
    assert (demand.bundles, demand.needed) == ((), {"n", "o"})


def test_slots_that_others_are_about_to_leave_are_not_asked_for_again() -> None:
    slices = (Slice("n", 4),)
    running = RunningJob(
        *("low", 10, 1, Request(4, {"CPU": 1.0}), slices),
        held_s=1000.0,
        left_s=None,
        waited_s=0.0,
        lost_s=0.0,
        yields=True,
        is_leaving=False,
    )
    holders = (Holder("low", slices, {"CPU": 1.0}),)
    demand = asked(
        job("high", 4, 2), nodes=[node("n", free=0.0)], running=(running,), holders=holders
    )
    assert demand.bundles == ()


def test_a_node_that_is_about_to_be_accepted_counts_as_capacity_and_is_not_requested_again() -> (
    None
):
    joining = node("n")
    demand = asked(job("a", 4), joining=[joining], in_use=[])
    assert (demand.bundles, demand.num_nodes) == (((WHOLE, 1),), 0)
    assert demand.needed == {"n"}


def test_refused_nodes_are_requested_whole_because_ray_counts_them_as_capacity() -> None:
    present = (node("old", accepted=False),)
    new = may_come((SMALL,), present)
    found = Snapshot((job("a", 4),), present, connected=True, to_come=new)
    demand = autoscaling.demand(found, plan(found, NOW), present, new, in_use=())
    assert (demand.bundles, demand.num_nodes) == (((CPU, 4), (WHOLE, 1)), 1)


def test_idle_nodes_that_no_waiting_job_can_use_are_left_to_ray() -> None:
    large = NodeType({"CPU": 16.0}, 1)
    demand = asked(job("a", 1, cpus=16.0), nodes=[node("idle")], types=(SMALL, large))
    assert demand.bundles == (((("CPU", 16.0),), 1),)
    assert demand.needed == frozenset()


def test_a_whole_node_is_asked_for_by_what_is_counted_and_by_its_accelerator() -> None:
    total = {"CPU": 16.0, "GPU": 4.0, "memory": 1e9, "accelerator_type:H100": 1.0}
    gpus = Node("n", total, {**total, "GPU": 0.0})
    wants = WaitingJob("a", 0, 50, 0, Request(4, {"CPU": 1.0, "GPU": 1.0}), waited_s=0.0)
    demand = asked(wants, nodes=[gpus], types=(NodeType(total, 2),))
    whole = (("CPU", 16.0), ("GPU", 4.0), ("accelerator_type:H100", 0.001))
    assert dict(demand.bundles) == {whole: 1, (("CPU", 1.0), ("GPU", 1.0)): 4}


def test_an_elastic_group_asks_for_its_least_number() -> None:
    demand = asked(job("a", 12, least=5), nodes=[node("n", free=0.0)])
    assert demand.bundles == ((CPU, 5), (WHOLE, 1))


def test_a_job_that_only_nodes_to_come_can_run_waits_for_them_and_says_so() -> None:
    found = Snapshot((job("a", 8),), (node("n"),), True, to_come=may_come((SMALL,), [node("n")]))
    (decision,) = plan(found, NOW)
    assert isinstance(decision, Wait)
    assert decision.reason.code == "waiting_for_nodes"
    assert decision.reason.message == (
        "needs 8 workers of 1 CPU, and waits for nodes: needs 8 workers of 1 CPU, "
        "but the whole cluster has room for 4 at once"
    )


def test_a_job_that_no_node_to_come_could_run_is_impossible() -> None:
    found = Snapshot((job("a", 1, cpus=5.0),), (), True, to_come=may_come((SMALL,), ()))
    (decision,) = plan(found, NOW)
    assert isinstance(decision, Impossible)
    assert "the largest node has 4 CPU" in decision.reason.message


def test_jobs_start_where_there_is_room_while_others_wait_for_nodes() -> None:
    """A different kind of node accepts a job behind one that waits for nodes."""
    gpus = NodeType({"CPU": 4.0, "GPU": 1.0}, 1)
    waits = WaitingJob("gpu", 0, 50, 0, Request(1, {"CPU": 1.0, "GPU": 1.0}), waited_s=0.0)
    found = Snapshot((waits, job("cpu", 1, 1)), (node("n"),), True, to_come=may_come((gpus,), ()))
    first, second = plan(found, NOW)
    assert isinstance(first, Wait)
    assert isinstance(second, Start)


def test_the_sentence_says_how_many_and_since_when() -> None:
    assert autoscaling.sentence(1, NOW) == "Ray was asked for 1 more node at 14:03:07 UTC"
    assert autoscaling.sentence(2, NOW) == "Ray was asked for 2 more nodes at 14:03:07 UTC"
