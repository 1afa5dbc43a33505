"""The scheduling plan: gangs start completely or not at all, in order of priority and submission;
and the reasons."""

from __future__ import annotations

import random
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from dray.spec import Resources
from ray_workers.shared.slices import Slice
from service.config.node_types import label_resources
from service.domain.scheduling.placement.phrases import needs
from service.domain.scheduling.placement.slots import fits, held_on, offered, request_of
from service.domain.scheduling.policy import (
    Decision,
    Holder,
    Impossible,
    Node,
    Request,
    Snapshot,
    Start,
    Wait,
    WaitingJob,
    can_ever_fit,
    plan,
)
from service.domain.scheduling.policy.round import SOON_S
from tests.unit.service.domain.scheduling.snapshots import busy

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def job(
    name: str,
    workers: int = 1,
    *,
    seq: int = 0,
    priority: int = 50,
    not_before: datetime | None = None,
    **bundle: float,
) -> WaitingJob:
    request = Request(workers, bundle or {"CPU": 1.0})
    return WaitingJob(name, 0, priority, seq, request, not_before)


def node(name: str, free: float | None = None, **total: float) -> Node:
    """Return a node with CPUs, of which `free` are free; all other resources are free."""
    available = dict(total)
    if free is not None:
        available["CPU"] = free
    return Node(name, total, available)


def decide(
    *jobs: WaitingJob, nodes: list[Node], holders: tuple[Holder, ...] = (), **more: Any
) -> list[Decision]:
    return plan(Snapshot(jobs, tuple(nodes), True, holders, **more), NOW)


def started(decisions: list[Decision]) -> list[str]:
    return [d.job_id for d in decisions if isinstance(d, Start)]


def test_a_gang_starts_whole_or_not_at_all() -> None:
    (decision,) = decide(job("a", 4), nodes=[node("n1", CPU=2.0), node("n2", CPU=2.0)])
    assert decision == Start("a", (Slice("n1", 2), Slice("n2", 2)))
    (decision,) = decide(job("a", 4), nodes=[node("n1", 1, CPU=2.0), node("n2", CPU=2.0)])
    assert isinstance(decision, Wait)


def test_a_gang_lies_on_as_few_nodes_as_possible() -> None:
    nodes = [node("n1", CPU=4.0), node("n2", CPU=8.0), node("n3", CPU=2.0)]
    assert decide(job("a", 2), nodes=nodes) == [Start("a", (Slice("n3", 2),))]
    assert decide(job("a", 8), nodes=nodes) == [Start("a", (Slice("n2", 8),))]
    assert decide(job("a", 10), nodes=nodes) == [Start("a", (Slice("n2", 8), Slice("n3", 2)))]


def test_higher_priority_goes_first_then_first_come() -> None:
    queue = (job("late", seq=2), job("early", seq=1), job("urgent", seq=3, priority=90))
    decisions = decide(*queue, nodes=[node("n", CPU=2.0)])
    assert started(decisions) == ["urgent", "early"]
    (waiting,) = [d for d in decisions if isinstance(d, Wait)]
    assert (waiting.job_id, waiting.position) == ("late", 1)


def test_a_small_job_does_not_pass_a_large_one_that_waits_for_the_same_slots() -> None:
    holders = (Holder("running", (Slice("n", 3),), {"CPU": 1.0}),)
    decisions = decide(
        job("large", 4, seq=1),
        job("small", 1, seq=2),
        nodes=[node("n", 1, CPU=4.0)],
        holders=holders,
    )
    large, small = decisions
    assert isinstance(large, Wait)
    assert isinstance(small, Wait)
    assert large.reason.code == "waiting_for_slots"
    assert (
        large.reason.message
        == "needs 4 workers of 1 CPU; 1 is free, and job running holds 3 slots on suitable nodes"
    )
    assert large.blocked_by == ("running",)
    assert small.reason.code == "behind_in_queue"
    assert small.blocked_by == ("large",)
    assert (large.position, small.position) == (1, 2)


def test_a_job_passes_on_nodes_that_the_one_ahead_can_not_use() -> None:
    nodes = [
        Node("gpu", {"CPU": 8.0, "GPU": 2.0}, {"CPU": 8.0, "GPU": 0.0}),
        node("cpu", CPU=2.0),
    ]
    ahead = job("ahead", 2, seq=1, CPU=1.0, GPU=1.0)
    decisions = decide(ahead, job("small", 2, seq=2), nodes=nodes)
    assert decisions[1] == Start("small", (Slice("cpu", 2),))


