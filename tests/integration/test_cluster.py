"""The scaled deployment: PostgreSQL, and a Ray cluster that was started separately. Services and
nodes are added and removed."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from dray import Client
from dray.views import Job, JobState
from tests.integration.harness import (
    RayByHand,
    Service,
    all_metrics,
    assert_events_are_whole,
    assert_one_attempt,
    digits,
    eventually,
    script,
    spools,
    step_of,
    training_pids,
    wait_for_step,
)
from tests.integration.test_faults import log_of, result_of
from tests.marks import SOAK

pytestmark = [pytest.mark.ray, pytest.mark.timeout(900)]

LOST_AT_STEP = 20
HEALTH_CHECKS = {
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "2000",
    "RAY_health_check_failure_threshold": "4",
}
"""Setting of Ray's head: how long a node can be silent, here about 6 s."""
SILENCE_BOUND_S = 6.0 + 10.0
"""The bound in docs/explanation/faults.md: Ray's time to give up a node, plus 10 s."""


@pytest.fixture(scope="module")
def ray_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayByHand]:
    """A head and two more nodes, of two slots each, with two GPUs that only Ray counts."""
    folder = tmp_path_factory.mktemp("ray")
    cluster = RayByHand(folder, gpus_per_node=2, environment=HEALTH_CHECKS)
    try:
        cluster.start("second", "third")
        yield cluster
    finally:
        cluster.stop()


@pytest.fixture(scope="module")
def joined(
    ray_cluster: RayByHand, module_postgres_url: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Service]:
    """A service on PostgreSQL that joins the cluster by its address."""
    service = Service(
        tmp_path_factory.mktemp("joined") / "home",
        {
            "DRAY_DATABASE_URL": module_postgres_url,
            "DRAY_RAY_ADDRESS": ray_cluster.address,
            "DRAY_RAY_TOKEN_FILE": str(ray_cluster.token_file),
        },
    )
    service.start()
    yield service
    assert service.stop() == 0


@pytest.fixture
def client(joined: Service) -> Iterator[Client]:
    with joined.client as client:
        eventually(lambda: sum(node.accepted for node in client.cluster().nodes) == 3)
        yield client


def gang(**changes: Any) -> dict[str, Any]:
    """Four ranks on two nodes, busy for some seconds."""
    wanted: dict[str, Any] = {
        "train": {"epochs": 16},
        "resources": {"num_workers": 4},
        "max_retries": 0,
    }
    return digits(**(wanted | changes))


def assert_ended_well(client: Client, job: Job) -> None:
    assert job.state is JobState.SUCCEEDED, job.reason
    assert_one_attempt(client, job.id)
    assert_events_are_whole(client, job.id)
    steps = all_metrics(client, job.id)["train/loss"].steps
    assert job.progress is not None
    assert steps == list(range(1, job.progress.step + 1)), "each step once, and none is missing"
    eventually(lambda: not training_pids(job.id), within_s=60)
    eventually(lambda: not spools(job.id), within_s=60)


def one_of_its_nodes(cluster: RayByHand, client: Client, job_id: str) -> str:
    """Return a node that runs ranks of the job, but is not the head."""
    carriers = {node.node_id for node in client.cluster().nodes if job_id in node.jobs}
    return next(name for name in ("second", "third") if cluster.node_id(name) in carriers)


@SOAK
def test_ranks_with_parts_of_gpus_have_each_a_gpu_of_its_own(
    client: Client, script_path: Path
) -> None:
    names = "'CUDA_VISIBLE_DEVICES', 'DRAY_GPU_MEMORY_FRACTION'"
    script_path.write_text(f"import os\nprint(*(os.environ[name] for name in ({names})))")
    shared = {"num_workers": 2, "gpus_per_worker": 0.25, "share_gpus": True}
    job = client.wait(client.submit(script(script_path, resources=shared)).id, timeout_s=200)
    assert job.state is JobState.SUCCEEDED, job.reason
    assert sorted(text for _, _, text in log_of(client, job.id)) == ["0 0.25", "1 0.25"]
    assert_one_attempt(client, job.id)


@SOAK
def test_a_gang_over_two_nodes_survives_a_killed_service(
    joined: Service, client: Client, tmp_path: Path
) -> None:
    spec = digits(train={"epochs": 10}, resources={"num_workers": 4})
    alone = client.wait(client.submit(spec).id, timeout_s=200)
    assert alone.state is JobState.SUCCEEDED, alone.reason
    killed = client.submit(spec)
    wait_for_step(client, killed.id, 25)
    before = training_pids(killed.id)
    assert len(before) == 5, "four ranks and their store"
    joined.kill()
    assert training_pids(killed.id) == before, "the training died with the service"
    joined.start()
    killed = client.wait(killed.id, timeout_s=200)
    assert killed.state is JobState.SUCCEEDED, killed.reason
    assert len(client.attempts(killed.id)) == 1
    assert result_of(client, killed, tmp_path / "killed") == result_of(
        client, alone, tmp_path / "alone"
    )
    assert log_of(client, killed.id) == log_of(client, alone.id)
    for job in (alone, killed):
        eventually(lambda job=job: not training_pids(job.id), within_s=60)
        eventually(lambda job=job: not spools(job.id), within_s=60)


