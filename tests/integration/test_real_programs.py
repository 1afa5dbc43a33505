"""Programs as the authors of their libraries recommend to write them: as jobs, and by hand.

Both have the same packages, ranks and seeds. Under torchrun, the results are the same bytes. The
programs of other frameworks are started with the frameworks' variables, and print the same.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest
import torch

from dray import Client
from dray.views import JobState
from tests.integration import torchvision_on_cpu
from tests.integration.harness import ROOT, Service, free_port
from tests.marks import SOAK, soak_but

pytestmark = pytest.mark.ray
UV = (sys.executable, "-m", "uv", "pip", "install", "--python", sys.executable)
GLOO_ABORTS, GLOO_TRIES = "terminate called without an active exception", 3
"""Now and then the end of gloo aborts a rank whose peer has left already, after the training."""
NO_INDEX = ("dns error", "failed to fetch", "error sending request", "connect")
"""uv's message, in lower case, about an index that it can't reach."""


@dataclass(frozen=True)
class Program:
    """A folder of examples/scripts, and how to start its program."""

    folder: str
    arguments: tuple[str, ...] = ()
    env: dict[str, str] = field(default_factory=dict)
    weights: str = "model.pt"
    num_workers: int = 2


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
    "ultralytics": Program("ultralytics_yolo", env={"YOLO_OFFLINE": "true"}, num_workers=1),
}


def skip_without_index(requirements: Path) -> None:
    """Skip the test if no index can be reached; what else is wrong, the job is to say."""
    tried = subprocess.run(
        [*UV, "--dry-run", "-r", requirements], capture_output=True, text=True, timeout=60
    )
    if tried.returncode and any(word in tried.stderr.lower() for word in NO_INDEX):
        pytest.skip(f"no package index can be reached: {tried.stderr.strip()}")


def submit(service: Service, folder: Path, program: Program) -> str:
    """Upload the folder like a user; returns the job's id."""
    workers = str(program.num_workers)
    return send(
        service, folder, program.env, "--workers", workers, "--", "train.py", *program.arguments
    )


def send(service: Service, folder: Path, env: Mapping[str, str], *words: str) -> str:
    """Submit a folder with its requirements; returns the job's id."""
    options = ["--code", str(folder), "--json"]
    requirements = folder / "requirements.txt"
    if requirements.exists():
        options += ["--requirements", str(requirements)]
    for name, value in env.items():
        options += ["--env", f"{name}={value}"]
    command = [sys.executable, "-m", "dray.cli", "--url", service.url, "submit", *options, *words]
    sent = subprocess.run(command, capture_output=True, text=True, cwd=folder)
    assert sent.returncode == 0, sent.stderr
    return str(json.loads(sent.stdout)["id"])


def packages_of(client: Client, job_id: str) -> list[str]:
    """Return the packages that the job's environment added, as name==version."""
    ready = [event for event in client.events(job_id) if event.code == "environment_ready"]
    return [str(package) for event in ready for package in event.data["packages"]]


def install(folder: Path, packages: list[str]) -> Path:
    """A folder with exactly these packages."""
    site = folder / "site"
    if packages:
        subprocess.run(
            [*UV, "--quiet", "--no-deps", "--target", site, *packages], check=True, timeout=300
        )
    return site


def under_torchrun(folder: Path, program: Program, packages: list[str], output: Path) -> str:
    """Train with torchrun and these packages on top of the node's; returns the program's output."""
    site = install(folder, packages)
    output.mkdir()
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    for _ in range(GLOO_TRIES):
        ran = subprocess.run(
            [
                *launcher,
                "--nproc-per-node",
                str(program.num_workers),
                "train.py",
                *program.arguments,
            ],
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
        if not (ran.returncode and GLOO_ABORTS in ran.stderr):
            break
    assert ran.returncode == 0, ran.stderr[-3000:]
    return ran.stdout


def copy_of(name: str, tmp_path: Path) -> Path:
    """A folder of examples/scripts as one's own. Skips the test if its packages can't be had."""
    folder = tmp_path / name
    shutil.copytree(ROOT / "examples" / "scripts" / name, folder)
    if (folder / "requirements.txt").exists():
        skip_without_index(folder / "requirements.txt")
    return folder


def lines_of(client: Client, job_id: str) -> list[str]:
    """Return the job's output after it has succeeded."""
    job = client.wait(job_id, timeout_s=600)
    lines = [line.text for line in client.logs(job_id)]
    assert job.state is JobState.SUCCEEDED, (job.reason, lines[-20:])
    return lines


def losses_of(lines: list[str]) -> list[str]:
    return [line.strip() for line in lines if "loss " in line]


@pytest.mark.parametrize("name", soak_but(PROGRAMS, short=("fsdp2",)))
def test_a_job_ends_with_the_bytes_of_torchrun(
    embedded: Service, client: Client, tmp_path: Path, name: str
) -> None:
    program = PROGRAMS[name]
    folder = copy_of(program.folder, tmp_path)
    if name == "ultralytics" and "+cpu" in torch.__version__:
        shutil.copy(Path(torchvision_on_cpu.__file__), folder / "torchvision.py")
    job_id = submit(embedded, folder, program)
    lines = lines_of(client, job_id)
    peer = tmp_path / "torchrun"
    printed = under_torchrun(folder, program, packages_of(client, job_id), peer)
    losses = losses_of(lines)
    assert losses
    assert losses == losses_of(printed.splitlines())
    client.download(job_id, tmp_path / "job", artifact=program.weights)
    ours = (tmp_path / "job" / program.weights).read_bytes()
    assert ours == (peer / program.weights).read_bytes()


Variables = dict[str, str]


def by_jax() -> list[Variables]:
    """For each process, the variables that `jax.distributed.initialize()` reads: its own, and
    those of Open MPI's launcher."""
    told = {
        "JAX_COORDINATOR_ADDRESS": address(),
        "OMPI_MCA_orte_hnp_uri": f"0.0;tcp://{address()}",
        "OMPI_COMM_WORLD_SIZE": "2",
    }
    ranks = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK")
    return [{**told, **dict.fromkeys(ranks, str(number))} for number in range(2)]


def by_tensorflow(**roles: int) -> list[Variables]:
    """Return TF_CONFIG of each task; tasks that others wait for come last."""
    cluster = {role: [address() for _ in range(count)] for role, count in roles.items()}
    return [
        {"TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": role, "index": index}})}
        for role, count in roles.items()
        for index in range(count)
    ]


