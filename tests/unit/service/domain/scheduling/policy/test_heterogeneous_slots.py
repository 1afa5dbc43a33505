"""Gangs whose roles have their own resources: either all ranks start or none."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest

from dray.spec import JobSpec
from ray_workers.shared.slices import RoleSlots, Slice, by_bundle
from service.domain.scheduling import autoscaling
from service.domain.scheduling.placement.phrases import needs
from service.domain.scheduling.placement.shared_gpus import parts_on, with_shared_gpus
from service.domain.scheduling.placement.slots import amounts_of, held_on, request_of_job, share_of
from service.domain.scheduling.policy import (
    Holder,
    Node,
    Request,
    Snapshot,
    Start,
    Wait,
    WaitingJob,
    can_ever_fit,
    plan,
)
from service.domain.scheduling.rules.eviction import RunningJob
from service.domain.scheduling.rules.limits import why_never
from service.domain.scheduling.rules.queues import Queue

NOW = datetime(2026, 1, 1, tzinfo=UTC)
ON_GPUS = {"CPU": 1.0, "GPU": 1.0}
OF_SERVER = {"CPU": 4.0}
"""One server with 4 CPUs and two workers with GPUs."""
REQUEST = Request(3, ON_GPUS, roles=(RoleSlots("server", 2, 1, OF_SERVER),))


def node(name: str, **total: float) -> Node:
    return Node(name, total, dict(total))


def job(name: str = "job", request: Request = REQUEST, seq: int = 0) -> WaitingJob:
    return WaitingJob(name, 0, 50, seq, request)


def decide(*nodes: Node, jobs: Any = (), **more: Any) -> list[Any]:
    return list(plan(Snapshot(jobs or (job(),), nodes, True, **more), NOW))


def test_a_document_asks_for_its_servers_slots() -> None:
    server = {"cpus": 4, "memory_bytes": "1GiB"}
    document = {
        "recipe": "image_classification",
        "resources": {"num_workers": 3, "gpus_per_worker": 1, "node_labels": {"rack": "r1"}},
        "sync": {"kind": "parameter_server", "server_resources": server},
    }
    request = request_of_job(JobSpec.model_validate(document))
    (role,) = request.roles
    assert (role.role, role.first_rank, role.number) == ("server", 2, 1)
    own = {"CPU": 4.0, "memory": 2.0**30}
    assert own.items() <= role.bundle.items()
    assert role.bundle.keys() - own.keys() == request.bundle.keys() - ON_GPUS.keys()


def test_a_script_asks_for_the_slots_of_its_roles() -> None:
    roles = {
        "chief": {"resources": {}},
        "worker": {"num_workers": 3},
        "evaluator": {},
        "ps": {"num_workers": 2, "resources": {"cpus": 2}},
    }
    script = {"entrypoint": "a.py", "framework": "tensorflow", "roles": roles}
    document = {"script": script, "resources": {"gpus_per_worker": 1}}
    request = request_of_job(JobSpec.model_validate(document))
    assert request.roles == (
        RoleSlots("chief", 0, 1, {"CPU": 1.0}),
        RoleSlots("ps", 5, 2, {"CPU": 2.0}),
    )
    assert request.runs == ((1, {"CPU": 1.0}), (4, ON_GPUS), (2, {"CPU": 2.0}))
    assert needs(request) == (
        "needs 4 workers of 1 CPU and 1 GPU, 1 chief of 1 CPU, and 2 ps of 2 CPU"
    )
    slices = (Slice("b", 1), Slice("a", 4), Slice("a", 1), Slice("b", 1))
    assert decide(
        node("a", CPU=6.0, GPU=4.0), node("b", CPU=3.0), jobs=(job(request=request),)
    ) == [Start("job", slices)]


@pytest.mark.parametrize(
    ("nodes", "slices"),
    [
        # Next to the workers, if there is room.
        ((node("n", CPU=8.0, GPU=2.0), node("m", CPU=8.0)), (Slice("n", 2), Slice("n", 1))),
        ((node("n", CPU=2.0, GPU=2.0), node("m", CPU=4.0)), (Slice("n", 2), Slice("m", 1))),
        # The workers do not use the only node with room for the server.
        (
            (node("a", CPU=4.0, GPU=2.0), node("b", CPU=2.0, GPU=2.0)),
            (Slice("b", 2), Slice("a", 1)),
        ),
    ],
)
def test_workers_come_first_and_servers_near_them(nodes: Any, slices: Any) -> None:
    assert decide(*nodes) == [Start("job", slices)]


@pytest.mark.parametrize(
    ("nodes", "why"),
    [
        ((node("n", CPU=5.0, GPU=2.0),), "has room for each of these, but not for all at once"),
        ((node("n", CPU=3.0, GPU=2.0),), "the whole cluster has room for 0 servers at once"),
        ((node("n", CPU=16.0, GPU=1.0),), "the whole cluster has room for 1 worker at once"),
        ((node("n", CPU=16.0),), "each worker needs 1 GPU, but the largest node has no GPU"),
    ],
)
def test_a_gang_that_never_fits_is_told_why(nodes: Any, why: str) -> None:
    reason = can_ever_fit(REQUEST, nodes)
    assert reason is not None
    assert why in reason.message
    (decision,) = decide(*nodes)
    assert decision.reason == reason


def test_a_gang_waits_whole_and_reserves_what_it_could_use() -> None:
    nodes = (node("n", CPU=8.0, GPU=2.0),)
    busy = (Holder("other", (Slice("n", 1),), OF_SERVER),)
    free = (replace(nodes[0], available_to_us={"CPU": 4.0, "GPU": 2.0}),)
    small = job("small", Request(1, {"CPU": 3.0}), seq=1)
    first, second = decide(*free, jobs=(job(), small), holders=busy)
    assert isinstance(first, Wait)
    assert first.reason.code == "waiting_for_slots"
    assert first.reason.message.startswith(
        "needs 2 workers of 1 CPU and 1 GPU, and 1 server of 4 CPU; the free slots do not have "
        "room for all ranks, and job other holds 1 slot on suitable nodes"
    )
    assert isinstance(second, Wait), "it would take what the first waits for"


def test_all_that_a_gang_holds_is_counted_by_its_own_slots() -> None:
    slices = (Slice("n", 2), Slice("n", 1))
    holder = Holder("job", slices, ON_GPUS, roles=REQUEST.roles)
    assert held_on("n", [holder]) == {"CPU": 6.0, "GPU": 2.0}
    assert amounts_of(REQUEST) == pytest.approx({"CPU": 6.0, "GPU": 2.0})
    assert share_of(REQUEST, {"CPU": 12.0, "GPU": 2.0}) == pytest.approx(1.0)
    assert [bundle for _, bundle in by_bundle(slices, ON_GPUS, REQUEST.roles)] == [
        ON_GPUS,
        OF_SERVER,
    ]
    queue = Queue("default", limit={"CPU": 5.0})
    why = f"{needs(REQUEST)}, but the queue 'default' has a limit of 5 CPU"
    assert why_never(queue, REQUEST) == why
    assert why_never(Queue("default", limit={"CPU": 6.0}), REQUEST) is None


def test_a_second_gang_gets_what_the_first_leaves() -> None:
    nodes = (node("a", CPU=6.0, GPU=2.0), node("b", CPU=6.0, GPU=2.0))
    others = [job(f"job-{number}", seq=number) for number in range(3)]
    decisions = decide(*nodes, jobs=others)
    assert [type(each) for each in decisions] == [Start, Start, Wait]
    assert {part.node_id for each in decisions[:2] for part in each.slices} == {"a", "b"}


def test_a_preempted_job_releases_the_slots_of_its_servers_with_their_own_resources() -> None:
    nodes = (Node("n", {"CPU": 6.0, "GPU": 3.0}, {"CPU": 0.0, "GPU": 1.0}),)
    slices = (Slice("n", 2), Slice("n", 1))
    running = RunningJob("low", 10, 0, REQUEST, slices, 1000.0, yields=True)
    holders = (Holder("low", slices, ON_GPUS, roles=REQUEST.roles),)
    for gpus, code in ((3.0, "room_is_made"), (4.0, None)):
        coming = job("high", Request(1, {"CPU": 1.0, "GPU": gpus}), seq=1)
        decisions = decide(*nodes, jobs=(coming,), holders=holders, running=(running,))
        found = {each.job_id: each for each in decisions}
        assert found["high"].reason.code == (code or "unsatisfiable")
        assert ("low" in found) is (code is not None)


def test_an_autoscaler_is_asked_for_the_slots_of_both() -> None:
    to_come = (node("new", CPU=8.0, GPU=2.0),)
    found = Snapshot((job(),), (), True, to_come=to_come)
    decisions = plan(found, NOW)
    demand = autoscaling.demand(found, decisions, (), to_come, in_use=())
    assert dict(demand.bundles) == {tuple(sorted(ON_GPUS.items())): 2, (("CPU", 4.0),): 1}
    assert demand.nodes_of == {"job": 1}


GIB = 2.0**30


@pytest.mark.parametrize(
    ("nodes", "request_"),
    [
        (
            (node("a", CPU=4.0, memory=4 * GIB), node("b", CPU=7.0, memory=2 * GIB)),
            Request(
                5,
                {"CPU": 3.0},
                roles=(
                    RoleSlots("chief", 0, 2, {"CPU": 1.0, "memory": 2 * GIB}),
                    RoleSlots("server", 2, 1, {"CPU": 4.0, "memory": 2 * GIB}),
                    RoleSlots("ps", 3, 1, {"CPU": 2.0}),
                ),
            ),
        ),
        (
            (node("a", CPU=11.0, memory=4 * GIB), node("b", CPU=6.0, memory=8 * GIB)),
            Request(
                5,
                {"CPU": 1.0, "memory": 3 * GIB},
                roles=(
                    RoleSlots("chief", 1, 2, {"CPU": 2.0, "memory": 2 * GIB}),
                    RoleSlots("server", 3, 1, {"CPU": 4.0, "memory": 2 * GIB}),
                ),
            ),
        ),
    ],
)
def test_roles_that_fit_in_one_way_alone_start(nodes: Any, request_: Request) -> None:
    (start,) = decide(*nodes, jobs=(job(request=request_),))
    assert isinstance(start, Start)
    holder = Holder("job", start.slices, request_.bundle, roles=request_.roles)
    for each in nodes:
        held = held_on(each.id, [holder])
        assert all(held[name] <= each.total[name] for name in held)


SHARING = Request(3, {"CPU": 1.0, "GPU": 0.25}, roles=(RoleSlots("chief", 1, 1, {"CPU": 1.0}),))
"""A worker, a chief without a GPU, and another worker."""


def test_workers_on_both_sides_of_a_role_are_on_gpus_of_their_own() -> None:
    (start,) = decide(
        *(node(name, CPU=8.0, GPU=1.0) for name in "ab"), jobs=(job(request=SHARING),)
    )
    assert isinstance(start, Start)
    first, _, last = start.slices
    assert {first.node_id, last.node_id} == {"a", "b"}


def test_a_role_without_a_gpu_takes_no_part_of_one() -> None:
    part = Request(1, {"GPU": 0.8})
    jobs = (job("a", SHARING, 0), job("b", part, 1), job("c", part, 2))
    found = decide(node("n", CPU=8.0, GPU=3.0), jobs=jobs)
    assert [type(each) for each in found] == [Start, Start, Wait]
    held = Holder("a", (Slice("n", 1),) * 3, SHARING.bundle, roles=SHARING.roles)
    free = {"CPU": 5.0, "GPU": 2.5}
    there = Node("n", {"CPU": 8.0, "GPU": 3.0}, with_shared_gpus(free, parts_on("n", [held])))
    found = decide(there, jobs=jobs[1:], holders=(held,))
    assert [type(each) for each in found] == [Start, Wait]


def test_a_part_does_not_fit_on_gpus_that_others_use_for_the_most_part() -> None:
    held = Holder("a", (Slice("n", 3),), {"GPU": 0.8})
    free = {"CPU": 8.0, "GPU": 0.6}
    there = Node("n", {"CPU": 8.0, "GPU": 3.0}, with_shared_gpus(free, parts_on("n", [held])))
    (found,) = decide(there, jobs=(job(request=SHARING),), holders=(held,))
    assert isinstance(found, Wait)


def test_a_blocked_gang_with_roles_reserves_only_the_slots_that_it_will_use() -> None:
    nodes = [node("a", CPU=8.0, GPU=2.0), node("b", CPU=8.0, GPU=2.0)]
    there = RunningJob("there", 50, 0, Request(2, ON_GPUS), (Slice("a", 2),), 600.0)
    busy = RunningJob("busy", 50, 0, Request(1, ON_GPUS), (Slice("b", 1),), 600.0, left_s=9e5)
    free = [{"CPU": 6.0, "GPU": 0.0}, {"CPU": 7.0, "GPU": 1.0}]
    left = [replace(n, available_to_us=has) for n, has in zip(nodes, free, strict=True)]
    behind = [job(f"j{seq}", Request(1, ON_GPUS), seq) for seq in (1, 2)]
    wait, *others = decide(*left, jobs=(job(), *behind), running=(there, busy))
    assert isinstance(wait, Wait)
    assert wait.reserved == (Slice("a", 2), Slice("a", 1))
    assert others[0] == Start("j1", (Slice("b", 1),))
    assert isinstance(others[1], Wait)