@SOAK
def test_the_cluster_outlives_a_service_that_stops(
    joined: Service, client: Client, ray_cluster: RayByHand
) -> None:
    spec = digits(train={"epochs": 24})
    job = client.submit(spec)
    wait_for_step(client, job.id, 20)
    attempts = client.attempts(job.id)
    assert joined.stop() == 0
    assert training_pids(job.id)
    assert all(node.poll() is None for node in ray_cluster.nodes.values())
    joined.start()
    job = client.wait(job.id, timeout_s=200)
    assert job.state is JobState.SUCCEEDED, job.reason
    assert [a.attempt for a in client.attempts(job.id)] == [a.attempt for a in attempts]


@SOAK
def test_ranks_of_a_lost_node_get_slots_elsewhere_and_no_step_is_lost(
    ray_cluster: RayByHand, client: Client, tmp_path: Path
) -> None:
    alone = client.wait(client.submit(gang()).id, timeout_s=200)
    assert alone.state is JobState.SUCCEEDED, alone.reason
    job = client.submit(gang())
    wait_for_step(client, job.id, LOST_AT_STEP)
    lost = one_of_its_nodes(ray_cluster, client, job.id)
    ray_cluster.kill_node(lost)
    job = client.wait(job.id, timeout_s=200)
    ray_cluster.join(lost)  # whose agent clears what the dead one left
    assert_ended_well(client, job)
    (recovered,) = [e.data for e in client.events(job.id) if e.code == "recovered"]
    assert (recovered["steps_lost"], recovered["world_size"]) == (0, 4)
    assert result_of(client, job, tmp_path / "lost") == result_of(client, alone, tmp_path / "alone")


@SOAK
def test_an_elastic_group_goes_on_with_fewer_and_grows_when_a_node_comes(
    ray_cluster: RayByHand, client: Client
) -> None:
    """Six ranks occupy all three nodes, so there are no other slots for the two lost ranks."""
    spec = gang(resources={"num_workers": 6}, elastic={"min_workers": 2}, train={"epochs": 60})
    job = client.submit(spec)
    wait_for_step(client, job.id, LOST_AT_STEP)
    before = training_pids(job.id)
    lost = one_of_its_nodes(ray_cluster, client, job.id)
    ray_cluster.kill_node(lost)
    eventually(lambda: client.get(job.id).world_size == 4, why="it never went on with fewer")
    reached = step_of(client, job.id)
    wait_for_step(client, job.id, reached + 10)
    ray_cluster.join(lost)
    eventually(lambda: client.get(job.id).world_size == 6, why="it never grew again")
    after = training_pids(job.id)
    survivors = {rank: pid for rank, pid in before.items() if after.get(rank) == pid}
    assert len(survivors) == 5, "four ranks and the store were not started again"
    assert_ended_well(client, client.wait(job.id, timeout_s=180))


@SOAK
def test_a_node_that_falls_silent_is_given_up_and_its_ranks_are_replaced(
    ray_cluster: RayByHand, client: Client
) -> None:
    """Its connections stay open. Ray's health checks find it, within slightly over their bound."""
    job = client.submit(gang())
    wait_for_step(client, job.id, LOST_AT_STEP)
    silent = one_of_its_nodes(ray_cluster, client, job.id)
    began = datetime.now(UTC)
    ray_cluster.signal_node(silent, signal.SIGSTOP)
    job = client.wait(job.id, timeout_s=150)
    ray_cluster.kill_node(silent)
    ray_cluster.join(silent)
    assert_ended_well(client, job)
    lost, recovered = (e for e in client.events(job.id) if e.code in ("group_lost", "recovered"))
    assert recovered.data["steps_lost"] == 0
    assert (lost.time - began).total_seconds() < SILENCE_BOUND_S


@SOAK
def test_a_job_leaves_a_node_that_is_drained_and_resumes_where_it_was(
    ray_cluster: RayByHand, client: Client
) -> None:
    job = client.submit(gang(train={"epochs": 24}))
    wait_for_step(client, job.id, LOST_AT_STEP)
    drained = one_of_its_nodes(ray_cluster, client, job.id)
    gone = ray_cluster.node_id(drained)
    ray_cluster.drain_node(drained, within_s=120)
    job = client.wait(job.id, timeout_s=200)
    assert job.state is JobState.SUCCEEDED, job.reason
    assert_events_are_whole(client, job.id)
    (asked,) = [event for event in client.events(job.id) if event.type == "preempting"]
    assert asked.code == "node_drained"
    first, second = client.attempts(job.id)
    assert first.reason is not None
    assert first.reason.code == "preempted"
    assert job.progress is not None
    assert second.resume_step is not None
    assert second.resume_step >= LOST_AT_STEP, "it saved before it left"
    steps = all_metrics(client, job.id)["train/loss"].steps
    assert steps == list(range(1, job.progress.step + 1))
    (node,) = [node for node in client.cluster().nodes if node.node_id == gone]
    assert not node.accepted
    assert node.reason is not None
    assert node.reason.startswith("the node is being drained")