def by_mxnet() -> list[Variables]:
    """The variables that the framework's own launcher sets."""
    host, port = address().split(":")
    told = {
        "DMLC_PS_ROOT_URI": host,
        "DMLC_PS_ROOT_PORT": port,
        "DMLC_NUM_SERVER": "1",
        "DMLC_NUM_WORKER": "2",
    }
    return [{**told, "DMLC_ROLE": role} for role in ("scheduler", "server", "worker", "worker")]


def address() -> str:
    return f"127.0.0.1:{free_port()}"


@dataclass(frozen=True)
class OtherProgram:
    """A folder of examples/scripts that another framework's launcher starts."""

    folder: str
    words: tuple[str, ...]
    """Arguments of `dray submit`."""
    by_hand: Callable[[], list[Variables]]
    """The variables of each process."""
    serve: int = 0
    """How many of these processes, the first ones, never exit on their own."""


def with_framework(name: str) -> tuple[str, ...]:
    return ("--workers", "2", "--set", f"script.framework={name}", "--", "train.py")


OTHERS = {
    "jax.distributed": OtherProgram("jax_distributed", with_framework("jax"), by_jax),
    "MultiWorkerMirroredStrategy": OtherProgram(
        "tensorflow_multiworker", with_framework("tensorflow"), partial(by_tensorflow, worker=2)
    ),
    "ParameterServerStrategy": OtherProgram(
        "tensorflow_parameter_servers",
        ("job.yaml",),
        partial(by_tensorflow, ps=1, worker=2, chief=1),
        serve=3,
    ),
    "dist_sync": OtherProgram("mxnet_kvstore", ("job.yaml",), by_mxnet),
}


def by_hand(program: OtherProgram, folder: Path, packages: list[str]) -> list[str]:
    """Start each process of a program with its variables; returns what they printed."""
    site = install(folder, packages)
    told = program.by_hand()
    outputs = [folder / f"output-{number}" for number in range(len(told))]
    with contextlib.ExitStack() as stack:
        processes = []
        for variables, output in zip(told, outputs, strict=True):
            env = {**os.environ, **variables, "PYTHONPATH": str(site), "OMP_NUM_THREADS": "1"}
            file = stack.enter_context(output.open("w"))
            processes.append(
                subprocess.Popen(
                    [sys.executable, "train.py"], cwd=folder, env=env, stdout=file, stderr=file
                )
            )
            stack.callback(processes[-1].kill)
        codes = [process.wait(timeout=300) for process in processes[program.serve :]]
    printed = [output.read_text() for output in outputs]
    assert not any(codes), printed
    return "".join(printed).splitlines()


def ends_of(lines: Sequence[str]) -> list[str]:
    """Return the last lines of a program: what each process has learned."""
    return sorted(line.strip() for line in lines if "weight " in line)


@SOAK
@pytest.mark.parametrize("name", OTHERS)
def test_a_job_of_another_framework_learns_what_it_learns_by_hand(
    embedded: Service, client: Client, tmp_path: Path, name: str
) -> None:
    program = OTHERS[name]
    folder = copy_of(program.folder, tmp_path)
    job_id = send(embedded, folder, {}, *program.words)
    lines = lines_of(client, job_id)
    printed = by_hand(program, folder, packages_of(client, job_id))
    found, expected = ends_of(lines), ends_of(printed)
    assert found
    if name != "ParameterServerStrategy":
        assert found == expected
        assert sorted(losses_of(lines)) == sorted(losses_of(printed))
        return
    # Its steps are asynchronous: no two runs are equal.
    for (line,) in (found, expected):
        weight, bias = (float(value) for value in re.findall(r"-?\d+\.\d+", line))
        assert (weight, bias) == pytest.approx((3.0, 0.5), abs=0.02)
