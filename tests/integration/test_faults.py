"""Each process is killed; the faults are handled as designed, and nothing is lost."""

from __future__ import annotations

import hashlib
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dray import Client
from dray.views import Job, JobState
from ray_workers.shared.paths import entries
from tests.integration import harness
from tests.integration.harness import (
    Service,
    all_metrics,
    assert_books_add_up,
    assert_one_attempt,
    assert_promises,
    digits,
    eventually,
    script,
    step_of,
    training_pids,
    wait_for_checkpoint,
    wait_for_step,
)
from tests.marks import SOAK, soak

pytestmark = pytest.mark.ray

KILL_AT_STEP = 25
SAVED_STEP = 20
"""A checkpoint that exists by this step, or soon after."""
TIMINGS = "perf/"


def result_of(client: Client, job: Job, folder: Path) -> dict[str, Any]:
    """The results of a job: metrics without timings, and the hash of its weights."""
    files = {path.name: path for path in client.download(job.id, folder)}
    metrics = {
        key: (series.steps, series.values)
        for key, series in all_metrics(client, job.id).items()
        if not key.startswith(TIMINGS)
    }
    weights = hashlib.sha256(files["model.safetensors"].read_bytes()).hexdigest()
    return {"metrics": metrics, "weights": weights}


def log_of(client: Client, job_id: str) -> list[tuple[int, int, str]]:
    """Return what the training printed. dray's own lines also depend on the speed of the disk."""
    return sorted(
        (line.attempt, line.rank, line.text)
        for line in client.logs(job_id)
        if not line.text.startswith("dray: ")
    )


def long_digits() -> dict[str, Any]:
    """Long enough to be killed in the middle."""
    return digits(train={"epochs": 24})


