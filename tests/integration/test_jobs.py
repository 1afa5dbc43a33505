"""What users do with jobs, on a real Ray."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
import yaml

from dray import Client, errors
from dray.views import JobState
from tests.integration.harness import (
    ROOT,
    Service,
    all_metrics,
    assert_books_add_up,
    assert_promises,
    digits,
    eventually,
    left_of,
    script,
    training_pids,
    wait_for_step,
)
from tests.marks import SOAK

pytestmark = pytest.mark.ray

STEP_S = 0.1
REPORTS_AND_FAILS_ONCE = f"""
import tempfile, time
from pathlib import Path
from dray import train

rank, attempt = train.context().rank, train.context().attempt
found = train.load_checkpoint()
folder = Path(tempfile.mkdtemp())
for step in range(found.step + 1 if found else 1, 31):
    time.sleep({STEP_S})
    if rank == 0:
        train.report(step, {{"train/loss": 1.0 / step}}, total_steps=30)
        if step == 10:
            (folder / "state").write_bytes(b"state")
            train.save_checkpoint(folder, step)
        if step == 15 and attempt == 1:
            raise ValueError("fails once")
"""
SLEEPS = "import time\nprint('asleep', flush=True)\ntime.sleep(600)\n"
AWKWARD_NAME = 'my:1:job "0" {} %s \\ <b>na\u00efve</b> \u65e5\u672c :actor_name:x'
IGNORES_SIGTERM = (
    "import signal, subprocess, sys, time\n"
    "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
    "print('stubborn', flush=True)\n"
    "time.sleep(600)\n"
)


def test_a_job_trains_and_everything_of_it_can_be_read_afterwards(
    embedded: Service, client: Client, tmp_path: Path
) -> None:
    job = client.submit(ROOT / "examples" / "digits.yaml")
    job = client.wait(job.id, timeout_s=120)
    assert job.state is JobState.SUCCEEDED, job.reason
    assert float(job.summary["val/accuracy"]) > 0.95
    assert job.progress is not None
    assert job.progress.step == job.progress.total_steps == 276
    metrics = all_metrics(client, job.id)
    assert metrics["train/loss"].steps == list(range(1, 277))
    for key in ("train/lr", "train/grad_norm", "perf/step_time_s", "perf/data_wait_s"):
        assert len(metrics[key].steps) == 276
    assert float(metrics["train/loss"].values[-1]) < float(metrics["train/loss"].values[0]) / 4
    assert any(checkpoint.is_best for checkpoint in client.checkpoints(job.id))
    files = {path.name: path for path in client.download(job.id, tmp_path)}
    assert {"model.safetensors", "config.json", "labels.json"} <= set(files)
    assert json.loads(files["labels.json"].read_text())
    assert_promises(embedded, client, job.id)
    assert_books_add_up(client, job.id)


def test_a_job_goes_on_where_another_stopped_divided_otherwise(
    embedded: Service, client: Client
) -> None:
    first = digits(train={"epochs": 1})
    source = client.wait(client.submit(first).id, timeout_s=60)
    assert source.state is JobState.SUCCEEDED, source.reason
    assert source.progress is not None
    stopped_at = source.progress.step
    spec = {
        **digits(train={"epochs": 2}, parallel={"shard": 2}),
        "init_from": {"job": source.id, "take": "everything"},
    }
    job = client.wait(client.submit(spec).id, timeout_s=60)
    assert job.state is JobState.SUCCEEDED, job.reason
    steps = all_metrics(client, job.id)["train/loss"].steps
    assert steps == list(range(stopped_at + 1, 2 * stopped_at + 1))
    (resumed,) = [event for event in client.events(job.id) if event.type == "resumed"]
    assert f"resumed from another job's checkpoint of step {stopped_at}" in resumed.message
    with pytest.raises(errors.InitFromDiffers, match="/train/seed is 7"):
        client.submit({**spec, "train": {**spec["train"], "seed": 7}})
    assert_promises(embedded, client, job.id)


def test_the_ray_dashboard_shows_the_job_by_name_with_its_log_and_metrics(
    embedded: Service, client: Client
) -> None:
    job = client.submit(digits(name=AWKWARD_NAME, train={"epochs": 400}))
    wait_for_step(client, job.id, 20)
    for_people = {actor["name"]: actor["repr_name"] for actor in embedded.actors(job.id)}
    assert for_people == {
        f"dray:{job.id}:1:supervisor": f"{AWKWARD_NAME}:1:supervisor",
        f"dray:{job.id}:1:worker:0:0": f"{AWKWARD_NAME}:1:worker:0:0",
        f"dray:{job.id}:1:worker:1:0": f"{AWKWARD_NAME}:1:worker:1:0",
    }
    (rank_0,) = (a for a in embedded.actors(job.id) if a["name"].endswith(":worker:0:0"))
    eventually(
        lambda: "val/accuracy" in embedded.actor_log(rank_0["actor_id"]),
        within_s=30,
        why="the actor's log does not show what its training process printed",
    )
    dashboard = client.get(job.id).links.ray_dashboard
    assert dashboard is not None
    assert dashboard.startswith(embedded.ray_daemon()["dashboard_url"])

    wanted = {"dray_step", "dray_train_loss", "dray_samples_per_s"}
    eventually(
        lambda: wanted <= embedded.exported_metrics(job.id).keys(),
        within_s=30,
        why="Ray does not export the progress",
    )
    in_ascii = AWKWARD_NAME.encode("ascii", "backslashreplace").decode()
    assert embedded.exported_metrics(job.id)["dray_step"]["job_name"] == in_ascii
    client.cancel(job.id)
    assert client.wait(job.id, timeout_s=90).state is JobState.CANCELLED


@SOAK
def test_the_ray_dashboard_links_every_actor_to_its_own_page_from_its_start_to_its_end(
    embedded: Service, client: Client
) -> None:
    eventually(
        lambda: embedded.num_known_idle_workers() >= 3,
        why="the dashboard never saw the processes idle in which the actors start",
    )
    job = client.submit(digits(train={"epochs": 4000}))
    wait_for_step(client, job.id, 20)
    pages_open(embedded, job.id, {"supervisor", "worker:0:0", "worker:1:0"}, within_s=6)
    os.kill(embedded.actor_pid(job.id, "worker:1:0"), signal.SIGKILL)
    eventually(lambda: any(a["name"].endswith(":worker:1:1") for a in embedded.actors(job.id)))
    everyone = {"supervisor", "worker:0:0", "worker:1:0", "worker:1:1"}
    pages_open(embedded, job.id, everyone, within_s=6)
    client.cancel(job.id)
    client.wait(job.id, timeout_s=90)

    def all_dead() -> bool:
        return all(actor["state"] == "DEAD" for actor in embedded.actor_pages(job.id).values())

    eventually(all_dead, why="the dashboard shows actors of the job as alive after its end")
    pages_open(embedded, job.id, everyone, within_s=6)


def pages_open(service: Service, job_id: str, members: set[str], *, within_s: float) -> None:
    """The dashboard's list links each of these actors to its own page, which has its log."""

    def are_own() -> bool:
        pages = service.actor_pages(job_id)
        linked = {actor["name"].split(":", 3)[3]: actor["actorId"] for actor in pages.values()}
        return linked.keys() == members and set(linked.values()) == pages.keys()

    eventually(are_own, within_s=within_s, why="the dashboard links an actor by another's id")
    for actor in service.actor_pages(job_id).values():
        detail = service.dashboard(f"/logical/actors/{actor['actorId']}")["data"]["detail"]
        assert (detail["actorId"], detail["name"]) == (actor["actorId"], actor["name"])
        assert actor["reprName"] in service.actor_log(detail["actorId"])


