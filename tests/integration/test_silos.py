"""Federated silos on a Ray cluster: a head that aggregates, and nodes with their own data."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dray import Client, errors
from dray.views import Job, JobState
from ray_workers.shared import paths
from tests.integration.harness import (
    RayByHand,
    Service,
    all_metrics,
    assert_events_are_whole,
    eventually,
    step_of,
    training_pids,
    wait_for_step,
)
from tests.integration.silos import (
    CANARY,
    LABEL,
    everything_shown,
    files_with,
    job_of,
    write_sources,
)
from tests.integration.test_cluster import HEALTH_CHECKS
from tests.marks import SOAK

pytestmark = [pytest.mark.ray, pytest.mark.timeout(900), SOAK]
NAMES = ("north", "south", "west")


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The data of each silo."""
    return write_sources(tmp_path_factory.mktemp("data"), NAMES)


@pytest.fixture(scope="module")
def hospitals(
    sources: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RayByHand]:
    """The owner of the node `west` names its data there."""
    cluster = RayByHand(
        tmp_path_factory.mktemp("ray"),
        environment=HEALTH_CHECKS,
        labels={name: f"{LABEL}={name}" for name in NAMES},
        environments={"west": {"DRAY_SILO_SOURCE": sources["west"]}},
    )
    try:
        cluster.start(*NAMES)
        yield cluster
    finally:
        cluster.stop()