@pytest.fixture(scope="module")
def undisturbed(embedded: Service, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The result of the job when it is left undisturbed."""
    with embedded.client as client:
        job = client.wait(client.submit(long_digits()).id, timeout_s=120)
        assert job.state is JobState.SUCCEEDED, job.reason
        result = result_of(client, job, tmp_path_factory.mktemp("undisturbed"))
        log = log_of(client, job.id)
        assert len(log) == 24, "one line an epoch"
        return result | {"log": log}


def test_a_killed_service_loses_nothing_and_the_training_goes_on(
    embedded: Service, client: Client, undisturbed: dict[str, Any], tmp_path: Path
) -> None:
    job = client.submit(long_digits())
    wait_for_step(client, job.id, KILL_AT_STEP)
    before = training_pids(job.id)
    embedded.kill()
    assert training_pids(job.id) == before, "the training died with the service"
    embedded.start()
    job = client.wait(job.id, timeout_s=120)
    assert job.state is JobState.SUCCEEDED, job.reason
    assert_one_attempt(client, job.id)
    assert result_of(client, job, tmp_path) == {
        key: undisturbed[key] for key in ("metrics", "weights")
    }
    assert log_of(client, job.id) == undisturbed["log"]
    assert_promises(embedded, client, job.id)


@SOAK
def test_a_killed_gateway_is_started_again_and_nothing_is_lost(
    embedded: Service, client: Client, undisturbed: dict[str, Any], tmp_path: Path
) -> None:
    job = client.submit(long_digits())
    wait_for_step(client, job.id, KILL_AT_STEP)
    before = embedded.gateway_pid()
    os.kill(before, signal.SIGKILL)
    assert client.get(job.id).id == job.id, "the API answers without a gateway"
    job = client.wait(job.id, timeout_s=120)
    assert job.state is JobState.SUCCEEDED, job.reason
    assert_one_attempt(client, job.id)
    assert result_of(client, job, tmp_path)["weights"] == undisturbed["weights"]
    assert eventually(embedded.gateway_pid) != before
    assert_promises(embedded, client, job.id)


def test_jobs_run_after_workers_were_forked_for_a_driver_that_is_gone(
    embedded: Service, client: Client
) -> None:
    """The node agent, which the first driver has started, is restarted in a worker with a new
    parent; then another driver starts."""
    instance = embedded.ray_daemon()["instance"]
    before = embedded.gateway_pid()
    (agent,) = harness.processes_of(instance, "ray::NodeAgent")
    for pid in (embedded.worker_parent(), *harness.processes_of(instance, "ray::IDLE"), agent):
        os.kill(pid, signal.SIGKILL)
    eventually(lambda: set(harness.processes_of(instance, "ray::NodeAgent")) - {agent})
    os.kill(before, signal.SIGKILL)
    job = client.wait(client.submit(digits(train={"epochs": 1})).id, timeout_s=120)
    assert job.state is JobState.SUCCEEDED, job.reason
    assert eventually(embedded.gateway_pid) != before


def kill_supervisor(service: Service, job_id: str) -> None:
    os.kill(service.actor_pid(job_id, "supervisor"), signal.SIGKILL)


def kill_rank_actor(service: Service, job_id: str) -> None:
    os.kill(service.actor_pid(job_id, "worker:1"), signal.SIGKILL)


def kill_training_process(service: Service, job_id: str) -> None:
    os.kill(training_pids(job_id)[1], signal.SIGKILL)


@pytest.mark.parametrize(
    "kill", [soak(kill_rank_actor), kill_training_process], ids=["rank actor", "training process"]
)
def test_a_killed_rank_is_replaced_and_no_step_is_lost(
    embedded: Service,
    client: Client,
    undisturbed: dict[str, Any],
    tmp_path: Path,
    kill: Callable[[Service, str], None],
) -> None:
    job = client.submit(long_digits() | {"max_retries": 0})
    wait_for_step(client, job.id, KILL_AT_STEP)
    kill(embedded, job.id)
    job = client.wait(job.id, timeout_s=120)
    assert job.state is JobState.SUCCEEDED, job.reason
    assert_one_attempt(client, job.id)
    moves = [(event.code, event.data) for event in client.events(job.id) if event.type == "state"]
    codes = [code for code, _ in moves]
    assert codes[codes.index("running") :] == ["running", "group_lost", "recovered", "succeeded"]
    recovered = dict(moves)["recovered"]
    assert recovered["steps_lost"] == 0
    assert recovered["ranks"] == [1]
    assert result_of(client, job, tmp_path) == {
        key: undisturbed[key] for key in ("metrics", "weights")
    }
    assert_promises(embedded, client, job.id)
    assert_books_add_up(client, job.id)


@SOAK
@pytest.mark.parametrize("mode", ["sgp", "ad_psgd"])
def test_peers_that_die_at_once_are_both_replaced_while_the_others_train_on(
    embedded: Service, client: Client, mode: str
) -> None:
    sync = {"kind": "gossip", "mode": mode, "graph": "ring"}
    train = {"epochs": 400, "eval_every_epochs": 100}
    asked = digits(sync=sync, train=train, resources={"num_workers": 4}, max_retries=0)
    job = client.submit(asked)
    wait_for_step(client, job.id, KILL_AT_STEP)
    pids = training_pids(job.id)
    for rank in (1, 2):
        os.kill(pids[rank], signal.SIGKILL)
    job = client.wait(job.id, timeout_s=300)
    assert job.state is JobState.SUCCEEDED, job.reason
    assert_one_attempt(client, job.id)
    events = list(client.events(job.id))
    assert [event for event in events if event.code == "recovered"]
    sizes = [event.data["world_size"] for event in events if event.code == "resized"]
    assert sizes[-1:] == [4], "both are back"
    assert_promises(embedded, client, job.id)


@SOAK
def test_a_killed_supervisor_costs_only_the_way_back_to_the_checkpoint(
    embedded: Service, client: Client, undisturbed: dict[str, Any], tmp_path: Path
) -> None:
    job = client.submit(long_digits() | {"max_retries": 0})
    wait_for_step(client, job.id, KILL_AT_STEP)
    wait_for_checkpoint(client, job.id, SAVED_STEP)
    kill_supervisor(embedded, job.id)
    job = client.wait(job.id, timeout_s=120)
    assert job.state is JobState.SUCCEEDED, job.reason
    first, second = client.attempts(job.id)
    assert first.reason is not None
    assert first.reason.code == "supervisor_lost"
    assert second.resume_step >= SAVED_STEP
    assert result_of(client, job, tmp_path) == {
        key: undisturbed[key] for key in ("metrics", "weights")
    }
    assert_promises(embedded, client, job.id)
    assert_books_add_up(client, job.id)


@SOAK
def test_a_lost_cluster_sends_its_jobs_back_to_the_queue_uncharged(
    embedded: Service, client: Client, undisturbed: dict[str, Any], tmp_path: Path
) -> None:
    job = client.submit(long_digits() | {"max_retries": 0})
    wait_for_step(client, job.id, KILL_AT_STEP)
    wait_for_checkpoint(client, job.id, SAVED_STEP)
    old = embedded.ray_daemon()
    of_ray = [embedded.gcs_pid(), embedded.ray_child("raylet/raylet")]
    # The steps before this checkpoint are reported to nobody while Ray lives.
    os.kill(embedded.pid, signal.SIGSTOP)
    saved = embedded.home / "storage" / "jobs" / job.id / "attempts" / "1" / "checkpoints"
    before = set(entries(saved))
    eventually(lambda: set(entries(saved)) - before, why="it saves nothing more")
    for pid in of_ray:
        os.kill(pid, signal.SIGKILL)
    eventually(lambda: not training_pids(job.id), why="the ranks outlive their Ray")
    os.kill(embedded.pid, signal.SIGCONT)
    job = client.wait(job.id, timeout_s=180)
    assert job.state is JobState.SUCCEEDED, job.reason
    first, second = client.attempts(job.id)
    assert first.reason is not None
    assert first.reason.code == "node_lost"
    assert second.resume_step >= SAVED_STEP
    assert embedded.ray_daemon()["instance"] != old["instance"]
    whole = {key: undisturbed[key] for key in ("metrics", "weights")}
    assert result_of(client, job, tmp_path) == whole
    assert_promises(embedded, client, job.id)


SAVES = """\
import pathlib, signal, sys, tempfile, time
from dray import train
from dray.train import checkpoints

checkpoints.KNOWN_WITHIN_S = 60.0  # a service may be slow to say what it knows
state, leaves, done = pathlib.Path(tempfile.mkdtemp()), [], 0
signal.signal(signal.SIGTERM, lambda *_: leaves.append(True))
if found := train.load_checkpoint():
    done = int((found.path / "done").read_text())
for step in range(done + 1, 201):
    time.sleep(0.05)
    train.report(step, {"train/loss": 1.0 / step}, total_steps=200)
    if leaves or step % 5 == 0:
        (state / "done").write_text(str(step))
        train.save_checkpoint(state, step)
    if leaves:
        sys.exit(143)
"""


@SOAK
def test_a_script_resumes_from_what_it_saved_when_it_is_killed_and_when_it_is_preempted(
    embedded: Service, client: Client, tmp_path: Path
) -> None:
    (tmp_path / "saves.py").write_text(SAVES)
    job = client.submit(script(tmp_path / "saves.py"))
    wait_for_step(client, job.id, 12)
    os.kill(training_pids(job.id)[0], signal.SIGKILL)
    eventually(lambda: client.get(job.id).attempt == 2, why="it was never started again")
    wait_for_step(client, job.id, 60)
    client.preempt(job.id)
    job = client.wait(job.id, timeout_s=120)
    assert job.state is JobState.SUCCEEDED, job.reason
    killed, preempted, last = client.attempts(job.id)
    assert killed.reason is not None
    assert killed.reason.code == "worker_lost"
    assert preempted.resume_step >= 10
    assert preempted.reason is not None
    assert preempted.reason.code == "preempted"
    assert last.resume_step >= 60, "it saved before it left"
    assert last.receipt is not None
    assert last.receipt.step == last.resume_step
    assert [saved.step for saved in client.checkpoints(job.id)] == [200, 195]
    assert all_metrics(client, job.id)["train/loss"].steps == list(range(1, 201))
    assert_promises(embedded, client, job.id)


def processes_of(instance: str) -> list[int]:
    """Every process of an embedded Ray and of what it started, by the mark in its environment."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            environment = (entry / "environ").read_bytes() if entry.name.isdigit() else b""
        except OSError:
            continue
        if f"DRAY_RAY_INSTANCE={instance}".encode() in environment.split(b"\0"):
            found.append(int(entry.name))
    return found


@SOAK
def test_a_graceful_stop_leaves_no_process_and_the_job_goes_on_after_the_next_start(
    embedded: Service, client: Client, undisturbed: dict[str, Any], tmp_path: Path
) -> None:
    job = client.submit(long_digits() | {"max_retries": 0})
    wait_for_step(client, job.id, KILL_AT_STEP)
    instance = embedded.ray_daemon()["instance"]
    assert processes_of(instance)
    reached = step_of(client, job.id)
    assert embedded.stop() == 0
    assert not processes_of(instance)
    embedded.start()
    job = client.wait(job.id, timeout_s=120)
    assert job.state is JobState.SUCCEEDED, job.reason
    first, second = client.attempts(job.id)
    assert first.reason is not None
    assert first.reason.code == "preempted"
    assert second.resume_step >= reached, "it saved before it left"
    assert result_of(client, job, tmp_path)["weights"] == undisturbed["weights"]
    assert_promises(embedded, client, job.id)


@pytest.mark.parametrize("arguments", [(), ("--no-loops",)], ids=["with loops", "without"])
def test_a_second_service_on_the_same_home_is_refused(
    embedded: Service, arguments: tuple[str, ...]
) -> None:
    already = len(embedded.log())
    second = Service(embedded.home, embedded.environment)
    assert second.spawn(*arguments).wait(timeout=90) == 1
    assert "in use by the dray service with process id" in embedded.log()[already:]