def test_a_job_passes_on_what_the_one_ahead_leaves_over_even_when_it_runs() -> None:
    nodes = [Node("gpu", {"CPU": 8.0, "GPU": 2.0}, {"CPU": 8.0, "GPU": 0.0})]
    ahead = job("ahead", 2, seq=1, CPU=1.0, GPU=1.0)
    for workers, starts in ((6, ["behind"]), (7, [])):
        behind = job("behind", workers, seq=2)
        assert started(decide(ahead, behind, nodes=nodes, running=busy(nodes))) == starts


def test_what_can_never_run_is_impossible_and_blocks_nobody() -> None:
    decisions = decide(job("huge", 9, seq=1), job("small", seq=2), nodes=[node("n", CPU=4.0)])
    assert isinstance(decisions[0], Impossible)
    assert decisions[0].reason.code == "unsatisfiable"
    assert started(decisions) == ["small"]


def test_a_refused_node_carries_nothing() -> None:
    refused = Node("n1", {"CPU": 8.0}, {"CPU": 8.0}, accepted=False)
    (decision,) = decide(job("a"), nodes=[refused])
    assert isinstance(decision, Wait)
    assert decision.reason.code == "no_nodes"
    (decision,) = decide(job("a", 4), nodes=[refused, node("n2", CPU=2.0)])
    assert isinstance(decision, Impossible)


@pytest.mark.parametrize("nodes", [(), (node("n", CPU=4.0),)])
def test_without_a_cluster_every_job_waits_and_none_is_impossible(nodes: tuple[Node, ...]) -> None:
    decisions = plan(Snapshot((job("a", 99), job("b", seq=1)), nodes, connected=False), NOW)
    assert [type(decision) for decision in decisions] == [Wait, Wait]
    assert [d.position for d in decisions if isinstance(d, Wait)] == [1, 2]
    assert {d.reason.code for d in decisions if isinstance(d, Wait)} == {"cluster_unavailable"}


def test_a_job_that_is_retried_soon_keeps_its_position() -> None:
    again = job("again", 2, seq=1, not_before=NOW + timedelta(seconds=SOON_S))
    decisions = decide(again, job("small", seq=2), nodes=[node("n", CPU=2.0)])
    assert started(decisions) == []
    decisions = decide(again, job("small", seq=2), nodes=[node("n", CPU=3.0)])
    assert started(decisions) == ["small"]
    # A node was lost: the remaining slots are not enough for the job, but no other job gets them,
    # unless the job waits for more than the ends of running jobs.
    nodes = [node("n", 1, CPU=2.0)]
    for limit_s in (None, 60.0):
        small = replace(job("small", seq=2), ends_within_s=limit_s)
        assert started(decide(again, small, nodes=nodes, running=busy(nodes))) == []
    assert started(decide(again, job("small", seq=2), nodes=nodes)) == ["small"]


def test_a_job_that_backs_off_for_long_waits_without_blocking_those_behind() -> None:
    early = job("early", 2, seq=1, not_before=NOW + timedelta(seconds=SOON_S + 1))
    decisions = decide(early, job("late", 2, seq=2), nodes=[node("n", CPU=2.0)])
    assert isinstance(decisions[0], Wait)
    assert decisions[0].reason.code == "backing_off"
    assert started(decisions) == ["late"]
    due = job("early", 2, seq=1, not_before=NOW)
    assert started(decide(due, nodes=[node("n", CPU=2.0)])) == ["early"]


def test_sums_of_fractions_fill_a_node_exactly() -> None:
    assert fits({"CPU": 0.1}, {"CPU": 0.1 + 0.1 + 0.1}) == 3
    assert fits({"CPU": 1.0}, {"CPU": 0.9999}) == 0
    assert fits({"CPU": 1.0, "GPU": 1.0}, {"CPU": 4.0}) == 0


@pytest.mark.parametrize(
    ("resources", "message"),
    [
        ({"num_workers": 9}, "needs 9 workers of 1 CPU, but the whole cluster has room for 8"),
        ({"cpus_per_worker": 5}, "each worker needs 5 CPU, but the largest node has 4 CPU"),
        ({"memory_bytes": 2**34}, "needs 16 GiB of memory, but the largest node has 8 GiB"),
        ({"accelerator": "H100"}, "no node of the cluster has the accelerator H100"),
        ({"node_labels": {"zone": "b"}}, "no node of the cluster has the label zone=b"),
        ({"gpus_per_worker": 1, "memory_bytes": 2**33}, "no single node of the cluster has all"),
    ],
)
def test_the_reason_names_what_is_missing(resources: dict[str, object], message: str) -> None:
    nodes = [
        Node("n1", {"CPU": 4.0, "memory": 2.0**33}, {}),
        Node("n2", {"CPU": 4.0, "GPU": 2.0, "memory": 2.0**30}, {}),
    ]
    reason = can_ever_fit(request_of(Resources.model_validate(resources)), nodes)
    assert reason is not None
    assert message in reason.message


