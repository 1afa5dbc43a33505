"""Federated silos: workers run on the nodes with their data, and only these workers get the
source."""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from ray_workers.node import silo_gate
from ray_workers.shared.contracts import ProcessSpec, RankTask
from ray_workers.shared.slices import Slice
from service.cluster.port import ClusterSnapshot
from service.config.node_types import SILO_LABEL
from service.db.models import JobRow
from service.db.repositories import jobs as repository
from service.domain.errors import DataSourceForbidden, Unsatisfiable
from service.domain.scheduling import policy
from service.lifecycle import claims, resizing
from service.loops.shared import queue_view
from service.nodes import node_table
from tests.unit.service.helpers import Service
from tests.wire import cluster_node

CANARIES = ("Kanarie-north", "Kanarie-south")
NAMES = ("north", "south")


def federated(**more: Any) -> dict[str, Any]:
    silos = [
        {"name": name, "node_labels": {"silo": name}, "source": f"file:///{canary}.npz"}
        for name, canary in zip(NAMES, CANARIES, strict=True)
    ]
    return {"federated": {"silos": silos, "rounds": 3, **more}}


def see(
    service: Service,
    *labels: dict[str, str],
    cpus: float = 2.0,
    refused: Collection[int] = (),
) -> None:
    nodes = tuple(
        cluster_node(f"node-{number}", {"CPU": cpus}, labels=each)
        for number, each in enumerate(labels)
    )
    nodes = tuple(
        replace(node, accepted=False) if number in refused else node
        for number, node in enumerate(nodes)
    )
    snapshot = ClusterSnapshot("session-1", "ray://x", "http://dash", False, nodes)
    service.database.write_sync(lambda s: node_table.store(s, snapshot, None, service.now))


def row_of(service: Service, job_id: str) -> JobRow:
    found = service.database.read_sync(lambda s: repository.get(s, job_id))
    assert found is not None
    return found


async def everything_shown(service: Service, job_id: str) -> str:
    """Return the API's responses for a job, and the rows and the document of its attempt."""
    job = await service.jobs.get(job_id)
    page = await service.jobs.list()
    row = row_of(service, job_id)
    waiting, _ = service.database.read_sync(lambda s: queue_view.snapshot(s, service.now))
    events = await service.queries.events(job_id)
    return repr((job, page, row.spec, waiting, events))


async def test_a_source_is_in_no_document_and_goes_to_its_rank_alone(service: Service) -> None:
    see(service, {}, {"silo": "north"}, {"silo": "south"})
    job_id = await service.submit(**federated())
    assert row_of(service, job_id).silo_sources == [f"file:///{each}.npz" for each in CANARIES]
    assert "Kanarie" not in await everything_shown(service, job_id)
    claimed = service.claim(job_id, workers=3)
    assert claimed is not None
    assert "Kanarie" not in json.dumps(claimed.spec)
    tasks = [RankTask.of(claimed, process_spec(rank)) for rank in range(3)]
    assert "Kanarie" not in tasks[0].to_json()
    for rank, own, other in ((1, *CANARIES), (2, *reversed(CANARIES))):
        assert own in tasks[rank].to_json()
        assert other not in tasks[rank].to_json()
    assert RankTask.from_json(tasks[1].to_json()) == tasks[1]
    assert [silo_gate.silo_of(task) and task.rank for task in tasks] == [None, 1, 2]


def process_spec(rank: int) -> ProcessSpec:
    texts = dict.fromkeys(("spool_dir", "temp_dir", "work_dir", "folders_dir", "page_prefix"), "/x")
    numbers = dict.fromkeys(("incarnation", "local_rank", "node_rank", "generation"), 0)
    more: dict[str, Any] = {**texts, **numbers, "local_world_size": 1, "peers": ()}
    return ProcessSpec(rank=rank, master_addr="127.0.0.1", master_port=1, **more)


async def test_workers_run_on_their_pinned_nodes_and_the_aggregator_on_a_node_without_data(
    service: Service,
) -> None:
    see(service, {"silo": "south"}, {}, {"silo": "north", "rack": "a"})
    job_id = await service.submit(**federated())
    (decision,) = planned(service)
    assert isinstance(decision, policy.Start)
    assert decision.slices == (Slice("node-1", 1), Slice("node-2", 1), Slice("node-0", 1))
    assert row_of(service, job_id).num_workers == 3


async def test_a_silo_waits_for_its_own_node_while_others_are_free(service: Service) -> None:
    see(service, {"silo": "south"}, {}, {"silo": "north"}, cpus=1.0)
    await service.submit(**federated())
    (decision,) = planned(service, taken={"node-2"})
    assert isinstance(decision, policy.Wait)
    assert "each silo on a node that has its data" in decision.reason.message


