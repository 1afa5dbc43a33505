"""MLflow's own client reads generated names from dray, can't write, and accepts dray's exports."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.generated.names import around
from tests.generated.names.conftest import seeds
from tests.generated.names.doors import Doors, entered
from tests.generated.names.drawing import Draw
from tests.generated.names.exits import bits, expected_series, name_of, of_mlflow
from tests.generated.names.sites import Sites
from tests.marks import SOAK
from tests.seeds import noted

mlflow = pytest.importorskip(
    "mlflow", reason="the extra 'dev' is not installed: mlflow-skinny, whose client reads dray"
)
FEW = 25
MOST_BYTES = 200
"""Maximum size of a name that MLflow's file store accepts as a file name."""
pytestmark = SOAK


@pytest.fixture(autouse=True)
def variables() -> Iterator[None]:
    wanted = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0", "MLFLOW_ALLOW_FILE_STORE": "true"}
    with mock.patch.dict(os.environ, wanted):
        yield


def test_mlflows_client_reads_names_as_they_are(sites: Sites, tmp_path: Path) -> None:
    for seed in noted(seeds()[:FEW]):
        with entered(sites, tmp_path, Draw(seed).case()) as doors:
            job_id = doors.put()
            token = (
                {} if doors.caller.token is None else {"MLFLOW_TRACKING_TOKEN": doors.caller.token}
            )
            with mock.patch.dict(os.environ, token):
                reads(mlflow.MlflowClient(doors.caller.url), job_id, doors)
                run_is_taken(doors, job_id, tmp_path / f"store-{seed}")


def reads(client: Any, job_id: str, doors: Doors) -> None:
    case = doors.case
    run = client.get_run(job_id)
    assert (run.info.run_name, run.info.user_id) == (name_of(case), case.owner)
    found = client.get_experiment_by_name(around.experiment_of(case))
    text = f"attributes.run_name = {of_mlflow(name_of(case))}"
    runs = client.search_runs([found.experiment_id], text)
    assert job_id in [one.info.run_id for one in runs]
    for key, points in expected_series(case).items():
        history = client.get_metric_history(job_id, key)
        assert [(one.step, bits(one.value)) for one in history] == points
    with pytest.raises(mlflow.MlflowException) as refusal:
        client.log_metric(job_id, "loss", 1.0)
    assert refusal.value.error_code == "PERMISSION_DENIED"
    paths = {one.path for one in client.list_artifacts(job_id) if not one.is_dir}
    assert paths == {name for name in case.files if "/" not in name}


def run_is_taken(doors: Doors, job_id: str, store: Path) -> None:
    """Return what dray writes to an MLflow that stores it in files."""
    from service.tracking.mlflow.client import Runs

    part = around.exported(doors, job_id)
    runs = Runs(store.as_uri(), doors.server.hands.storage.url)
    short = {key: value for key, value in part.run.params.items() if fits(key, part.run.params)}
    about = (part.run.name, job_id, part.run.start_time_ms, short)
    run_id = runs.begin("drawn", *about)
    names = {metric[0] for metric in part.metrics}
    metrics = [metric for metric in part.metrics if fits(metric[0], names)]
    tags = {key: value for key, value in part.tags.items() if fits(key, part.tags)}
    runs.log(run_id, metrics, tags)
    client = mlflow.MlflowClient(store.as_uri())
    kept = client.get_run(run_id)
    assert kept.data.params == short
    assert kept.data.tags.items() >= tags.items()
    for key in {metric[0] for metric in metrics}:
        history = [(one.step, bits(one.value)) for one in client.get_metric_history(run_id, key)]
        given = [(step, bits(value)) for name, value, _, step in metrics if name == key]
        assert sorted(history) == sorted(given)


def fits(key: str, others: Collection[str]) -> bool:
    """Whether MLflow can store a value in a file of this name. The names of the others' folders are
    taken."""
    is_folder = any(other.startswith(f"{key}/") for other in others)
    return len(key.encode()) <= MOST_BYTES and not is_folder
