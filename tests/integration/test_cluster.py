"""The scaled deployment: PostgreSQL, and a Ray cluster of two nodes that someone else started."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from dray.views import JobState
from tests.integration.harness import (
    RayByHand,
    Service,
    digits,
    eventually,
    spools,
    training_pids,
    wait_for_step,
)
from tests.integration.test_faults import log_of, result_of

pytestmark = pytest.mark.ray


@pytest.fixture(scope="module")
def ray_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayByHand]:
    cluster = RayByHand(tmp_path_factory.mktemp("ray"))
    cluster.start()
    yield cluster
    cluster.stop()


@pytest.fixture
def joined(ray_cluster: RayByHand, postgres_url: str, tmp_path: Path) -> Iterator[Service]:
    """A service on PostgreSQL that joins the cluster by its address."""
    service = Service(
        tmp_path / "home",
        {
            "DRAY_DATABASE_URL": postgres_url,
            "DRAY_RAY_ADDRESS": ray_cluster.address,
            "DRAY_RAY_TOKEN_FILE": str(ray_cluster.token_file),
        },
    )
    service.start()
    yield service
    assert service.stop() == 0


def test_a_gang_over_two_nodes_survives_a_killed_service(joined: Service, tmp_path: Path) -> None:
    spec = digits(train={"epochs": 6}, resources={"num_workers": 4})
    with joined.client as client:
        eventually(lambda: sum(node.accepted for node in client.cluster().nodes) == 2)
        alone = client.wait(client.submit(spec).id, timeout_s=120)
        assert alone.state is JobState.SUCCEEDED, alone.reason
        assert alone.links.ray_dashboard is not None
        killed = client.submit(spec)
        wait_for_step(client, killed.id, 25)
        before = training_pids(killed.id)
        assert len(before) == 5, "four ranks and their store"
        joined.kill()
        assert training_pids(killed.id) == before, "the training died with the service"
        joined.start()
        killed = client.wait(killed.id, timeout_s=120)
        assert killed.state is JobState.SUCCEEDED, killed.reason
        assert len(client.attempts(killed.id)) == 1
        assert result_of(client, killed, tmp_path / "killed") == result_of(
            client, alone, tmp_path / "alone"
        )
        assert log_of(client, killed.id) == log_of(client, alone.id)
        for job in (alone, killed):
            eventually(lambda job=job: not training_pids(job.id), within_s=10)
            eventually(lambda job=job: not spools(job.id), within_s=10)


def test_the_cluster_outlives_a_service_that_stops(joined: Service, ray_cluster: RayByHand) -> None:
    spec = digits(train={"epochs": 12})
    with joined.client as client:
        job = client.submit(spec)
        wait_for_step(client, job.id, 20)
        attempts = client.attempts(job.id)
        assert joined.stop() == 0
        assert training_pids(job.id)
        assert all(node.poll() is None for node in ray_cluster.nodes.values())
        joined.start()
        job = client.wait(job.id, timeout_s=120)
        assert job.state is JobState.SUCCEEDED, job.reason
        assert [a.attempt for a in client.attempts(job.id)] == [a.attempt for a in attempts]
