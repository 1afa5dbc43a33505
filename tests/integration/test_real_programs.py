"""Programs as the authors of their libraries have people write them: under torchrun and as jobs.

Both have the same packages, two processes and one seed, so they end with the same bytes.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from dray import Client
from dray.views import JobState
from tests.integration.harness import ROOT, Service
from tests.marks import soak_but

pytestmark = pytest.mark.ray
UV = (sys.executable, "-m", "uv", "pip", "install", "--python", sys.executable)
NO_INDEX = ("dns error", "failed to fetch", "error sending request", "connect")
"""What uv says of an index that it can't reach, in small letters."""


@dataclass(frozen=True)
class Program:
    """A folder of examples/scripts, and how its program is started."""

    folder: str
    arguments: tuple[str, ...] = ()
    env: dict[str, str] = field(default_factory=dict)
    weights: str = "model.pt"


ON_CPU = {"DS_ACCELERATOR": "cpu"}
OFFLINE = {"HF_HUB_OFFLINE": "1"}
PROGRAMS = {
    "ddp": Program("ddp"),
    "fsdp2": Program("fsdp2"),
    "mesh, tensor": Program("device_mesh", ("--tensor", "2")),
    "mesh, data": Program("device_mesh"),
    "transformers": Program("transformers_trainer", env=OFFLINE, weights="model.safetensors"),
    "lightning": Program("lightning_ddp"),
    "sentence-transformers": Program("sentence_embeddings", env=OFFLINE),
    "deepspeed, ZeRO 1": Program("deepspeed_zero", ("--stage", "1"), ON_CPU),
    "deepspeed, ZeRO 2": Program("deepspeed_zero", ("--stage", "2"), ON_CPU),
    "deepspeed, ZeRO 3": Program("deepspeed_zero", ("--stage", "3"), ON_CPU),
}


def skip_without_index(requirements: Path) -> None:
    """Skip the test if no index can be reached; what else is wrong, the job is to say."""
    tried = subprocess.run(
        [*UV, "--dry-run", "-r", requirements], capture_output=True, text=True, timeout=60
    )
    if tried.returncode and any(word in tried.stderr.lower() for word in NO_INDEX):
        pytest.skip(f"no package index can be reached: {tried.stderr.strip()}")


def submit(service: Service, folder: Path, program: Program) -> str:
    """Send the folder as a user does; the job's id."""
    options = ["--code", str(folder), "--workers", "2", "--json"]
    requirements = folder / "requirements.txt"
    if requirements.exists():
        options += ["--requirements", str(requirements)]
    for name, value in program.env.items():
        options += ["--env", f"{name}={value}"]
    command = [sys.executable, "-m", "dray.cli", "--url", service.url, "submit", *options]
    sent = subprocess.run(
        [*command, "--", "train.py", *program.arguments], capture_output=True, text=True, cwd=ROOT
    )
    assert sent.returncode == 0, sent.stderr
    return str(json.loads(sent.stdout)["id"])


def packages_of(client: Client, job_id: str) -> list[str]:
    """What the job's environment brought, as name==version."""
    ready = [event for event in client.events(job_id) if event.code == "environment_ready"]
    return [str(package) for event in ready for package in event.data["packages"]]


def under_torchrun(folder: Path, program: Program, packages: list[str], output: Path) -> str:
    """Train with torchrun and these packages over the node's; what the program printed."""
    site = folder / "site"
    if packages:
        subprocess.run(
            [*UV, "--quiet", "--no-deps", "--target", site, *packages], check=True, timeout=300
        )
    output.mkdir()
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    ran = subprocess.run(
        [*launcher, "--nproc-per-node", "2", "train.py", *program.arguments],
        cwd=folder,
        env={
            **os.environ,
            **program.env,
            "PYTHONPATH": str(site),
            "OMP_NUM_THREADS": "1",
            "DRAY_OUTPUT_DIR": str(output),
        },
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    return ran.stdout


def losses_of(lines: list[str]) -> list[str]:
    return [line.strip() for line in lines if "loss " in line]


@pytest.mark.parametrize("name", soak_but(PROGRAMS, short=("ddp", "fsdp2", "mesh, tensor")))
def test_a_job_ends_with_the_bytes_of_torchrun(
    embedded: Service, client: Client, tmp_path: Path, name: str
) -> None:
    program = PROGRAMS[name]
    folder = tmp_path / program.folder
    shutil.copytree(ROOT / "examples" / "scripts" / program.folder, folder)
    if (folder / "requirements.txt").exists():
        skip_without_index(folder / "requirements.txt")
    job_id = submit(embedded, folder, program)
    job = client.wait(job_id, timeout_s=300)
    lines = [line.text for line in client.logs(job_id)]
    assert job.state is JobState.SUCCEEDED, (job.reason, lines[-20:])
    peer = tmp_path / "torchrun"
    printed = under_torchrun(folder, program, packages_of(client, job_id), peer)
    losses = losses_of(lines)
    assert losses
    assert losses == losses_of(printed.splitlines())
    client.download(job_id, tmp_path / "job", artifact=program.weights)
    ours = (tmp_path / "job" / program.weights).read_bytes()
    assert ours == (peer / program.weights).read_bytes()