def planned(service: Service, taken: frozenset[str] | set[str] = frozenset()) -> list[Any]:
    def look(session: Any) -> policy.Snapshot:
        nodes = node_table.usable(session)
        waiting, _ = queue_view.snapshot(session, service.now)
        nodes = tuple(
            replace(node, available_to_us={**node.available_to_us, "CPU": 0.0})
            if node.id in taken
            else node
            for node in nodes or ()
        )
        return policy.Snapshot(waiting, nodes, connected=True, holders=())

    return list(policy.plan(service.database.read_sync(look), service.now))


async def test_the_example_is_taken_by_a_cluster_with_its_nodes(service: Service) -> None:
    example = Path(__file__).parents[4] / "examples" / "federated" / "silos.yaml"
    see(service, {"hospital": "north"}, {"hospital": "south"}, {})
    await service.submit(**yaml.safe_load(example.read_text()))
    (decision,) = planned(service)
    assert decision.slices == (Slice("node-2", 1), Slice("node-0", 1), Slice("node-1", 1))


@pytest.mark.parametrize(
    ("labels", "silo"),
    [
        (({}, {"silo": "north"}), 1),
        (({}, {"silo": "south"}), 0),
    ],
)
async def test_a_silo_without_a_node_is_refused_and_named(
    service: Service, labels: Any, silo: int
) -> None:
    see(service, *labels)
    with pytest.raises(Unsatisfiable) as refused:
        await service.submit(**federated())
    assert refused.value.pointer == f"/federated/silos/{silo}/node_labels"
    assert f"silo={NAMES[silo]}" in str(refused.value)


KEPT = {SILO_LABEL: "true", "hospital": "west"}
BY_LABEL = {"resources": {"num_workers": 1, "node_labels": {"hospital": "west"}}}


@pytest.mark.parametrize(
    "document",
    [
        BY_LABEL,
        {"resources": {"num_workers": 1, "node_labels": {SILO_LABEL: "true"}}},
        {"array": {"size": 3}, **BY_LABEL},
        {"resources": {"num_workers": 3}},
        {"resources": {"num_workers": 3}, "elastic": {"min_workers": 3}},
    ],
)
async def test_no_document_leads_to_a_node_with_a_silos_data(
    service: Service, document: Any
) -> None:
    see(service, {}, KEPT, KEPT)
    with pytest.raises(
        Unsatisfiable, match="2 nodes with a silo's data, which accept only ranks of silos"
    ):
        await service.submit(**document)
    see(service, {"hospital": "west", "note": f'"{SILO_LABEL}": '}, {}, KEPT)
    if SILO_LABEL not in str(document):
        await service.submit(**document)
        decision, *_ = planned(service)
        assert isinstance(decision, policy.Start)
        assert {part.node_id for part in decision.slices} <= {"node-0", "node-1"}


async def test_a_cluster_of_silos_alone_refuses_jobs_and_says_why(service: Service) -> None:
    see(service, KEPT)
    with pytest.raises(Unsatisfiable, match="every node of the cluster has a silo's data"):
        await service.submit()
    (node,) = (await service.queries.cluster()).nodes
    assert node.labels == KEPT
    assert node.reason == "the node has a silo's data, and runs only ranks of silos"
    see(service, {})
    await service.submit()
    see(service, KEPT)
    (decision,) = planned(service)
    assert isinstance(decision, policy.Wait)
    assert "every node of the cluster has a silo's data" in decision.reason.message


async def test_jobs_are_accepted_while_all_nodes_without_silos_are_refused(
    service: Service,
) -> None:
    """Such a node can be accepted again."""
    see(service, {}, KEPT, refused={0})
    await service.submit()


async def test_two_silos_on_one_node_need_slots_for_both(service: Service) -> None:
    both = [{"name": name, "node_labels": {"site": "a"}} for name in NAMES]
    document = {"federated": {"silos": both, "rounds": 1}}
    see(service, {"site": "a"}, {}, cpus=1.0)
    with pytest.raises(Unsatisfiable, match="in addition to other silos"):
        await service.submit(**document)
    see(service, {"site": "a"}, {}, cpus=2.0)
    await service.submit(**document)
    (decision,) = planned(service)
    assert decision.slices == (Slice("node-1", 1), Slice("node-0", 1), Slice("node-0", 1))


async def test_a_forbidden_source_is_refused_by_its_silo(service: Service, tmp_path: Any) -> None:
    document = federated()
    document["federated"]["silos"][1]["source"] = "http://127.0.0.1/data.npz"
    with pytest.raises(DataSourceForbidden) as refused:
        await service.submit(**document)
    assert refused.value.pointer == "/federated/silos/1/source"


async def test_a_stored_job_keeps_its_pinned_nodes(service: Service) -> None:
    job_id = await service.submit(**federated())
    request = resizing.request_of(row_of(service, job_id))
    assert request.homes == (("label:silo=north",), ("label:silo=south",))
    wanted = claims.Wanted(job_id, 0, "default", (Slice("node-a", 3),), {"CPU": 1.0})
    (claimed,) = service.database.write_sync(
        lambda s: claims.claim(s, [wanted], service.deployment, service.now)
    )
    assert claimed is not None
    assert claimed.silo_sources == tuple(f"file:///{each}.npz" for each in CANARIES)
