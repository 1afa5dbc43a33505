"""Nodes are requested from Ray's autoscaler for waiting jobs, and the request is later
withdrawn."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from dray.spec import JobSpec
from dray.views import JobState
from ray_workers.shared.contracts import FrameKind
from ray_workers.shared.self_tests import NodeTest, TestPhase
from service.cluster.port import ClusterUnavailable
from service.config import node_types
from service.db.repositories.scheduling import cluster as repository
from service.domain.errors import Unsatisfiable
from service.loops.scheduling.autoscaler import Autoscaler
from service.nodes.checks import NodeChecks
from service.runtime import Runtime
from tests.fakes.cluster import STARTS
from tests.marks import RULES
from tests.unit.service.loops.world import World, comes_to, eventually, says, withhold

pytestmark = RULES

ONE = ({"CPU": 1.0}, 4)
WHOLE = ({"CPU": 4.0}, 1)
TYPES = "3x CPU=4"


async def open_on(world: World, **settings: Any) -> Runtime:
    return await world.open(**{"autoscale_nodes": node_types.parse(TYPES), **settings})


async def asks_for(world: World, *bundles: tuple[dict[str, float], int]) -> None:
    """Wait until the last request has these bundles."""

    def is_so() -> bool:
        return bool(world.fake.requests) and world.fake.requests[-1][0] == list(bundles)

    await world.fake.until(is_so, f"{list(bundles)} was never asked for")


async def stored(runtime: Runtime, num_nodes: int) -> None:
    async def is_so() -> bool:
        row = await runtime.database.read(repository.autoscaling)
        return row is not None and row.num_nodes == num_nodes

    await eventually(is_so, f"{num_nodes} nodes were never stored")


async def test_a_job_asks_for_a_node_starts_on_it_and_the_demand_goes(world: World) -> None:
    runtime = await open_on(world)
    holds = await world.submit(runtime, "waits", workers=4)
    await comes_to(runtime, holds, JobState.RUNNING)
    job_id = await world.submit(runtime, "waits", workers=4)
    await asks_for(world, ONE, WHOLE)
    told = (await says(runtime, job_id, "waiting_for_slots")).reason.message
    assert "; Ray was asked for 1 more node at " in told
    await stored(runtime, 1)
    world.fake.add_node("node-b", {"CPU": 4.0})
    await comes_to(runtime, job_id, JobState.RUNNING)
    assert world.fake.launches[-1].slices[0].node_id == "node-b"
    await asks_for(world)
    await stored(runtime, 0)


async def test_a_job_that_the_cluster_could_never_run_waits_for_nodes_that_may_come(
    world: World,
) -> None:
    runtime = await open_on(world)
    job_id = await world.submit(runtime, workers=12)
    waits = await says(runtime, job_id, "waiting_for_nodes")
    assert "; Ray was asked for 2 more nodes at " in waits.reason.message
    for name in "bc":
        world.fake.add_node(f"node-{name}", {"CPU": 4.0})
    await comes_to(runtime, job_id, JobState.SUCCEEDED)


async def test_a_job_that_no_node_to_come_could_run_is_refused(world: World) -> None:
    runtime = await open_on(world)
    await runtime_sees_nodes(runtime)
    with pytest.raises(Unsatisfiable, match="the whole cluster has room for 12 at once"):
        await world.submit(runtime, workers=13)
    document = {"recipe": "image_classification", "resources": {"cpus_per_worker": 8}}
    with pytest.raises(Unsatisfiable, match="the largest node has 4 CPU"):
        await runtime.jobs.submit(JobSpec.model_validate(document))


async def runtime_sees_nodes(runtime: Runtime) -> None:
    async def are_known() -> bool:
        return bool((await runtime.queries.cluster()).nodes)

    await eventually(are_known, "no node was ever stored")


async def test_a_job_beyond_the_types_that_are_left_says_so(world: World) -> None:
    runtime = await open_on(world)
    for workers in (4, 8):
        await world.submit(runtime, "waits", workers=workers)
    job_id = await world.submit(runtime, "waits", workers=1)
    told = await eventually(
        lambda: reason_with(runtime, job_id, "no more nodes can currently be added"),
        "the explanation never had these words",
    )
    assert "DRAY_AUTOSCALE_NODES" in told


async def reason_with(runtime: Runtime, job_id: str, words: str) -> str:
    message = (await runtime.queries.explain(job_id)).reason.message
    return message if words in message else ""


async def test_a_cluster_that_has_scaled_to_nothing_grows_again(world: World) -> None:
    world.fake.lose_node("node-a")
    runtime = await open_on(world)
    job_id = await world.submit(runtime, workers=4)
    await asks_for(world, ONE)
    world.fake.add_node("node-b", {"CPU": 4.0})
    world.fake.nodes["node-b"].problem = STARTS
    await asks_for(world, WHOLE)  # it exists, and must stay
    world.fake.nodes["node-b"].problem = None
    await comes_to(runtime, job_id, JobState.SUCCEEDED)


async def test_a_job_waits_while_nodes_are_refused_and_no_more_may_come(world: World) -> None:
    world.set_timings(impossible_grace_s=0.0)
    world.fake.nodes["node-a"].problem = "it runs dray 0.0.1"
    runtime = await open_on(world, autoscale_nodes=node_types.parse("1x CPU=4"))
    job_id = await world.submit(runtime, workers=4)
    told = (await says(runtime, job_id, "waiting_for_nodes")).reason.message
    assert "no more nodes can currently be added for the job" in told
    world.fake.nodes["node-a"].problem = None
    await comes_to(runtime, job_id, JobState.SUCCEEDED)


async def test_nodes_that_came_smaller_than_their_type_are_not_asked_for_again(
    world: World,
) -> None:
    gib = float(2**30)
    runtime = await open_on(world, autoscale_nodes=node_types.parse("3x CPU=4 memory=4GiB"))
    resources = {"num_workers": 1, "memory_bytes": int(4 * gib)}
    document = {"name": "waits", "recipe": "image_classification", "resources": resources}
    job, _ = await runtime.jobs.submit(JobSpec.model_validate(document))
    await asks_for(world, ({"CPU": 1.0, "memory": 4 * gib}, 1))
    world.fake.add_node("node-b", {"CPU": 4.0, "memory": 3 * gib})
    await asks_for(world)
    told = await eventually(
        lambda: reason_with(runtime, job.id, "no nodes are requested"),
        "the explanation never had these words",
    )
    assert told.endswith(
        "have only 3 GiB of memory, but DRAY_AUTOSCALE_NODES specifies 4 GiB of memory"
    )
    world.fake.add_node("node-c", {"CPU": 4.0, "memory": 4 * gib})
    await comes_to(runtime, job.id, JobState.RUNNING)


async def test_a_node_is_requested_for_a_waiting_group_and_its_reason_names_it(
    world: World,
) -> None:
    world.fake.add_node("node-b", {"CPU": 2.0})
    runtime = await open_on(world)
    job_id = await world.submit(runtime, "waits", workers=6)
    await comes_to(runtime, job_id, JobState.RUNNING)
    del world.fake.nodes["node-b"]

    async def is_seen() -> bool:
        latest = runtime.watch and runtime.watch.latest
        return latest is not None and len(latest.nodes) == 1

    await eventually(is_seen, "the loss of the node was never seen")
    lost = {"generation": 1, "ranks": [4, 5], "code": "lost", "message": "lost a node"}
    world.fake.tell(job_id, FrameKind.REGROUPING, lost)
    left = [{"node_id": "node-a", "num_workers": 4}]
    body = {"world_size": 4, "slices": left, "lacking": 2, "grants": 0, "message": "lost a node"}
    world.fake.tell(job_id, FrameKind.RESIZED, body)
    await asks_for(world, ({"CPU": 1.0}, 2), WHOLE)
    reason = await eventually(
        lambda: reason_with(runtime, job_id, "Ray was asked for"), "no reason has these words"
    )
    assert "waits for 2 workers" in reason


async def test_a_cancelled_job_withdraws_what_it_asked_for(world: World) -> None:
    runtime = await open_on(world)
    job_id = await world.submit(runtime, workers=8)
    await asks_for(world, ONE, WHOLE)
    await runtime.jobs.cancel(job_id)
    await asks_for(world)


async def test_it_is_asked_for_again_since_a_new_ray_has_not_heard_it(world: World) -> None:
    world.set_timings(request_period_s=0.05)
    runtime = await open_on(world)
    await world.submit(runtime, workers=8)
    await asks_for(world, ONE, WHOLE)
    world.fake.restart()
    world.fake.requests.clear()
    await asks_for(world, ONE, WHOLE)


async def test_a_request_that_ray_did_not_answer_is_made_again(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask, losses = world.fake.request_nodes, iter(range(2))

    async def lost_at_first(*arguments: Any) -> None:
        if next(losses, None) is not None:
            raise ClusterUnavailable("the gateway is gone")
        await ask(*arguments)

    monkeypatch.setattr(world.fake, "request_nodes", lost_at_first)
    runtime = await open_on(world)
    await world.submit(runtime, workers=8)
    await asks_for(world, ONE, WHOLE)


async def test_a_service_that_stops_in_order_withdraws_its_demand(world: World) -> None:
    runtime = await open_on(world)
    await world.submit(runtime, workers=8)
    await asks_for(world, ONE, WHOLE)
    await world.drop(runtime)
    await asks_for(world)


async def test_a_service_without_the_setting_withdraws_what_one_with_it_had_asked_for(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = await open_on(world)
    job_id = await world.submit(runtime, workers=8)
    await stored(runtime, 1)
    with monkeypatch.context() as patch:
        patch.setattr(Autoscaler, "withdraw", nothing)  # as if it had been killed
        await world.drop(runtime)
    world.fake.requests.clear()
    world.set_timings(impossible_grace_s=0.0)
    second = await world.open()
    await asks_for(world)
    job = await comes_to(second, job_id, JobState.FAILED)
    assert job.reason.code == "unsatisfiable"


async def nothing(_: object) -> None:
    """Replacement for a method that a killed process does not call."""


async def test_without_the_setting_ray_is_asked_for_nothing(world: World) -> None:
    runtime = await world.open()
    job_id = await world.submit(runtime)
    await comes_to(runtime, job_id, JobState.SUCCEEDED)
    assert world.fake.requests == []


async def test_the_next_leader_asks_for_what_waits(postgres_world: World) -> None:
    world = postgres_world
    one = await open_on(world)
    two = await open_on(world)
    await world.submit(two, workers=8)
    await asks_for(world, ONE, WHOLE)
    await world.drop(one)
    assert world.fake.requests[-1][0] in ([], [ONE, WHOLE])
    world.fake.requests.clear()
    await asks_for(world, ONE, WHOLE)


async def test_a_node_that_carries_nothing_is_released_and_taken_back_when_it_is_needed(
    world: World,
) -> None:
    runtime = await open_on(world, autoscale_idle_s=0.0)
    node = world.fake.nodes["node-a"]
    await world.fake.until(lambda: node.is_released)
    assert runtime.watch is not None

    async def shows_it() -> bool:
        nodes = (await runtime.queries.cluster()).nodes
        return bool(nodes) and not nodes[0].accepted

    await eventually(shows_it, "the node was never shown as released")
    assert (await runtime.ready()).checks["nodes"] == "ok"
    job_id = await world.submit(runtime, "waits", workers=4)
    await comes_to(runtime, job_id, JobState.RUNNING)
    assert not node.is_released
    await runtime.jobs.cancel(job_id)
    await comes_to(runtime, job_id, JobState.CANCELLED)
    await world.fake.until(lambda: node.is_released)


async def test_nothing_starts_on_a_node_that_is_just_being_released(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask, asked, may_answer = world.fake.request_nodes, asyncio.Event(), asyncio.Event()

    async def slowly(bundles: Any, released: Any) -> None:
        asked.set()
        await may_answer.wait()
        await ask(bundles, released)

    monkeypatch.setattr(world.fake, "request_nodes", slowly)
    runtime = await open_on(world, autoscale_idle_s=0.0)
    await asked.wait()
    job_id = await world.submit(runtime, "waits", workers=4)
    await says(runtime, job_id, "waiting_for_nodes")
    assert world.fake.launches == []
    may_answer.set()
    await comes_to(runtime, job_id, JobState.RUNNING)
    assert not world.fake.nodes["node-a"].is_released


async def test_a_head_and_a_node_that_others_use_or_is_idle_for_a_short_time_are_not_released(
    world: World,
) -> None:
    world.fake.shared = True
    world.fake.use_elsewhere("node-a", {"CPU": 1.0})
    world.fake.add_node("node-b", {"CPU": 4.0})
    world.fake.add_node("head", {"CPU": 4.0})
    world.fake.nodes["head"].is_never_released = True
    runtime = await open_on(world, autoscale_idle_s=0.0)
    await world.fake.until(lambda: world.fake.nodes["node-b"].is_released)
    assert not world.fake.nodes["node-a"].is_released
    assert not world.fake.nodes["head"].is_released
    await world.drop(runtime)
    world.fake.requests.clear()
    world.set_timings(request_period_s=0.02)
    await open_on(world, autoscale_idle_s=3600.0)
    await world.fake.until(lambda: len(world.fake.requests) > 2)
    assert all(released == [] for _, released in world.fake.requests)


async def test_a_job_goes_to_nodes_with_its_labels_and_ray_hears_of_resources_alone(
    world: World,
) -> None:
    world.fake.add_node("node-b", {"CPU": 4.0, "label:zone=b": 1.0})
    types = "1x CPU=4, 2x CPU=4 label:zone=b"
    runtime = await open_on(world, autoscale_nodes=node_types.parse(types))
    wants = {"num_workers": 4, "node_labels": {"zone": "b"}}
    document = {"name": "waits", "recipe": "image_classification", "resources": wants}
    first, _ = await runtime.jobs.submit(JobSpec.model_validate(document))
    await comes_to(runtime, first.id, JobState.RUNNING)
    (launch,) = world.fake.launches
    assert (launch.slices[0].node_id, launch.bundle) == ("node-b", {"CPU": 1.0})
    _, labelled = (await runtime.queries.cluster()).nodes
    assert (labelled.labels, labelled.held) == ({"zone": "b"}, {"CPU": 4.0})
    assert labelled.resources == {"CPU": 4.0}
    second, _ = await runtime.jobs.submit(JobSpec.model_validate(document))
    await asks_for(world, ({"CPU": 1.0, "label:zone=b": 0.001}, 4), WHOLE)
    told = (await says(runtime, second.id, "waiting_for_slots")).reason.message
    assert "on nodes with zone=b" in told


async def test_no_node_is_requested_in_place_of_a_node_that_is_tested(world: World) -> None:
    """The second job needs another node, because the first one will start on the tested node."""
    runtime = await open_on(world, autoscale_idle_s=0.0)
    world.fake.tests["node-a"] = NodeTest(TestPhase.RUNNING)
    await runtime_sees_nodes(runtime)
    await NodeChecks(runtime.database).check("node-a.fake")
    first = await world.submit(runtime, "waits", workers=4)
    await asks_for(world, WHOLE)
    told = (await says(runtime, first, "waiting_for_slots")).reason.message
    assert told.endswith("; node node-a.fake gets no new work until its self-test is done")
    second = await world.submit(runtime, "waits", workers=4)
    await asks_for(world, ONE, WHOLE)
    await reason_with(runtime, second, "; Ray was asked for 1 more node at ")
    assert "Ray was asked" not in (await runtime.jobs.get(first)).reason.message
    assert not world.fake.nodes["node-a"].is_released
    del world.fake.tests["node-a"]
    await comes_to(runtime, first, JobState.RUNNING)


async def test_a_node_is_requested_in_place_of_a_withheld_node(world: World) -> None:
    runtime = await open_on(world)
    await runtime_sees_nodes(runtime)
    await withhold(runtime, "node-a.fake")
    job_id = await world.submit(runtime, workers=4)
    await asks_for(world, ONE, WHOLE)
    told = (await says(runtime, job_id, "waiting_for_slots")).reason.message
    assert "; Ray was asked for 1 more node at " in told
    world.fake.add_node("node-b", {"CPU": 4.0})
    await comes_to(runtime, job_id, JobState.SUCCEEDED)
    assert [part.node_id for part in world.fake.launches[-1].slices] == ["node-b"]
