"""Placement by topology: close together, within a required level, and with small gaps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dray.spec import Resources
from ray_workers.shared.slices import Slice
from service.config.node_types import NodeType, label_resources
from service.domain.scheduling import autoscaling
from service.domain.scheduling.outlook.counterfactuals import Choices, JobQuestions
from service.domain.scheduling.outlook.simulation import Simulation
from service.domain.scheduling.outlook.situation import Situation
from service.domain.scheduling.placement.phrases import needs
from service.domain.scheduling.placement.slots import held_on, offered, request_of
from service.domain.scheduling.policy import (
    Decision,
    Grow,
    Growing,
    Holder,
    Impossible,
    Node,
    Preempt,
    Request,
    RunningJob,
    Snapshot,
    Start,
    Stay,
    Wait,
    WaitingJob,
    plan,
)
from service.domain.scheduling.rules.eviction import MIN_RUN_S
from tests.unit.service.domain.scheduling.outlook.test_counterfactuals import Multiples
from tests.unit.service.domain.scheduling.policy.oracle import Oracle

NOW = datetime(2026, 1, 1, tzinfo=UTC)
HOUR = 3600.0
GPU = {"GPU": 1.0}
LEVELS = ("zone", "rack")


def node(name: str, gpus: float, free: float | None = None, **labels: str) -> Node:
    there = {"GPU": gpus if free is None else free}
    return Node.labelled(name, {"GPU": gpus}, there, labels)


def waits(name: str, gpus: int, level: str | None = None, **more: Any) -> WaitingJob:
    request = Request(gpus, GPU, more.pop("least", None), level)
    job = WaitingJob(name, 0, 50, more.pop("seq", 100), request, left_s=HOUR, waited_s=0.0)
    return replace(job, **more)


def runs(name: str, slices: Mapping[str, int], level: str | None = None, **more: Any) -> RunningJob:
    parts = tuple(Slice(node_id, number) for node_id, number in slices.items())
    request = Request(sum(slices.values()), GPU, None, level)
    return replace(RunningJob(name, 50, 1, request, parts, MIN_RUN_S, HOUR), **more)


def seen(
    queue: Sequence[WaitingJob],
    nodes: Sequence[Node],
    running: Sequence[RunningJob] = (),
    growing: Sequence[Growing] = (),
    levels: tuple[str, ...] = LEVELS,
) -> Snapshot:
    """Return a snapshot in which the slots of running jobs are not free."""
    holders = [Holder(each.job_id, each.slices, GPU) for each in (*running, *growing)]
    left = (offered(n.total, n.available_to_us, held_on(n.id, holders)) for n in nodes)
    return Snapshot(
        tuple(queue),
        tuple(replace(n, available_to_us=free) for n, free in zip(nodes, left, strict=True)),
        connected=True,
        holders=tuple(holders),
        running=tuple(running),
        growing=tuple(growing),
        topology=levels,
    )


def decide(*args: Any, **more: Any) -> list[Decision]:
    return plan(seen(*args, **more), NOW)


def placed(*args: Any, **more: Any) -> dict[str, int]:
    """Return the nodes of the job that starts, or of the group that grows, in rank order."""
    (decision,) = decide(*args, **more)
    assert isinstance(decision, Start | Grow), decision
    return {part.node_id: part.num_workers for part in decision.slices}


def row(rack: str, *gpus: float, zone: str = "z1", free: Sequence[float] = ()) -> list[Node]:
    """Return the nodes `RACK-1`, `RACK-2`, and so on."""
    left = free or gpus
    return [
        node(f"{rack}-{at}", total, left[at - 1], zone=zone, rack=rack)
        for at, total in enumerate(gpus, 1)
    ]


def test_a_gang_that_no_node_holds_goes_into_the_narrowest_domain_that_does() -> None:
    nodes = [*row("r1", 6, 4), *row("r2", 8)]
    assert placed([waits("a", 10)], nodes) == {"r1-1": 6, "r1-2": 4}
    # Without the topology, the job gets the largest node, and for the rest, the best-fitting one.
    assert placed([waits("a", 10)], nodes, levels=()) == {"r2-1": 8, "r1-2": 2}


def test_one_node_comes_before_any_domain_and_equal_nodes_of_the_fullest_domain_are_taken() -> None:
    nodes = [*row("r1", 4, 4, 4), *row("r2", 4, 4), *row("r3", 8)]
    assert placed([waits("a", 4)], nodes) == {"r2-1": 4}
    assert placed([waits("a", 3)], [*nodes, *row("r4", 3, 9)]) == {"r4-1": 3}
    assert placed([waits("a", 8)], nodes) == {"r3-1": 8}


def test_of_several_domains_the_one_with_the_smallest_gap_is_taken_and_large_ones_stay_whole() -> (
    None
):
    nodes = [*row("r1", 4, 4, 4, 4), *row("r2", 4, 4, 4), *row("r3", 4, 2)]
    assert placed([waits("a", 6)], nodes) == {"r3-1": 4, "r3-2": 2}
    assert placed([waits("a", 8)], nodes) == {"r2-1": 4, "r2-2": 4}


def test_of_equal_domains_the_one_where_it_needs_the_fewest_nodes_is_taken() -> None:
    nodes = [*row("r1", 2, 2, 2), *row("r2", 3, 3)]
    assert placed([waits("a", 6)], nodes) == {"r2-1": 3, "r2-2": 3}


def test_of_equal_domains_the_one_in_the_fullest_zone_is_taken() -> None:
    nodes = [*row("r1", 4, 4), *row("r2", 4, 4), *row("r3", 4, 4, zone="z2")]
    assert placed([waits("a", 8)], nodes) == {"r3-1": 4, "r3-2": 4}


def test_a_gang_larger_than_any_domain_takes_as_few_as_possible_one_after_the_other() -> None:
    """Neighbouring ranks are close together: the slices of a domain are consecutive."""
    nodes = [
        *row("r1", 2, 2),
        *row("r2", 4, 4),
        *row("r3", 4, 2, zone="z2"),
        *row("r4", 1, 1, zone="z2"),
    ]
    found = placed([waits("a", 15)], nodes)
    assert found == {"r2-1": 4, "r2-2": 4, "r1-1": 2, "r1-2": 2, "r3-1": 3}
    assert list(found) == ["r2-1", "r2-2", "r1-1", "r1-2", "r3-1"]
    assert list(placed([waits("a", 20)], nodes)) == [
        *("r2-1", "r2-2", "r1-1", "r1-2"),
        *("r3-1", "r3-2", "r4-1", "r4-2"),
    ]


def test_a_node_outside_of_all_domains_is_one_part_among_them() -> None:
    nodes = [node("n1", 4), *row("r1", 4, 4), *row("r2", 4, 4, zone="z2"), node("n2", 9)]
    assert placed([waits("a", 14)], nodes[:5]) == {"r1-1": 4, "r1-2": 4, "r2-1": 4, "r2-2": 2}
    assert placed([waits("a", 20)], nodes) == {"n2": 9, "r1-1": 4, "r1-2": 4, "r2-1": 3}


def test_a_node_without_a_label_of_a_level_is_in_no_domain_of_it() -> None:
    nodes = [node("n1", 4), node("n2", 4), *row("r1", 4, 4)]
    assert placed([waits("a", 8)], nodes) == {"r1-1": 4, "r1-2": 4}
    (decision,) = decide([waits("a", 12, "rack")], nodes)
    assert isinstance(decision, Impossible)
    bare = [node("n1", 4, rack="r1"), node("n2", 4, zone="z1", rack="r1"), *nodes[:1]]
    (decision,) = decide([waits("a", 8, "rack")], bare)
    assert isinstance(decision, Impossible), "racks of different zones may have one name"
    # Racks without a zone are treated as zones.
    assert placed([waits("a", 8, "zone")], [node(n, 4, rack="r1") for n in "ab"]) == {
        "a": 4,
        "b": 4,
    }


def test_nodes_whose_label_is_empty_are_in_no_domain_together() -> None:
    nodes = [node(name, 4, zone="z1", rack="") for name in "ab"]
    (decision,) = decide([waits("a", 8, "rack")], nodes)
    assert isinstance(decision, Impossible), "no label puts them in one rack"
    assert placed([waits("a", 8, "zone")], nodes) == {"a": 4, "b": 4}


def test_an_elastic_gang_gets_all_that_is_free_and_that_as_near_as_possible() -> None:
    nodes = [*row("r1", 4, 4), *row("r2", 2)]
    assert placed([waits("a", 16, least=2)], nodes) == {"r1-1": 4, "r1-2": 4, "r2-1": 2}
    assert placed([waits("a", 16, "rack", least=2)], nodes) == {"r1-1": 4, "r1-2": 4}


NODES = st.tuples(
    st.integers(0, 4), st.sampled_from([None, "1", "2"]), st.sampled_from([None, "1", "2", "3"])
)


@given(
    nodes=st.lists(NODES, min_size=2, max_size=12),
    gang=st.tuples(st.integers(1, 24), st.sampled_from([None, None, "zone", "rack", "node"])),
    behind=st.integers(1, 8),
)
def test_gangs_are_near_together_and_within_their_level_on_any_cluster(
    nodes: list[tuple[int, str | None, str | None]], gang: tuple[int, str | None], behind: int
) -> None:
    there = []
    for at, (free, zone, rack) in enumerate(nodes):
        labels = {"zone": zone, "rack": rack}
        named = {key: value for key, value in labels.items() if value is not None}
        there.append(node(f"n{at}", 4, free, **named))
    found = seen([waits("a", *gang), waits("b", behind)], there)
    Oracle(found, NOW).check(plan(found, NOW))


# Required levels.


def test_a_gang_waits_for_room_in_one_domain_and_says_so() -> None:
    nodes = [*row("r1", 4, 4, free=(4, 2)), *row("r2", 4, 4, free=(4, 0))]
    (decision,) = decide([waits("a", 8, "rack")], nodes)
    assert isinstance(decision, Wait)
    assert decision.reason.code == "waiting_for_domain"
    assert decision.reason.message == (
        "needs 8 workers of 1 GPU within one rack; 10 are free, but only 6 within one rack (r1), "
        "and other programs use the rest of the cluster"
    )
    (decision,) = decide([waits("a", 8, "rack")], nodes[:2])
    assert isinstance(decision, Wait)
    assert decision.reason.code == "waiting_for_slots"
    assert placed([waits("a", 6, "rack")], nodes) == {"r1-1": 4, "r1-2": 2}
    assert placed([waits("a", 8, "zone")], nodes) == {"r1-1": 4, "r1-2": 2, "r2-1": 2}


@pytest.mark.parametrize(
    ("gpus", "level", "message"),
    [
        (9, "rack", "within one rack, but the largest rack, r1, has room for 8 at once"),
        (5, "node", "within one node, but the largest node, r1-1, has room for 4 at once"),
        (13, "zone", "but the whole cluster has room for 12 at once"),
        (
            2,
            "row",
            "but 'row' is not a level of the topology (DRAY_TOPOLOGY), whose levels are zone, "
            "rack, node",
        ),
    ],
)
def test_a_gang_that_no_domain_could_hold_is_impossible(
    gpus: int, level: str, message: str
) -> None:
    (decision,) = decide([waits("a", gpus, level)], [*row("r1", 4, 4), *row("r2", 4)])
    assert isinstance(decision, Impossible)
    assert decision.reason.code == "unsatisfiable"
    assert decision.reason.message.endswith(message)


def test_one_node_may_be_required_without_any_setting() -> None:
    nodes = [node("a", 2), node("b", 2), node("c", 3)]
    assert placed([waits("j", 3, "node")], nodes, levels=()) == {"c": 3}
    nodes = [node("a", 4, 2), node("b", 4, 2)]
    (decision,) = decide([waits("j", 3, "node")], nodes, levels=())
    assert isinstance(decision, Wait)
    assert "4 are free, but only 2 within one node (a)" in decision.reason.message


def test_the_document_names_the_level() -> None:
    request = request_of(Resources(num_workers=2, required_topology="rack"))
    assert (request.required_level, needs(request)) == (
        "rack",
        "needs 2 workers of 1 CPU within one rack",
    )


def test_jobs_behind_pass_on_domains_that_are_too_small_for_it() -> None:
    nodes = [*row("r1", 4, 4), *row("r2", 4)]
    ahead = waits("a", 8, "rack", priority=90)
    there = runs("there", {"r1-2": 4}, priority=90)
    first, second, third = decide([ahead, waits("b", 4), waits("c", 4)], nodes, [there])
    assert isinstance(first, Wait)
    assert second == Start("b", (Slice("r2-1", 4),))
    assert isinstance(third, Wait)
    assert (third.reason.code, third.blocked_by) == ("behind_in_queue", ("a",))


def test_only_jobs_of_one_domain_leave_for_it() -> None:
    nodes = [*row("r1", 4, 4), *row("r2", 4, 4)]
    there = [
        runs("small-1", {"r1-1": 1}, lost_s=1.0),
        runs("large-1", {"r1-2": 4}, lost_s=9.0),
        runs("small-2", {"r2-1": 1}, lost_s=2.0),
        runs("small-3", {"r2-2": 1}, lost_s=3.0),
    ]
    wait, *asked = decide([waits("a", 8, "rack", priority=90)], nodes, there)
    assert isinstance(wait, Wait)
    assert wait.reason.code == "room_is_made"
    assert {part.node_id for part in wait.slices} == {"r2-1", "r2-2"}
    assert [ask.job_id for ask in asked if isinstance(ask, Preempt)] == ["small-2", "small-3"]


def test_a_job_that_ends_before_a_domain_can_be_free_passes() -> None:
    nodes = [*row("r1", 4, 4), *row("r2", 4, 4)]
    there = [
        *(runs("r-1", {"r1-1": 4}, left_s=HOUR), runs("r-2", {"r2-1": 4}, left_s=HOUR)),
        *(runs("r-3", {"r2-2": 4}, left_s=60.0),),
    ]
    ahead = waits("a", 8, "rack", left_s=None)
    quick = waits("b", 2, ends_within_s=600.0)
    first, second = decide([ahead, quick], nodes, there)
    assert isinstance(first, Wait)
    assert isinstance(second, Start)
    there[1] = replace(there[1], left_s=60.0)
    first, second = decide([ahead, replace(quick, ends_within_s=None)], nodes, there)
    assert isinstance(first, Wait)
    assert {part.node_id for part in first.reserved} == {"r2-1", "r2-2"}
    assert isinstance(second, Start)
    assert second.slices == (Slice("r1-2", 2),)


# Growing groups.


def group(name: str, most: int, slices: Mapping[str, int], level: str | None = None) -> Growing:
    parts = tuple(Slice(node_id, number) for node_id, number in slices.items())
    return Growing(name, 1, 50, 1, Request(most, GPU, 1, level), parts)


def test_a_group_grows_on_its_nodes_first_then_in_the_domains_that_it_is_in() -> None:
    nodes = [
        *row("r0", 8),
        *row("r1", 4, 2),
        *row("r2", 4, zone="z2"),
        *row("r3", 8, zone="z2"),
    ]
    there = group("g", 12, {"r1-1": 1, "r2-1": 1})
    found = placed([], nodes, growing=[there])
    assert found == {"r1-1": 3, "r2-1": 3, "r1-2": 2, "r0-1": 2}
    assert placed([], nodes[:3], growing=[group("g", 3, {"r1-2": 1})]) == {"r1-2": 1, "r1-1": 1}


def test_a_group_with_a_required_level_grows_in_its_domain_alone() -> None:
    nodes = [*row("r1", 2, 2), *row("r2", 8)]
    assert placed([], nodes, growing=[group("g", 8, {"r1-1": 1}, "rack")]) == {"r1-1": 1, "r1-2": 2}
    (decision,) = decide([], nodes, growing=[group("g", 8, {"r1-1": 2, "r1-2": 2}, "rack")])
    assert isinstance(decision, Stay)
    assert decision.reason.code == "waiting_for_domain"
    assert "8 are free, but none within its rack" in decision.reason.message


def test_a_group_that_lacks_workers_gets_them_in_its_domain_or_stands_by() -> None:
    nodes = [*row("r1", 2, 2), *row("r2", 8)]
    lost = replace(group("g", 4, {"r1-1": 2}, "rack"), lacking=2)
    assert placed([], nodes, growing=[lost]) == {"r1-2": 2}
    (decision,) = decide([], [*row("r1", 2, 2, free=(2, 1)), *row("r2", 8)], growing=[lost])
    assert isinstance(decision, Stay)


def test_a_group_whose_nodes_are_refused_does_not_grow_elsewhere() -> None:
    refused = replace(node("r1-1", 2, rack="r1"), accepted=False)
    there = [refused, *row("r2", 8)]
    (decision,) = decide([], there, growing=[group("g", 8, {"r1-1": 2}, "rack")])
    assert isinstance(decision, Stay)
    assert placed([], there, growing=[group("g", 4, {"r1-1": 2})]) == {"r2-1": 2}


def test_a_group_whose_level_is_gone_keeps_what_it_has() -> None:
    (decision,) = decide([], row("r1", 4), growing=[group("g", 4, {"r1-1": 1}, "gone")])
    assert isinstance(decision, Stay)


# Questions about a job.


def test_without_its_requirement_or_with_fewer_workers_it_would_start() -> None:
    nodes = [*row("r1", 4, 4), *row("r2", 4, 4)]
    there = [runs("r-1", {"r1-1": 4}), runs("r-2", {"r2-1": 4})]
    job = waits("a", 8, "rack")
    questions = JobQuestions(Situation(seen([job], nodes, there)), job, NOW)
    assert isinstance(questions.decision, Wait)
    found = questions.answers(Choices(Multiples(), max_priority=50), questions.decision.reason)
    assert [each.message for each in found] == [
        "starts now without required_topology",
        "starts now with 4 workers",
    ]


def test_a_forecast_waits_for_room_in_one_domain() -> None:
    nodes = [*row("r1", 4, 4), *row("r2", 4, 4)]
    there = [
        *(runs("r-1", {"r1-1": 4}, left_s=600.0), runs("r-2", {"r1-2": 4}, left_s=3000.0)),
        *(runs("r-3", {"r2-1": 4}, left_s=1000.0), runs("r-4", {"r2-2": 4}, left_s=5000.0)),
    ]
    anywhere = Simulation(Situation(seen([waits("a", 8)], nodes, there)), NOW).run()["a"]
    together = Simulation(Situation(seen([waits("a", 8, "rack")], nodes, there)), NOW).run()["a"]
    assert anywhere.at == NOW + timedelta(seconds=1000)
    assert together.at == NOW + timedelta(seconds=3000)


def test_nodes_are_asked_for_in_the_domain_that_lacks_the_fewest_with_its_labels() -> None:
    nodes = [*row("r1", 4, 4, free=(4, 0)), *row("r2", 4)]
    types = [
        NodeType({"GPU": 4.0, **label_resources({"zone": "z1", "rack": name})}, 4)
        for name in ("r1", "r2")
    ]
    new = autoscaling.may_come(types, nodes)
    found = replace(seen([waits("a", 12, "rack")], nodes), to_come=new)
    decisions = plan(found, NOW)
    (wait,) = decisions
    assert isinstance(wait, Wait)
    assert wait.reason.code == "waiting_for_nodes"
    demand = autoscaling.demand(found, decisions, nodes, new, [])
    labelled = (("GPU", 1.0), ("label:rack=r1", 0.001), ("label:zone=z1", 0.001))
    assert (labelled, 8) in demand.bundles
    assert demand.nodes_of == {"a": 2}
