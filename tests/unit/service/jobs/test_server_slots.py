"""Jobs whose roles have their own resources, from submission to the supervisor."""

from __future__ import annotations

from typing import Any

import pytest

from dray.spec import JobSpec
from ray_workers.shared.contracts import RankTask
from ray_workers.shared.slices import RoleSlots, Slice
from service.cluster.port import ClusterSnapshot
from service.db.repositories import jobs as repository
from service.domain.errors import Unsatisfiable
from service.lifecycle import claims, resizing
from service.loops.shared import queue_view
from service.nodes import node_table
from service.queues import admission
from tests.unit.service.helpers import Service
from tests.unit.service.jobs.test_silos import process_spec
from tests.wire import attempt_spec, cluster_node

pytestmark = pytest.mark.anyio
SERVERS = (RoleSlots("server", 2, 1, {"CPU": 2.0}),)
GPUS = {"CPU": 1.0, "GPU": 1.0}


def document(cpus: int = 2) -> dict[str, Any]:
    return {
        "resources": {"num_workers": 3, "gpus_per_worker": 1},
        "sync": {"kind": "parameter_server", "server_resources": {"cpus": cpus}},
    }


def see(service: Service, cpus: float) -> None:
    nodes = (cluster_node("node-a", {"CPU": cpus, "GPU": 2.0}),)
    snapshot = ClusterSnapshot("session-1", "ray://x", "http://dash", False, nodes)
    service.database.write_sync(lambda s: node_table.store(s, snapshot, None, service.now))


async def test_servers_keep_their_slots_from_the_document_to_the_attempt(service: Service) -> None:
    see(service, 4.0)
    job_id = await service.submit(**document())
    job = service.database.read_sync(lambda s: repository.get(s, job_id))
    assert job is not None
    request = resizing.request_of(job)
    assert (request.bundle, request.roles) == (GPUS, SERVERS)
    slices = (Slice("node-a", 2), Slice("node-a", 1))
    wanted = claims.Wanted(job_id, 0, "default", slices, GPUS, SERVERS)
    at = service.deployment
    service.database.write_sync(lambda s: claims.claim(s, [wanted], at, service.now))
    (live,) = service.database.read_sync(lambda s: queue_view.snapshot(s, service.now))[1]
    assert live.roles == SERVERS
    held = service.database.read_sync(lambda s: admission.of_users(s, []))
    assert held["default"][0].holds["CPU"] == 4.0


async def test_servers_that_no_node_has_room_for_are_refused(service: Service) -> None:
    see(service, 4.0)
    with pytest.raises(Unsatisfiable, match="room for 0 servers") as refused:
        await service.submit(**document(cpus=5))
    assert refused.value.pointer == "/sync/server_resources"
    with pytest.raises(Unsatisfiable, match="but not for all at once") as refused:
        await service.submit(**document(cpus=3))
    assert refused.value.pointer == "/sync/server_resources"


@pytest.mark.parametrize(
    ("ps", "worker", "pointer"),
    [
        ({"resources": {"cpus": 5}}, {}, "/script/roles/ps/resources"),
        ({"num_workers": 3, "resources": {"cpus": 2}}, {}, "/script/roles/ps/resources"),
        ({"resources": {"cpus": 4}}, {}, "/script/roles"),
        ({"resources": {}}, {"num_workers": 3}, "/script/roles"),
        ({}, {"num_workers": 2}, "/script/roles"),
    ],
)
async def test_roles_that_no_node_has_room_for_are_refused(
    service: Service, ps: dict[str, Any], worker: dict[str, Any], pointer: str
) -> None:
    see(service, 4.0)
    script = {"entrypoint": "a.py", "roles": {"worker": worker, "ps": ps}}
    with pytest.raises(Unsatisfiable) as refused:
        await service.submit(recipe=None, script=script, resources={"gpus_per_worker": 1})
    assert refused.value.pointer == pointer
    assert (await service.jobs.list()).items == []


def test_a_server_has_no_gpu() -> None:
    spec = JobSpec.model_validate({"recipe": "image_classification", **document()})
    slices = (Slice("a", 2), Slice("a", 1))
    attempt = attempt_spec(
        spec=spec.model_dump(mode="json"), slices=slices, bundle=GPUS, roles=SERVERS
    )
    devices = [RankTask.of(attempt, process_spec(rank)).device for rank in range(3)]
    assert devices == ["cuda", "cuda", "cpu"]