def test_a_job_starts_on_nodes_that_have_all_labels_it_asks_for() -> None:
    market = "ray.io/market-type"
    resources = Resources(num_workers=2, node_labels={market: "on-demand", "zone": "b"})
    request = request_of(resources)
    assert needs(request) == (
        "needs 2 workers of 1 CPU on nodes with ray.io/market-type=on-demand, zone=b"
    )
    nodes = [
        node("spot", CPU=8.0, **label_resources({market: "spot", "zone": "b"})),
        node("elsewhere", CPU=8.0, **label_resources({market: "on-demand", "zone": "a"})),
        node("fits", CPU=8.0, **label_resources({market: "on-demand", "zone": "b", "x": "y"})),
    ]
    wants = WaitingJob("a", 0, 50, 0, request)
    assert decide(wants, nodes=nodes) == [Start("a", (Slice("fits", 2),))]
    assert started(decide(wants, job("any", 16), nodes=nodes)) == ["a", "any"]


def test_what_others_use_and_what_we_claimed_are_both_respected() -> None:
    total = {"CPU": 8.0}
    assert offered(total, {"CPU": 8.0}, {"CPU": 3.0}) == {"CPU": 5.0}
    assert offered(total, {"CPU": 2.0}, {"CPU": 3.0}) == {"CPU": 2.0}
    assert offered(total, {}, {}) == {"CPU": 0.0}
    assert offered(total, {"CPU": 8.0}, {"CPU": 9.0}) == {"CPU": 0.0}


def test_a_plan_never_gives_more_than_there_is() -> None:
    for seed in range(200):
        chance = random.Random(seed)
        nodes = []
        for name in "abc":
            cpus, gpus = float(chance.randint(1, 8)), float(chance.randint(0, 4))
            free = {
                "CPU": float(chance.randint(0, int(cpus))),
                "GPU": float(chance.randint(0, int(gpus))),
            }
            nodes.append(Node(name, {"CPU": cpus, "GPU": gpus}, free))
        queue = tuple(
            job(
                f"j{i}",
                chance.randint(1, 6),
                seq=i,
                priority=chance.choice([10, 50]),
                CPU=float(chance.randint(1, 2)),
                GPU=float(chance.randint(0, 1)),
            )
            for i in range(8)
        )
        decisions = decide(*queue, nodes=nodes)
        assert sorted(d.job_id for d in decisions) == sorted(j.job_id for j in queue)
        bundles = {j.job_id: j.request for j in queue}
        holders = [
            Holder(d.job_id, d.slices, bundles[d.job_id].bundle)
            for d in decisions
            if isinstance(d, Start)
        ]
        for holder in holders:
            placed = sum(part.num_workers for part in holder.slices)
            assert placed == bundles[holder.job_id].num_workers
        for there in nodes:
            for name, amount in held_on(there.id, holders).items():
                assert amount <= there.available_to_us[name] + 1e-6


def test_a_blocked_job_starts_as_soon_as_those_that_ran_before_it_are_gone() -> None:
    """This holds regardless of which jobs overtook it; that is the meaning of 'never delays'."""
    for seed in range(200):
        chance = random.Random(seed)
        totals = {
            name: {"CPU": float(chance.randint(2, 8)), "GPU": float(chance.randint(0, 3))}
            for name in "ab"
        }
        used = {
            name: {k: float(chance.randint(0, int(v))) for k, v in t.items()}
            for name, t in totals.items()
        }
        nodes = [Node(n, t, {k: t[k] - used[n][k] for k in t}) for n, t in totals.items()]
        head = job("head", chance.randint(1, 6), seq=0, CPU=1.0, GPU=float(chance.randint(0, 1)))
        rest = [
            job(f"j{i}", chance.randint(1, 4), seq=i, CPU=1.0, GPU=float(chance.randint(0, 1)))
            for i in range(1, 6)
        ]
        decisions = decide(head, *rest, nodes=nodes, running=busy(nodes))
        if not isinstance(decisions[0], Wait):
            continue
        bundles = {j.job_id: j.request.bundle for j in rest}
        passed = [
            Holder(d.job_id, d.slices, bundles[d.job_id]) for d in decisions if isinstance(d, Start)
        ]
        later = [Node(n, t, offered(t, t, held_on(n, passed))) for n, t in totals.items()]
        assert started(decide(head, nodes=later)) == ["head"]
