"""dray with uploaded code, `ray job submit`, and torchrun. Each runs the same program."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.machine import BenchmarkError, clean_environment
from benchmarks.processes import free_port, running, service, torchrun_command
from dray import Client
from dray.views import JobState

PROGRAM = Path(__file__).with_name("program.py")
TIMEOUT_S = 120.0


class Dray:
    """A running service with its embedded Ray."""

    def __init__(self, folder: Path, client: Client) -> None:
        """folder: the folder to upload."""
        self._folder = folder
        self._client = client

    def first_line_s(self) -> float:
        """Return the time from `upload_code`, for which the server already has every part, to the
        program's first line."""
        asked = time.time()
        return float(_reported(self._run(0, 0, num_ranks=1), "began")) - asked

    def step_s(self, num_steps: int, size: int, num_ranks: int) -> float:
        """The median of rank 0's steps."""
        return _median_s(self._run(num_steps, size, num_ranks))

    def submit_s(self) -> float:
        """Return the time from packing to the job's id, after one file has changed."""
        (self._folder / "changed.txt").write_text(str(time.time_ns()))
        asked = time.time()
        job = self._submit(0, 0, num_ranks=1)
        took = time.time() - asked
        self._client.wait(job, TIMEOUT_S)
        return took

    def _submit(self, num_steps: int, size: int, num_ranks: int) -> str:
        code = self._client.upload_code(self._folder)
        document = {
            "name": "program",
            "script": {
                "entrypoint": PROGRAM.name,
                "args": [str(num_steps), str(size)],
                "code": code.id,
            },
            "resources": {"num_workers": num_ranks},
            "max_retries": 0,
        }
        return self._client.submit(document).id

    def _run(self, num_steps: int, size: int, num_ranks: int) -> str:
        """Run the program and return its output."""
        job = self._client.wait(self._submit(num_steps, size, num_ranks), TIMEOUT_S)
        if job.state is not JobState.SUCCEEDED:
            raise BenchmarkError(f"dray's job ended {job.state}: {job.reason.message}")
        return "\n".join(line.text for line in self._client.logs(job.id))


@contextlib.contextmanager
def dray(home: Path, code: Path, num_slots: int) -> Iterator[Dray]:
    """Run a service that already has the code's parts."""
    with service(home, num_slots=num_slots) as client:
        client.upload_code(code)
        yield Dray(code, client)


class RayJobs:
    """`ray job submit` with its SDK, on a running cluster."""

    def __init__(self, client: Any, folder: Path) -> None:
        self._client = client
        self._folder = folder

    def first_line_s(self) -> float:
        """Return the time from `submit_job`, with the folder already uploaded, to the program's
        first line."""
        asked = time.time()
        job = self._client.submit_job(
            entrypoint=f"{sys.executable} {PROGRAM.name} 0 0",
            runtime_env={"working_dir": str(self._folder)},
        )
        deadline = time.monotonic() + TIMEOUT_S
        while not (status := self._client.get_job_status(job)).is_terminal():
            if time.monotonic() > deadline:
                raise BenchmarkError("the Ray job did not end")
            time.sleep(0.2)
        output = self._client.get_job_logs(job)
        if status.value != "SUCCEEDED":
            raise BenchmarkError(f"the Ray job ended as {status}:\n{output[-2000:]}")
        return float(_reported(output, "began")) - asked


@contextlib.contextmanager
def ray_jobs(home: Path, code: Path, num_cpus: int) -> Iterator[RayJobs]:
    """Run a cluster with the dashboard, which accepts the jobs."""
    from ray.job_submission import JobSubmissionClient

    port, gcs_port = free_port(), free_port()
    command = [
        *(str(Path(sys.executable).with_name("ray")), "start", "--head", "--block"),
        *("--port", str(gcs_port), "--dashboard-port", str(port), "--num-cpus", str(num_cpus)),
        *("--temp-dir", str(home / "ray")),
    ]
    with running(command, clean_environment(), home / "ray.log"):
        deadline = time.monotonic() + TIMEOUT_S
        while True:
            try:
                client = JobSubmissionClient(f"http://127.0.0.1:{port}")
                client.list_jobs()
                break
            except Exception:  # not listening yet
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.5)
        yield RayJobs(client, code)


def torchrun_step_s(num_steps: int, size: int, num_ranks: int, home: Path) -> float:
    """The median of rank 0's steps."""
    command = torchrun_command(str(PROGRAM), str(num_steps), str(size), num_ranks=num_ranks)
    environment = clean_environment() | {"OMP_NUM_THREADS": "1"}
    ended = subprocess.run(
        command, cwd=home, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S
    )
    if ended.returncode != 0:
        raise BenchmarkError(f"torchrun failed:\n{ended.stderr[-2000:]}")
    return _median_s(ended.stdout)


def uploaded_folder(home: Path, megabytes: int) -> Path:
    """Create a folder with the program and this many megabytes of incompressible files."""
    folder = home / f"code-{megabytes}"
    folder.mkdir()
    shutil.copy(PROGRAM, folder)
    for number in range(megabytes // 10):
        (folder / f"data-{number}.bin").write_bytes(os.urandom(10 << 20))
    return folder


def _median_s(output: str) -> float:
    return float(median(_reported(output, "steps_ms"))) / 1e3


def _reported(output: str, key: str) -> Any:
    for line in output.splitlines():
        if line.startswith("{") and key in (found := json.loads(line)):
            return found[key]
    raise BenchmarkError(f"the program did not print {key}:\n{output[-2000:]}")