def test_a_script_runs_as_under_torchrun(embedded: Service, client: Client, tmp_path: Path) -> None:
    spec = yaml.safe_load((ROOT / "examples" / "script.yaml").read_text())
    spec["script"]["entrypoint"] = str(ROOT / spec["script"]["entrypoint"])
    job = client.wait(client.submit(spec).id, timeout_s=60)
    assert job.state is JobState.SUCCEEDED, job.reason
    text = [line.text for line in client.logs(job.id, rank=0)]
    assert any(line.startswith("y = 3.0") for line in text)
    assert all_metrics(client, job.id)["train/loss"].steps == list(range(1, 51))
    (weights,) = client.download(job.id, tmp_path)
    assert weights.name == "linear.pt"
    assert_promises(embedded, client, job.id)


def test_a_failing_script_is_retried_and_then_fails_with_its_error(
    embedded: Service, client: Client, script_path: Path
) -> None:
    script_path.write_text("print('about to fail')\nraise ValueError('no such column: age')\n")
    job = client.wait(client.submit(script(script_path, max_retries=1)).id, timeout_s=60)
    assert job.state is JobState.FAILED
    assert "no such column: age" in job.reason.message
    attempts = client.attempts(job.id)
    assert [attempt.attempt for attempt in attempts] == [1, 2]
    log = [(line.attempt, line.text) for line in client.logs(job.id)]
    assert (1, "about to fail") in log
    assert (2, "about to fail") in log
    assert any("ValueError" in text for _, text in log)
    assert_promises(embedded, client, job.id)


