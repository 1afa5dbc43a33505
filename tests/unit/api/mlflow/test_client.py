"""MLflow's own client reads from a dray server: experiments, runs, histories and artifacts."""

from __future__ import annotations

import math
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.unit.api.matrix import TOKEN
from tests.unit.api.serving import LiveServer
from tests.unit.service.helpers import START, metrics

mlflow = pytest.importorskip(
    "mlflow", reason="the extra 'dev' is not installed: mlflow-skinny, whose client reads dray"
)


@pytest.fixture
def client(site: LiveServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", TOKEN)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    before = mlflow.get_tracking_uri()
    mlflow.set_tracking_uri(site.url)
    yield mlflow.MlflowClient()
    mlflow.set_tracking_uri(before)


@pytest.fixture(scope="module")
def jobs(site: LiveServer) -> list[str]:
    """Three jobs in one experiment, one of which has ended, and a job without an experiment."""
    http = site.client(headers={"Authorization": f"Bearer {TOKEN}"})
    ids = []
    for number in range(4):
        labels = {"experiment": "digits & more", "team": f"t{number}"} if number < 3 else {}
        body = {"recipe": "image_classification", "name": f"run {number}", "labels": labels}
        body["train"] = {"optimizer": {"name": "adamw", "lr": 10.0**-number}}
        answer = http.post("/v1/jobs", json=body)
        assert answer.status_code == 201, answer.text
        ids.append(answer.json()["id"])
    for number, job_id in enumerate(ids[:2]):
        frames = [
            metrics(n, {"val/loss": n + number, "x": math.inf}, at=START + timedelta(seconds=n))
            for n in range(30)
        ]
        model = site.artifact(job_id, "model/deep/weights.bin", b"weights")
        site.train(job_id, *frames, model, site.artifact(job_id, "report.txt", b"good"))
    site.succeed(ids[0])
    http.patch(f"/v1/jobs/{ids[0]}/annotations", json={"add_tags": ["good"], "notes": "**Best**"})
    return ids


def test_experiments_are_the_values_of_the_label(client: Any, jobs: list[str]) -> None:
    names = [found.name for found in client.search_experiments()]
    assert names == ["Default", "digits & more"]
    found = client.get_experiment_by_name("digits & more")
    assert client.get_experiment(found.experiment_id).name == "digits & more"
    assert client.get_experiment_by_name("none") is None
    (one,) = client.search_experiments(filter_string="name ILIKE 'DIGITS%'")
    assert one.name == "digits & more"


def test_a_run_is_the_job(client: Any, jobs: list[str]) -> None:
    run = client.get_run(jobs[0])
    assert (run.info.run_id, run.info.run_name) == (jobs[0], "run 0")
    assert (run.info.status, run.info.user_id) == ("FINISHED", "ann")
    assert run.info.end_time is not None
    assert run.data.metrics == {"val/loss": 29.0, "x": math.inf}
    (loss,) = [metric for metric in run.data._metric_objs if metric.key == "val/loss"]
    assert (loss.step, loss.timestamp) == (29, (START.timestamp() + 29) * 1000)
    assert run.data.params["train.optimizer.lr"] == "1.0"
    (found,) = client.search_runs([run.info.experiment_id], f"run_id = '{jobs[0]}'")
    for tags in (run.data.tags, found.data.tags):
        written = tags["team"], tags["dray.tags"], tags["mlflow.note.content"]
        assert written == ("t0", "good", "**Best**")
    assert "dray.tags" not in client.get_run(jobs[1]).data.tags
    with pytest.raises(mlflow.exceptions.MlflowException, match="RESOURCE_DOES_NOT_EXIST"):
        client.get_run("job-none")


def test_a_history_has_every_point_with_its_time(
    client: Any, jobs: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlflow.tracking._tracking_service import client as tracking

    for size in (25_000, 7):
        monkeypatch.setattr(tracking, "GET_METRIC_HISTORY_MAX_RESULTS", size)
        history = client.get_metric_history(jobs[1], "val/loss")
        assert [(p.step, p.value, p.timestamp) for p in history] == [
            (n, n + 1.0, (START.timestamp() + n) * 1000) for n in range(30)
        ]
    assert client.get_metric_history(jobs[1], "none") == []


def test_runs_are_searched_filtered_ordered_and_paged(client: Any, jobs: list[str]) -> None:
    digits = client.get_experiment_by_name("digits & more").experiment_id

    def search(filter_: str = "", experiments: tuple[str, ...] = (digits, "0"), **more: Any) -> Any:
        found = client.search_runs(list(experiments), filter_, **more)
        return [jobs.index(run.info.run_id) for run in found]

    assert search() == [3, 2, 1, 0]
    assert search(experiments=("0",)) == [3]
    assert search("metrics.`val/loss` < 29.5") == [0]
    assert search("metrics.x > 0") == [1, 0]
    assert search("metrics.x < 0") == []
    assert search("attributes.status = 'FINISHED'") == [0]
    assert search("status != 'FINISHED' and tags.team = 't1'") == [1]
    assert search("params.`train.optimizer.lr` = '0.01'") == [2]
    assert search("params.train.optimizer.name LIKE 'ada%' AND run_name = 'run 2'") == [2]
    assert search("tags.`mlflow.user` = 'nobody'") == []
    assert search("start_time > 0", order_by=["metrics.`val/loss` ASC"]) == [0, 1, 3, 2]
    by_name = ["attributes.run_name DESC"]
    for order in ([], by_name):
        page = client.search_runs([digits], max_results=2, order_by=order)
        rest = client.search_runs([digits], max_results=2, page_token=page.token, order_by=order)
        assert [jobs.index(run.info.run_id) for run in [*page, *rest]] == [2, 1, 0]
        assert rest.token is None
    with pytest.raises(mlflow.exceptions.MlflowException, match="compared with a number"):
        search("metrics.loss = 'much'")


def test_artifacts_are_listed_and_downloaded(client: Any, jobs: list[str], tmp_path: Path) -> None:
    listed = client.list_artifacts(jobs[0])
    assert [(f.path, f.is_dir, f.file_size) for f in listed] == [
        ("model", True, None),
        ("report.txt", False, 4),
    ]
    assert [f.path for f in client.list_artifacts(jobs[0], "model/deep")] == [
        "model/deep/weights.bin"
    ]
    folder = Path(client.download_artifacts(jobs[0], "", str(tmp_path)))
    assert (folder / "model/deep/weights.bin").read_bytes() == b"weights"
    text = mlflow.artifacts.load_text(f"runs:/{jobs[0]}/report.txt")
    assert text == "good"


def test_what_would_write_is_refused_in_words(client: Any, jobs: list[str]) -> None:
    for write in (
        lambda: client.log_metric(jobs[0], "loss", 1.0),
        lambda: client.create_run("0"),
        lambda: client.create_experiment("mine"),
        lambda: client.delete_run(jobs[0]),
    ):
        with pytest.raises(mlflow.exceptions.MlflowException, match="is read-only"):
            write()


def test_a_token_is_asked_for(
    client: Any, jobs: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "wrong")
    with pytest.raises(mlflow.exceptions.MlflowException, match="does not know the token"):
        client.get_run(jobs[0])
