"""One server for all tests in this folder. Each test creates its own jobs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.unit.api.routes.reports.test_checkpoints import saved
from tests.unit.api.serving import LiveServer, serving
from tests.unit.cli.running import Cli
from tests.unit.service.helpers import log, metrics


@pytest.fixture(scope="package")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with serving(tmp_path_factory.mktemp("home")) as server:
        yield server


@pytest.fixture
def cli(server: LiveServer, capsys: pytest.CaptureFixture[str]) -> Cli:
    return Cli(server.url, capsys)


@pytest.fixture
def finished(server: LiveServer) -> str:
    job_id = server.submit(resources={"num_workers": 2})
    server.train(
        job_id,
        metrics(10, {"train/loss": 0.5, "val/accuracy": 0.9}, total_steps=10, samples_per_s=1234.5),
        log(0, "zero says [bold]this[/bold]"),
        log(0, "one says that", rank=1),
        saved(server, job_id, 10),
        server.artifact(job_id, "model.bin", b"weights"),
    )
    server.succeed(job_id)
    return job_id
