"""A real service with training jobs, to measure how other load affects them."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.machine import BenchmarkError, wait_until_quiet
from benchmarks.serving.servers import Running, dray
from dray import Client
from dray.views import JobState

START_WITHIN_S = 180.0


@contextmanager
def training(num_jobs: int) -> Iterator[tuple[Running, Client, list[str]]]:
    """Start `python -m api` with its embedded Ray and `num_jobs` slots, and train a job on each."""
    wait_until_quiet()
    with (
        tempfile.TemporaryDirectory(prefix="dray-bench-") as home,
        dray(Path(home), loops=True, DRAY_LOCAL_SLOTS=str(num_jobs)) as server,
        Client(f"http://127.0.0.1:{server.port}") as client,
    ):
        document = {
            "name": "looked-on",
            "recipe": "image_classification",
            "train": {"epochs": 1_000_000, "global_batch_size": 256},
            "checkpoint": {"every_steps": 10**6},
        }
        ids = [client.submit(document).id for _ in range(num_jobs)]
        for job_id in ids:
            job = client.wait(job_id, START_WITHIN_S, [JobState.RUNNING, JobState.FAILED])
            if job.state is not JobState.RUNNING:
                raise BenchmarkError(f"job {job_id} does not train: {job.reason.message}")
        try:
            yield server, client, ids
        finally:
            for job_id in ids:
                client.cancel(job_id)
            for job_id in ids:
                client.wait(job_id, START_WITHIN_S)
