"""Quarantined slots are shown in the view of the cluster and in the events of their job."""

from __future__ import annotations

from dataclasses import replace

from dray.views import Event, JobState
from ray_workers.shared.contracts import Cause
from ray_workers.shared.quarantine import Quarantined
from service.cluster.port import ClusterNode, ClusterSnapshot
from service.nodes import node_table
from tests.unit.service.helpers import START, Service
from tests.wire import cluster_node

NODE = cluster_node("node-a", {"CPU": 4.0}, hostname="big.lan", available={"CPU": 3.0})


def see(service: Service, *there: ClusterNode) -> None:
    snapshot = ClusterSnapshot("session-1", "ray://x", None, False, there)
    service.database.write_sync(lambda s: node_table.store(s, snapshot, None, service.now))


def keeping(job_id: str, reason: str = "pid 7 (python, state D) is there") -> ClusterNode:
    entry = Quarantined(job_id, 1, 1, {"CPU": 1.0}, reason, START.timestamp())
    return replace(NODE, quarantined=(entry,))


async def told(service: Service, job_id: str) -> list[Event]:
    events = (await service.queries.events(job_id)).items
    assert [event.seq for event in events] == list(range(1, len(events) + 1))
    return [event for event in events if event.type.startswith("slot_")]


async def ended(service: Service) -> str:
    job_id = await service.submit()
    service.claim(job_id)
    service.end(job_id, 1, Cause.SUCCEEDED)
    return job_id


async def test_slots_in_quarantine_are_shown_and_told_once(service: Service) -> None:
    job_id = await ended(service)
    see(service, keeping(job_id))
    see(service, keeping(job_id, "pid 7 (python, state D) is still there"))
    (node,) = (await service.queries.cluster()).nodes
    (kept,) = node.quarantined
    assert (kept.slots, kept.job_id, kept.since) == (1, job_id, START)
    assert kept.reason == "pid 7 (python, state D) is still there"
    (event,) = await told(service, job_id)
    assert (event.type, event.code) == ("slot_quarantined", "slot_quarantined")
    assert "1 slot on big.lan" in event.message
    assert "pid 7" in event.message
    assert event.data == {"node_id": "node-a", "attempt": 1, "slots": 1}
    assert (await service.jobs.get(job_id)).state is JobState.SUCCEEDED


async def test_their_release_is_told_too(service: Service) -> None:
    job_id = await ended(service)
    see(service, keeping(job_id))
    service.advance(5.0)
    see(service, NODE)
    (node,) = (await service.queries.cluster()).nodes
    assert node.quarantined == []
    assert [event.type for event in await told(service, job_id)] == [
        "slot_quarantined",
        "slot_released",
    ]


async def test_a_quarantine_ends_with_its_node(service: Service) -> None:
    job_id = await ended(service)
    see(service, keeping(job_id))
    see(service, replace(NODE, node_id="node-b"))
    assert (await told(service, job_id))[
        -1
    ].message == "the processes that were left on 1 slot vanished with their node"


async def test_while_the_cluster_is_away_nothing_is_told(service: Service) -> None:
    job_id = await ended(service)
    see(service, keeping(job_id))
    service.database.write_sync(lambda s: node_table.store(s, None, "it is away", service.now))
    see(service, keeping(job_id))
    assert len(await told(service, job_id)) == 1


async def test_a_node_that_has_not_said_yet_keeps_what_it_kept(service: Service) -> None:
    job_id = await ended(service)
    see(service, keeping(job_id))
    see(service, replace(NODE, accepted=False, quarantined=None))
    (node,) = (await service.queries.cluster()).nodes
    assert [kept.job_id for kept in node.quarantined] == [job_id]
    assert len(await told(service, job_id)) == 1
    see(service, NODE)
    assert len(await told(service, job_id)) == 2


async def test_a_job_that_was_deleted_is_told_nothing(service: Service) -> None:
    see(service, keeping("no-such-job"))
    (node,) = (await service.queries.cluster()).nodes
    assert [kept.job_id for kept in node.quarantined] == ["no-such-job"]
