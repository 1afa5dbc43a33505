"""Jobs in a real MLflow: exported to `mlflow server`, through its restarts and those of the
process that calls it.

It needs the package mlflow, server included; where that is missing, the reason says so.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import json
import math
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from ray_workers.recipes import RECIPES
from ray_workers.shared.names import attempt_prefix
from ray_workers.shared.node_needs import DataPolicy
from ray_workers.training.parallel.meta_init import materialise
from service.db.session import Database
from service.loops.mlflow_exporter import MlflowExporter
from service.loops.shared.fencing import LoopDatabase
from service.loops.shared.timings import LoopTimings
from service.storage.storage import Storage
from service.tracking.mlflow.process import MlflowProcess
from tests.marks import SOAK
from tests.unit.api.serving import wait_until
from tests.unit.service.helpers import START, Service, metrics, spec

pytestmark = [
    SOAK,
    pytest.mark.skipif(
        not any(importlib.metadata.distributions(name="mlflow")),
        reason="mlflow, whose server takes the runs, is not installed: pip install mlflow",
    ),
]


@contextmanager
def mlflow_server(home: Path, port: int) -> Iterator[str]:
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", f"{port}"]
    command += ["--backend-store-uri", f"sqlite:///{home / 'mlflow.db'}", "--workers", "1"]
    command += ["--artifacts-destination", (home / "mlartifacts").as_uri()]
    with (home / "mlflow.log").open("a") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True, cwd=home)

        def answers() -> bool:
            assert server.poll() is None, (home / "mlflow.log").read_text()
            try:
                return httpx.get(f"{url}/health", trust_env=False).status_code == 200
            except httpx.TransportError:
                return False

        try:
            wait_until(answers, "MLflow's server")
            yield url
        finally:
            os.killpg(server.pid, signal.SIGKILL)
            server.wait()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


async def until_complete(exporter: MlflowExporter, condition: Any) -> None:
    async with asyncio.timeout(300):
        while not condition():
            if not await exporter.run_once():
                await asyncio.sleep(0.05)


async def test_a_model_is_loaded_by_its_signature(
    sqlite_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import mlflow
    import pandas

    document = spec(
        recipe="tabular_classification",
        model={"name": "mlp"},
        data={"source": "sklearn://iris"},
    )
    workload = RECIPES["tabular_classification"].build(document, DataPolicy.open())
    materialise(workload.model, torch.device("cpu"), 0)
    result = tmp_path / "result"
    result.mkdir()
    workload.write_results(workload.model, {}, 1, result)
    database = Database(sqlite_url)
    storage = Storage((tmp_path / "storage").as_uri())
    service = Service(database, storage, tmp_path)
    job_id = await service.running(**document.model_dump(mode="json", exclude_unset=True))
    frames = []
    for path in result.iterdir():
        storage.write_bytes(f"{attempt_prefix(job_id, 1)}/artifacts/{path.name}", path.read_bytes())
        frames.append(service.artifact(job_id, 1, path.name))
    frames = [replace(f, body={**f.body, "size_bytes": 1 << 20}) for f in frames]
    service.end(job_id, 1, frames=frames)
    port = free_port()
    process = MlflowProcess(f"http://127.0.0.1:{port}", storage.url)
    exporter = MlflowExporter(LoopDatabase(database), process, LoopTimings())
    with mlflow_server(tmp_path, port) as url:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", url)
        mlflow.set_tracking_uri(url)
        client = mlflow.MlflowClient()

        def done() -> Any:
            return [run for run in client.search_runs(["0"]) if run.info.status == "FINISHED"]

        await until_complete(exporter, done)
        (run,) = done()
        model = mlflow.pyfunc.load_model(f"runs:/{run.info.run_id}/.")
        columns = model.metadata.get_input_schema().input_names()
        rows = pandas.DataFrame([[5.1, 3.5, 1.4, 0.2]] * 2, columns=columns)
        config = json.loads((result / "config.json").read_text())
        assert set(model.predict(rows)) <= set(config["labels"])
        with pytest.raises(mlflow.exceptions.MlflowException, match="missing inputs"):
            model.predict(rows[columns[:2]])
    await process.stop()
    database.close()


async def test_every_job_is_a_run_whole_and_once_through_restarts(
    sqlite_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlflow import MlflowClient

    monkeypatch.setattr("service.loops.mlflow_exporter.AWAY_PAUSES_S", (0.0,))
    database = Database(sqlite_url)
    storage = Storage((tmp_path / "storage").as_uri())
    service = Service(database, storage, tmp_path)
    port = free_port()
    process = MlflowProcess(f"http://127.0.0.1:{port}", storage.url)
    exporter = MlflowExporter(LoopDatabase(database), process, LoopTimings())
    num_steps = 6000
    jobs = [
        await service.running(name=f"job-{n}", labels={"experiment": "digits"}) for n in range(3)
    ]
    with mlflow_server(tmp_path, port):
        for begin in range(0, num_steps, 1000):
            for job_id in jobs:
                frames = [
                    metrics(n, {"train/loss": 1 / (n + 1), "val/x": math.nan})
                    for n in range(begin, begin + 1000)
                ]
                service.report(job_id, 1, frames)
            await exporter.run_once()
            if begin == 2000 and process.pid is not None:
                os.kill(process.pid, signal.SIGKILL)
            if begin == 3000 and process.pid is not None:
                running = asyncio.create_task(exporter.run_once())
                await asyncio.sleep(0.05)
                os.kill(process.pid, signal.SIGKILL)
                await running
    for job_id in jobs:
        storage.write_bytes(f"{attempt_prefix(job_id, 1)}/artifacts/model/weights.bin", b"abc")
        artifact = service.artifact(job_id, 1, "model/weights.bin")
        service.end(job_id, 1, frames=[metrics(num_steps, {"train/loss": 0.5}), artifact])
    await exporter.run_once()
    assert exporter.is_away
    with mlflow_server(tmp_path, port) as url:
        client = MlflowClient(url)

        def runs() -> Any:
            found = client.get_experiment_by_name("digits")
            return client.search_runs([found.experiment_id]) if found else []

        await until_complete(
            exporter,
            lambda: [run.info.status for run in runs()] == ["FINISHED"] * len(jobs),
        )
        assert {run.data.tags["dray.job_id"] for run in runs()} == set(jobs)
        for run in runs():
            history = client.get_metric_history(run.info.run_id, "train/loss")
            assert [(p.step, p.value) for p in sorted(history, key=lambda p: p.step)] == [
                *((n, 1 / (n + 1)) for n in range(num_steps)),
                (num_steps, 0.5),
            ]
            assert {p.timestamp for p in history} == {START.timestamp() * 1000}
            assert len(client.get_metric_history(run.info.run_id, "val/x")) == num_steps
            assert run.data.params["recipe"] == "image_classification"
            (folder,) = client.list_artifacts(run.info.run_id)
            (file,) = client.list_artifacts(run.info.run_id, folder.path)
            assert (file.path, file.file_size) == ("model/weights.bin", 3)
    await process.stop()
    database.close()
