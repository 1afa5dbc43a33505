"""Nodes with a sick GPU get no new work until an admin releases them."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest

from dray.views import Event
from ray_workers.shared.gpu_faults import GpuFault
from service.cluster.port import ClusterNode, ClusterSnapshot
from service.domain.errors import NothingWithheld
from service.lifecycle.withholding import withhold
from service.loops.scheduling.seen_nodes import SeenNodes
from service.nodes import node_table
from service.nodes.withheld import WithheldNodes
from tests.unit.service.helpers import Service
from tests.wire import cluster_node

HOST = "gpu-7.lan"
NODE = cluster_node("node-a", {"CPU": 8.0, "GPU": 4.0}, hostname=HOST)
OTHER = cluster_node("node-b", {"CPU": 8.0, "GPU": 4.0}, hostname="gpu-8.lan")


def fault(
    code: str = "xid_79", mark: str = "1", *jobs: str, gpu: str = "GPU-1", is_sick: bool = True
) -> GpuFault:
    attempts = tuple((job, 1) for job in jobs)
    return GpuFault(gpu, code, f"GPU 0: {code}", mark, 1000.0, is_sick, attempts)


def see(service: Service, *faults: GpuFault, node: ClusterNode = NODE) -> None:
    nodes = (replace(node, gpu_faults=faults), replace(OTHER, gpu_faults=()))
    snapshot = ClusterSnapshot("session-1", "ray://x", None, False, nodes)
    service.database.write_sync(lambda s: node_table.store(s, snapshot, None, service.now))


async def codes(service: Service) -> list[str]:
    """Return the faults that are shown, after checking that they are shown at one node only."""
    sick, well = (await service.queries.cluster()).nodes
    assert (sick.hostname, well.withheld) == (HOST, [])
    return [one.code for one in sick.withheld]


async def events(service: Service, job_id: str) -> list[Event]:
    found = (await service.queries.events(job_id)).items
    return [event for event in found if event.type == "gpu_fault"]


async def release(service: Service) -> None:
    await WithheldNodes(service.database).release(HOST)


async def test_a_fault_is_shown_and_told_once_to_the_job_on_the_gpu(service: Service) -> None:
    mine, neighbour = await service.running(), await service.running()
    for _ in range(3):
        see(service, fault("xid_79", "1", mine))
    assert await codes(service) == ["xid_79"]
    (event,) = await events(service, mine)
    assert event.code == "xid_79"
    assert event.message == (
        f"GPU 0: xid_79, on {HOST}; its node gets no new work until an admin releases it"
    )
    assert await events(service, neighbour) == []
    assert (await service.jobs.get(mine)).state == (await service.jobs.get(neighbour)).state


async def test_an_error_of_the_program_withholds_nothing(service: Service) -> None:
    job_id = await service.running()
    for _ in range(2):
        see(service, fault("xid_31", "1", job_id, is_sick=False))
    assert await codes(service) == []
    (event,) = await events(service, job_id)
    assert event.message == f"GPU 0: xid_31, on {HOST}"


@pytest.mark.parametrize("seed", range(3))
async def test_errors_of_a_program_are_counted(service: Service, seed: int) -> None:
    """A job gets at most one event for each kind in 10 minutes, and no error is left out."""
    draw = random.Random(seed)
    job_id, other = await service.running(), await service.running()
    happened = dict.fromkeys(("xid_13", "xid_31"), 0)
    counts: dict[tuple[str, str], int] = {}
    reported: dict[tuple[str, str], GpuFault] = {}
    for at in range(90):
        if at < 60:
            for _ in range(draw.randint(0, 3)):
                code, gpu = draw.choice(["xid_13", "xid_31"]), draw.choice(["GPU-1", "GPU-2"])
                more = draw.choice([1, 1, 50])
                happened[code] += more
                counts[gpu, code] = counts.get((gpu, code), 0) + more
                one = fault(code, str(at + draw.random()), job_id, gpu=gpu, is_sick=False)
                reported[gpu, code] = replace(one, count=counts[gpu, code])
        see(service, *reported.values())
        service.advance(draw.choice([5.0, 60.0]))
    for _ in range(2):
        service.advance(601.0)
        see(service, *reported.values())
    found = await events(service, job_id)
    for code, number in happened.items():
        of_code = [event for event in found if event.code == code]
        assert sum(event.data["count"] for event in of_code) == number
        times = [event.time for event in of_code]
        assert all((b - a).total_seconds() >= 600 for a, b in itertools.pairwise(times))
    assert await events(service, other) == []
    assert await codes(service) == []


async def test_a_withheld_node_stays_so_when_its_agent_or_ray_restarts(service: Service) -> None:
    see(service, fault())
    see(service)
    see(service, node=replace(NODE, node_id="node-a2"))
    assert await codes(service) == ["xid_79"]


async def test_a_released_fault_counts_again_only_if_it_happens_again(service: Service) -> None:
    see(service, fault("ecc", "1"))
    await release(service)
    see(service, fault("ecc", "1"))
    assert await codes(service) == []
    see(service, fault("ecc", "2"))
    assert await codes(service) == ["ecc"]
    await release(service)
    see(service)  # the driver was loaded again: the count is 0
    see(service, fault("ecc", "2"))
    assert await codes(service) == ["ecc"]


async def test_a_node_without_faults_can_not_be_released(service: Service) -> None:
    see(service)
    with pytest.raises(NothingWithheld, match=r"gpu-7\.lan"):
        await release(service)


async def test_agents_on_one_host_report_its_gpus_once(service: Service) -> None:
    job_id = await service.running()
    first, second = fault("xid_79", "1", job_id), replace(fault("xid_79", "2", job_id), since=1001)
    nodes = (
        replace(NODE, gpu_faults=(first,)),
        replace(NODE, node_id="node-c", gpu_faults=(second,)),
    )
    snapshot = ClusterSnapshot("session-1", "ray://x", None, False, nodes)
    for _ in range(3):
        service.database.write_sync(lambda s: node_table.store(s, snapshot, None, service.now))
    assert len(await events(service, job_id)) == 1


async def test_other_parts_of_the_service_can_withhold_a_node(service: Service) -> None:
    job_id = await service.running()
    see(service)
    for _ in range(2):
        service.database.write_sync(
            lambda s: withhold(
                s,
                HOST,
                "rank 3 computed another result than its replicas",
                code="corruption",
                now=service.now,
                mark=f"{job_id}:1",
                jobs=[(job_id, 1)],
            )
        )
    see(service)
    assert await codes(service) == ["corruption"]
    assert len(await events(service, job_id)) == 1
    await release(service)
    see(service)
    assert await codes(service) == []


def test_the_plan_gets_no_gpus_of_a_withheld_node() -> None:
    seen = SeenNodes()
    cluster = ClusterSnapshot("session-1", "ray://x", None, shared=False, nodes=(NODE, OTHER))
    for hosts, gpus in (((), 4.0), ((HOST,), 0.0), ((), 4.0)):
        sick, well = seen.of(cluster, (), set(), shares_gpus=False, withheld_hosts=hosts)
        assert sick.available_to_us == {"CPU": 8.0, "GPU": gpus}
        assert sick.quarantined.get("GPU", 0.0) == 4.0 - gpus
        assert well.available_to_us == {"CPU": 8.0, "GPU": 4.0}
    sick, _ = seen.of(cluster, (), set(), shares_gpus=True, withheld_hosts=[HOST])
    assert set(sick.available_to_us.values()) == {0.0, 8.0}


def test_a_withheld_node_without_gpus_offers_no_cpus() -> None:
    node = cluster_node("node-a", {"CPU": 8.0}, hostname=HOST)
    cluster = ClusterSnapshot("session-1", "ray://x", None, shared=False, nodes=(node,))
    (sick,) = SeenNodes().of(cluster, (), set(), shares_gpus=False, withheld_hosts=[HOST])
    assert sick.available_to_us == {"CPU": 0.0}


@pytest.mark.parametrize("seed", range(3))
async def test_drawn_reports_and_releases(service: Service, seed: int) -> None:
    draw = random.Random(seed)
    reported: dict[str, int] = {}
    is_out: dict[str, bool] = {}
    for _ in range(40):
        code = draw.choice(["xid_79", "ecc", "lost"])
        match draw.randrange(4):
            case 0 | 1:
                reported[code] = draw.randint(1, 3)
            case 2:
                reported.pop(code, None)
            case 3:
                if any(is_out.values()):
                    await release(service)
                    is_out = dict.fromkeys(is_out, False)
        before = getattr(service, "_drawn", {})
        for name, mark in reported.items():
            if before.get(name) != mark:
                is_out[name] = True
        kept = {name: mark for name, mark in before.items() if is_out.get(name)}
        service._drawn = {**kept, **reported}  # type: ignore[attr-defined]
        see(service, *(fault(name, str(mark)) for name, mark in reported.items()))
        assert sorted(await codes(service)) == sorted(n for n, out in is_out.items() if out)


def test_a_faulty_cpu_withholds_the_cpus_of_a_node_with_gpus() -> None:
    cluster = ClusterSnapshot("session-1", "ray://x", None, shared=False, nodes=(NODE,))
    (sick,) = SeenNodes().of(
        cluster, (), set(), shares_gpus=False, withheld_hosts=[HOST], faulty_cpus=[HOST]
    )
    assert sick.available_to_us == {"CPU": 0.0, "GPU": 4.0}