@SOAK
def test_the_slots_of_a_script_are_of_use_while_it_reports_steps(
    embedded: Service, client: Client, script_path: Path
) -> None:
    script_path.write_text(REPORTS_AND_FAILS_ONCE)
    two_workers = {"resources": {"num_workers": 2}, "max_retries": 1}
    job = client.wait(client.submit(script(script_path, **two_workers)).id, timeout_s=90)
    assert job.state is JobState.SUCCEEDED, job.reason
    assert job.goodput is not None
    assert job.goodput.useful_share is not None
    used = job.goodput.slot_seconds
    # On both ranks, of which only one reports: 5 of the steps were made twice. The first step of
    # an attempt is a part of its start. The other rank's time since the first report is divided
    # like the time of the rank that reports. That time has no lower bound, because the ranks can
    # start at different times, but without it, time would be unreported.
    assert used.useful > 2 * 28 * STEP_S
    assert used.recomputed >= 4 * STEP_S
    assert used.recomputed < used.useful
    assert used.checkpointing > 0
    assert used.starting > 0
    assert used.unreported == 0
    assert_books_add_up(client, job.id)
    assert_promises(embedded, client, job.id)


def test_of_a_script_that_reports_no_step_nobody_says_of_what_use_it_was(
    embedded: Service, client: Client, script_path: Path
) -> None:
    script_path.write_text(f"import time\ntime.sleep({10 * STEP_S})\n")
    job = client.wait(client.submit(script(script_path)).id, timeout_s=60)
    assert job.state is JobState.SUCCEEDED, job.reason
    assert job.first_step_at is None
    assert job.goodput is not None
    assert job.goodput.useful_share is None
    assert job.goodput.slot_seconds.unreported >= 10 * STEP_S
    assert_books_add_up(client, job.id)


def test_a_running_job_is_cancelled_and_everything_is_free_within_ten_seconds(
    embedded: Service, client: Client, script_path: Path
) -> None:
    script_path.write_text(IGNORES_SIGTERM)
    job = client.submit(script(script_path, resources={"num_workers": 2}))
    eventually(lambda: len(list(client.logs(job.id))) == 2)

    def ranks_seen() -> list[int]:
        return [one.rank for one in client.newest_system_metrics(job.id).ranks]

    eventually(lambda: ranks_seen() == [0, 1], why="no sample of what the ranks use came")
    assert client.cancel(job.id).state is JobState.CANCELLING

    def is_over() -> bool:
        return client.get(job.id).state.is_terminal and not left_of(embedded, job.id)

    eventually(is_over, within_s=10, why="ten seconds after it was cancelled something is left")
    assert client.get(job.id).state is JobState.CANCELLED
    assert client.cancel(job.id).state is JobState.CANCELLED
    assert_promises(embedded, client, job.id)


def test_a_job_is_cancelled_while_it_starts_and_while_it_waits(
    embedded: Service, client: Client, script_path: Path
) -> None:
    script_path.write_text(SLEEPS)
    first = client.submit(script(script_path, resources={"num_workers": 4}))
    second = client.submit(script(script_path, resources={"num_workers": 4}))
    eventually(lambda: client.explain(second.id).position == 1, why="the first never started")
    assert client.explain(second.id).reason.message
    assert client.cancel(second.id).state is JobState.CANCELLED
    client.cancel(first.id)
    assert client.wait(first.id, timeout_s=60).state is JobState.CANCELLED
    for job in (first, second):
        assert_promises(embedded, client, job.id)


def test_max_runtime_ends_a_job(embedded: Service, client: Client, script_path: Path) -> None:
    script_path.write_text(SLEEPS)
    job = client.wait(client.submit(script(script_path, max_runtime_s=1)).id, timeout_s=90)
    assert job.state is JobState.FAILED
    assert job.reason.code == "runtime_exceeded"
    assert_promises(embedded, client, job.id)


def test_a_bad_data_set_is_not_tried_again(embedded: Service, client: Client) -> None:
    spec = digits(data={"source": "sklearn://digits", "validation_fraction": 0.9999})
    job = client.wait(client.submit(spec | {"max_retries": 3}).id, timeout_s=90)
    assert job.state is JobState.FAILED
    assert job.reason.code == "bad_data"
    assert len(client.attempts(job.id)) == 1


def test_a_gang_waits_until_all_of_it_fits(
    embedded: Service, client: Client, script_path: Path
) -> None:
    script_path.write_text(SLEEPS)
    holder = client.submit(script(script_path, resources={"num_workers": 3}))
    client.wait(holder.id, states=[JobState.RUNNING], timeout_s=90)
    waiting = client.submit(digits(train={"epochs": 1}))
    reason = eventually(
        lambda: r if (r := client.explain(waiting.id)).reason.code == "waiting_for_slots" else None
    )
    assert reason.blocked_by == [holder.id]
    assert not training_pids(waiting.id)
    client.cancel(holder.id)
    assert client.wait(waiting.id, timeout_s=60).state is JobState.SUCCEEDED