@pytest.fixture(scope="module")
def service(hospitals: RayByHand, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    service = Service(
        tmp_path_factory.mktemp("service") / "home",
        {
            "DRAY_RAY_ADDRESS": hospitals.address,
            "DRAY_RAY_TOKEN_FILE": str(hospitals.token_file),
        },
    )
    service.start()
    yield service
    assert service.stop() == 0


@pytest.fixture(scope="module")
def client(service: Service) -> Iterator[Client]:
    with service.client as client:
        eventually(lambda: sum(node.accepted for node in client.cluster().nodes) == 4)
        yield client


@pytest.fixture(scope="module")
def undisturbed(client: Client, sources: dict[str, str]) -> Job:
    """A job of the silos without faults."""
    return client.wait(client.submit(job(sources)).id, timeout_s=300)


def job(sources: dict[str, str]) -> dict[str, Any]:
    """Two of its three silos are a quorum."""
    return job_of({**sources, "west": None}, quorum=2)


def assert_done(client: Client, done: Job) -> None:
    assert done.state is JobState.SUCCEEDED, done.reason
    assert [attempt.attempt for attempt in client.attempts(done.id)] == [1]
    assert_events_are_whole(client, done.id)
    steps = all_metrics(client, done.id)["federated/updates"].steps
    assert steps == list(range(1, 61)), "each round once"
    eventually(lambda: not training_pids(done.id), within_s=60)


def assert_ends_as(client: Client, disturbed: str, undisturbed: Job) -> None:
    """Each round was completed once, with a result bitwise equal to a job without faults."""
    found, wanted = all_metrics(client, disturbed), all_metrics(client, undisturbed.id)
    for name in ("federated/updates", "train/loss", "silo/west/val/accuracy", "val/loss"):
        assert found[name].steps == wanted[name].steps, name
        assert found[name].values == wanted[name].values, name


def test_nothing_of_a_silos_data_is_shown_anywhere(
    client: Client, service: Service, hospitals: RayByHand, undisturbed: Job
) -> None:
    done = undisturbed
    assert_done(client, done)
    shown = everything_shown(client, done.id)
    assert CANARY not in shown
    assert {line.rank for line in client.logs(done.id)} <= {0}
    metrics = all_metrics(client, done.id)
    assert float(metrics["silo/west/val/accuracy"].values[-1]) > 0.6
    assert set(metrics["federated/updates"].values) == {3.0}
    session = Path(tempfile.gettempdir(), f"dray-test-{hospitals.port}", "session_latest", "logs")
    assert files_with(session.rglob("*"), CANARY) == [], "Ray passes on what its logs have"
    assert files_with(service.home.rglob("*"), f"{CANARY}-west") == [], (
        "the service is not told by an owner"
    )


def test_no_other_job_runs_on_the_node_whose_owner_names_a_silos_data(
    client: Client, undisturbed: Job
) -> None:
    assert undisturbed.state is JobState.SUCCEEDED, "the silo itself does"
    nodes = {node.labels.get(LABEL): node for node in client.cluster().nodes}
    assert nodes["west"].labels["dray.io/silo"] == "true"
    assert nodes["west"].reason == "the node has a silo's data, and runs only ranks of silos"
    assert "dray.io/silo" not in nodes["north"].labels
    reads = {"module": "this"}
    for labels in ({LABEL: "west"}, {"dray.io/silo": "true"}):
        resources = {"num_workers": 1, "node_labels": labels}
        with pytest.raises(errors.Unsatisfiable, match="only ranks of silos"):
            client.submit({"script": reads, "resources": resources})
    others = sum(int(node.resources["CPU"]) for name, node in nodes.items() if name != "west")
    with pytest.raises(errors.Unsatisfiable):
        client.submit({"script": reads, "resources": {"num_workers": others + 1}})


def test_an_error_in_a_silo_is_told_by_its_cause_alone(
    client: Client, sources: dict[str, str], tmp_path: Path
) -> None:
    broken = tmp_path / f"{CANARY}-broken.npz"
    broken.write_bytes(b"no arrays")
    done = client.wait(client.submit(job({**sources, "north": broken.as_uri()})).id, timeout_s=300)
    assert (done.state, done.reason.code) == (JobState.FAILED, "bad_data")
    assert "error in silo north" in done.reason.message
    assert CANARY not in everything_shown(client, done.id)
    [kept] = paths.machine_root().glob(f"*/{done.id}/silo/attempt-1/rank-1/output.log")
    assert broken.name in kept.read_text(), "the silo's owner can read why"


def test_a_silo_that_is_killed_comes_back_and_the_rounds_go_on(
    client: Client, sources: dict[str, str]
) -> None:
    submitted = client.submit(job(sources))
    wait_for_step(client, submitted.id, 10)
    os.kill(training_pids(submitted.id)[2], signal.SIGKILL)
    done = client.wait(submitted.id, timeout_s=300)
    assert_done(client, done)
    updates = all_metrics(client, done.id)["federated/updates"].values
    assert min(map(float, updates)) >= 2
    assert updates[-1] == 3, "it has come back"
    assert losses(client, done.id) == [("killed", [2])]
    [recovered] = [event.data for event in client.events(done.id) if event.code == "recovered"]
    assert recovered["steps_lost"] == 0


def losses(client: Client, job_id: str) -> list[tuple[str, list[int]]]:
    """How ranks were lost, and which ones."""
    events = [event.data for event in client.events(job_id) if event.code == "group_lost"]
    return [(data["how"], data["ranks"]) for data in events]


def test_a_silo_that_is_stopped_is_replaced(client: Client, sources: dict[str, str]) -> None:
    submitted = client.submit(job(sources))
    wait_for_step(client, submitted.id, 10)
    os.kill(training_pids(submitted.id)[2], signal.SIGSTOP)
    done = client.wait(submitted.id, timeout_s=300)
    assert_done(client, done)
    assert losses(client, done.id) == [("hang", [2])]
    assert all_metrics(client, done.id)["federated/updates"].values[-1] == 3
    assert CANARY not in everything_shown(client, done.id)


def test_a_service_that_is_killed_costs_no_round(
    client: Client, service: Service, sources: dict[str, str], undisturbed: Job
) -> None:
    submitted = client.submit(job(sources))
    wait_for_step(client, submitted.id, 10)
    service.kill()
    service.start()
    done = client.wait(submitted.id, timeout_s=300)
    assert_done(client, done)
    assert_ends_as(client, done.id, undisturbed)


def test_an_aggregator_that_is_killed_resumes(
    client: Client, sources: dict[str, str], undisturbed: Job
) -> None:
    submitted = client.submit({**job(sources), "max_retries": 1})
    wait_for_step(client, submitted.id, 10)
    os.kill(training_pids(submitted.id)[0], signal.SIGKILL)
    done = client.wait(submitted.id, timeout_s=300)
    assert done.state is JobState.SUCCEEDED, done.reason
    assert len(client.attempts(done.id)) == 2
    assert_ends_as(client, done.id, undisturbed)


def test_a_preempted_job_of_silos_resumes(
    client: Client, sources: dict[str, str], undisturbed: Job
) -> None:
    submitted = client.submit(job(sources))
    wait_for_step(client, submitted.id, 10)
    client.preempt(submitted.id)
    done = client.wait(submitted.id, timeout_s=300)
    assert done.state is JobState.SUCCEEDED, done.reason
    assert len(client.attempts(done.id)) == 2
    assert_ends_as(client, done.id, undisturbed)
    cancelled = client.submit(job(sources))
    wait_for_step(client, cancelled.id, 3)
    client.cancel(cancelled.id)
    assert client.wait(cancelled.id, timeout_s=100).state is JobState.CANCELLED
    eventually(lambda: not training_pids(cancelled.id), within_s=60)


def test_a_silo_without_a_node_is_refused(client: Client, sources: dict[str, str]) -> None:
    document = job(sources)
    document["federated"]["silos"][1]["node_labels"] = {LABEL: "east"}
    with pytest.raises(errors.Unsatisfiable, match="hospital=east"):
        client.submit(document)


def test_the_rounds_go_on_without_a_node_that_is_lost(
    client: Client, hospitals: RayByHand, sources: dict[str, str]
) -> None:
    """The last test of this module: the node does not come back."""
    submitted = client.submit(job(sources))
    wait_for_step(client, submitted.id, 10)
    hospitals.kill_node("south")
    done = client.wait(submitted.id, timeout_s=300)
    assert step_of(client, done.id) == 60
    assert_done(client, done)
    assert all_metrics(client, done.id)["federated/updates"].values[-1] == 2
