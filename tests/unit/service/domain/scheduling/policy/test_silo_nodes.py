"""Nodes with a silo's data: only ranks of silos run on them, and all messages explain this."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest

from ray_workers.shared.slices import RoleSlots, Slice
from service.config import node_types
from service.config.node_types import SILO_LABEL
from service.domain.scheduling import autoscaling
from service.domain.scheduling.outlook.counterfactuals import Choices, JobQuestions
from service.domain.scheduling.outlook.simulation import Simulation
from service.domain.scheduling.outlook.situation import Situation
from service.domain.scheduling.policy import (
    Growing,
    Impossible,
    Node,
    Request,
    Snapshot,
    Start,
    Stay,
    Wait,
    WaitingJob,
    can_ever_fit,
    lacking_resource,
    plan,
)
from service.domain.scheduling.rules.eviction import RunningJob
from tests.unit.service.domain.scheduling.outlook.test_counterfactuals import Multiples
from tests.unit.service.domain.scheduling.snapshots import busy

NOW = datetime(2026, 1, 1, tzinfo=UTC)
NORTH, SOUTH = "label:hospital=north", "label:hospital=south"
RACK = "label:rack=a"
HOMES = ((NORTH,), (SOUTH,))


def node(name: str, free: float = 4.0, *, closed: bool = False, **labels: str) -> Node:
    labels |= {SILO_LABEL: "true"} if closed else {}
    return Node.labelled(name, {"CPU": 4.0}, {"CPU": free}, labels)


def waits(job_id: str, request: Request, **more: Any) -> WaitingJob:
    return WaitingJob(job_id, 0, 50, int(job_id.strip("abcdefghij") or 0), request, **more)


def decide(nodes: list[Node], *requests: Request, **more: Any) -> list[Any]:
    queue = tuple(waits(f"j{number}", each) for number, each in enumerate(requests))
    return plan(Snapshot(queue, tuple(nodes), connected=True, **more), NOW)


CPU = {"CPU": 1.0}
EVERY_KIND = (
    Request(1, CPU),
    Request(2, CPU, min_workers=1),
    Request(2, CPU, required_level="node"),
    Request(2, CPU, roles=(RoleSlots("ps", 0, 1, {"CPU": 2.0}),)),
    Request(1, {**CPU, NORTH: 0.001}),
    Request(1, {**CPU, f"label:{SILO_LABEL}=true": 0.001}),
)
"""Requests: plain, elastic, within a domain, with servers, and with labels."""


@pytest.mark.parametrize("request_", EVERY_KIND)
def test_no_job_but_one_of_silos_gets_a_slot_there(request_: Request) -> None:
    closed = [node(f"s{n}", closed=True, hospital="north") for n in range(3)]
    there = [*closed, node("open", free=0.0)]
    (decision,) = decide(there, request_)
    assert not isinstance(decision, Start)
    (decision,) = decide([*closed, node("open", hospital="north")], request_)
    if f"label:{SILO_LABEL}=true" in request_.bundle:
        assert isinstance(decision, Impossible)
    else:
        assert isinstance(decision, Start)
        assert {part.node_id for part in decision.slices} == {"open"}


def test_a_group_grows_on_open_nodes_alone() -> None:
    held = (Slice("open", 1),)
    for lacking in (0, 1):
        group = Growing("g", 1, 50, 0, Request(4, CPU, min_workers=1), held, lacking)
        there = [node("closed", closed=True), node("open", free=0.0)]
        (stay,) = decide(there, growing=(group,))
        assert isinstance(stay, Stay), lacking


@pytest.mark.parametrize("roles", [(), (RoleSlots("ps", 0, 1, {"CPU": 3.0, RACK: 0.001}),)])
def test_a_blocked_job_reserves_nothing_on_nodes_that_it_may_not_use(roles: Any) -> None:
    blocked = Request(6 if roles else 8, {**CPU, RACK: 0.001}, roles=roles)
    rack = {"rack": "a"}
    there = [
        node("full", free=0.0, **rack),
        node("half", **rack),
        node("n", closed=True, hospital="north", **rack),
        node("s", closed=True, hospital="south", **rack),
        node("open"),
    ]
    wait, start = decide(there, blocked, Request(3, CPU, homes=HOMES), running=busy(there))
    assert isinstance(wait, Wait)
    assert isinstance(start, Start)
    assert [part.node_id for part in start.slices] == ["open", "n", "s"]


def test_silos_run_on_their_pinned_nodes_and_the_aggregator_on_an_open_node() -> None:
    closed = [node("n", closed=True, hospital="north"), node("s", closed=True, hospital="south")]
    (decision,) = decide([*closed, node("z")], Request(3, CPU, homes=HOMES))
    assert isinstance(decision, Start)
    assert [part.node_id for part in decision.slices] == ["z", "n", "s"]
    (decision,) = decide(closed, Request(3, CPU, homes=HOMES))
    assert isinstance(decision, Impossible)
    assert "no node of the cluster has room for the aggregating worker" in (decision.reason.message)
    (decision,) = decide([*closed, node("z", free=0.0)], Request(3, CPU, homes=HOMES))
    assert isinstance(decision, Wait)


def test_a_silo_gives_the_only_open_node_to_who_aggregates() -> None:
    """Its own node is the second one, sorted by name."""
    there = [
        Node.labelled("a", CPU, CPU, {"hospital": "north"}),
        Node.labelled("b", CPU, CPU, {"hospital": "north", SILO_LABEL: "true"}),
    ]
    (decision,) = decide(there, Request(2, CPU, homes=((NORTH,),)))
    assert isinstance(decision, Start)
    assert [part.node_id for part in decision.slices] == ["a", "b"]


def test_closed_nodes_do_not_change_the_order_of_others() -> None:
    """Relative to the open nodes, the first job has the larger share; relative to all nodes, the
    smaller one."""
    there = [Node.labelled("open", {"CPU": 4.0, "GPU": 8.0}, {"CPU": 0.0, "GPU": 8.0}, {})]
    many = Node.labelled("s", {"CPU": 96.0}, {"CPU": 96.0}, {SILO_LABEL: "true"})
    queue = (
        waits("j0", Request(1, {"CPU": 3.0, "GPU": 1.0}), left_s=3600.0, waited_s=0.0),
        waits("j1", Request(1, {"CPU": 1.0, "GPU": 4.0}), left_s=3600.0, waited_s=0.0),
    )
    for nodes in (there, [*there, many]):
        found = plan(Snapshot(queue, tuple(nodes), connected=True), NOW)
        assert [each.job_id for each in found] == ["j1", "j0"]


def test_sentences_name_the_nodes_that_are_kept() -> None:
    closed = [node(f"s{n}", closed=True, hospital="north") for n in range(2)]
    (decision,) = decide([*closed, node("open", free=0.0)], Request(1, CPU))
    assert isinstance(decision, Wait)
    assert decision.reason.code == "waiting_for_slots"
    assert (
        "0 are free (8 more on nodes with a silo's data are reserved for ranks of silos)"
        in decision.reason.message
    )
    (decision,) = decide(closed, Request(1, CPU))
    assert isinstance(decision, Wait), "open nodes may come: it is like a cluster without nodes"
    assert decision.reason.code == "no_nodes"
    assert "every node of the cluster has a silo's data" in decision.reason.message
    refused = replace(node("open"), accepted=False)
    (decision,) = decide([*closed, refused], Request(1, CPU))
    assert isinstance(decision, Wait)
    message = "waits for a node: dray refuses every node without a silo's data"
    assert decision.reason.message == message
    labelled = Request(1, {**CPU, NORTH: 0.001})
    reason = can_ever_fit(labelled, [*closed, node("open")])
    assert reason is not None
    assert reason.message == (
        "no node of the cluster has the label hospital=north, apart from "
        "2 nodes with a silo's data, which accept only ranks of silos"
    )
    assert lacking_resource(labelled, [*closed, node("open")]) == NORTH
    never = can_ever_fit(Request(1, {"GPU": 1.0}), [*closed, node("open")])
    assert never is not None
    assert "silo" not in never.message, "they would be of no use either"


def situation(nodes: list[Node], *queue: WaitingJob, running: Any = ()) -> Situation:
    snapshot = Snapshot(queue, tuple(nodes), connected=True, running=tuple(running))
    return Situation(snapshot)


def test_forecasts_and_counterfactuals_know_the_rule() -> None:
    closed = [node(f"s{n}", closed=True) for n in range(2)]
    runs = RunningJob("r", 50, 0, Request(4, CPU), (Slice("open", 4),), 400.0, left_s=3600.0)
    there = [*closed, node("open", free=0.0)]
    job = waits("j1", Request(2, CPU))
    found = Simulation(situation(there, job, running=[runs]), NOW).run()["j1"]
    assert found.at is not None
    assert (found.at - NOW).total_seconds() == pytest.approx(3600, rel=0.1)
    questions = JobQuestions(situation(there, job, running=[runs]), job, NOW)
    told = questions.answers(Choices(Multiples(), max_priority=50), questions.decision.reason)  # type: ignore[union-attr]
    assert not [each for each in told if each.num_workers]
    large = waits("j1", Request(8, CPU))
    questions = JobQuestions(situation([*closed, node("open")], large), large, NOW)
    assert isinstance(questions.decision, Impossible)
    never, fewer = questions.answers(Choices(Multiples()), questions.decision.reason)
    assert never.at is None
    assert fewer.num_workers == 4


def test_an_autoscaler_is_asked_for_nodes_besides_those_of_silos() -> None:
    types = node_types.parse(f"2x CPU=4, 3x CPU=4 label:{SILO_LABEL}=true")
    closed = [node("s", closed=True)]
    to_come = autoscaling.may_come(types, closed)
    assert len(to_come) == 4, "two open ones, and two more of silos"
    queue = (waits("j1", Request(8, CPU)),)
    snapshot = Snapshot(queue, tuple(closed), connected=True, to_come=to_come)
    decisions = plan(snapshot, NOW)
    demand = autoscaling.demand(snapshot, decisions, closed, to_come, in_use=())
    assert demand.num_nodes == 2
    more = Snapshot((waits("j1", Request(9, CPU)),), tuple(closed), connected=True, to_come=to_come)
    assert isinstance(plan(more, NOW)[0], Impossible)
