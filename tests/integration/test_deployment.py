"""The commands of docker/compose.yaml, run on this machine, start a service that trains.

The difference to the containers: one machine has all ports, so each is replaced by a free one.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import psycopg
import pytest

from dray import Client
from dray.views import JobState
from tests.integration.harness import ROOT, eventually, free_port
from tests.marks import SOAK
from tests.unit.packaging import compose

pytestmark = pytest.mark.ray


class Containers:
    """Stands in for Compose: its commands and environments, with this machine's paths and ports."""

    def __init__(self, folder: Path, postgres_url: str) -> None:
        self._folder = folder
        self._secrets = folder / "secrets"
        subprocess.run(
            [compose.DOCKER / "make-secrets.sh", self._secrets], check=True, capture_output=True
        )
        options = psycopg.conninfo.conninfo_to_dict(postgres_url)
        service_file = "".join(f"{key}={value}\n" for key, value in options.items() if value)
        (self._secrets / "pg_service.conf").write_text(f"[dray]\n{service_file}")
        lines = (self._secrets / "env").read_text().splitlines()
        self._services = compose.load(dict(line.split("=", 1) for line in lines))["services"]
        self._ports: dict[str, int] = {}
        self._temp_dir = Path(tempfile.mkdtemp(prefix="dray-ray-"))
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    @property
    def client(self) -> Client:
        token = (self._secrets / "admin_token").read_text().strip()
        return Client(f"http://127.0.0.1:{self._port('8420', 'api')}", token)

    def _port(self, number: str, service: str) -> int:
        """Agents have the same port in every container; other ports are one service's."""
        key = f"{service}:{number}" if number == "52365" else number
        return self._ports.setdefault(key, free_port())

    def _here(self, text: str, service: str) -> str:
        text = text.replace("/run/secrets", str(self._secrets))
        text = text.replace("/srv/dray", str(self._folder)).replace("ray-head:", "127.0.0.1:")
        for number in ("6379", "8265", "52365", "8420"):
            text = text.replace(number, str(self._port(number, service)))
        return text.replace("0.0.0.0", "127.0.0.1")

    def _words(self, words: list[str], service: str) -> list[str]:
        program = {"python": sys.executable, "ray": str(Path(sys.executable).with_name("ray"))}
        first = program.get(words[0], words[0])
        return [first, *(self._here(word, service) for word in words[1:])]

    def _environment(self, service: Mapping[str, Any], name: str) -> dict[str, str]:
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("DRAY_", "RAY_"))}
        given = {k: self._here(v, name) for k, v in service.get("environment", {}).items()}
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        ours = {
            "OMP_NUM_THREADS": "1",
            "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
            "TMPDIR": str(self._temp_dir),  # where nodes keep their spools and sockets
        }
        return {**clean, **given, **ours, "PATH": path, "PYTHONPATH": str(ROOT)}

    def up(self, *names: str) -> None:
        """Start services together; returns when each one's health check passes."""
        for name in names:
            service = self._services[name]
            words = self._words(compose.command(service), name)
            with open(self._folder / f"{name}.log", "wb") as log:
                self._processes[name] = subprocess.Popen(
                    [*words, *self._node_options(words, name)],
                    cwd=ROOT,
                    env=self._environment(service, name),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                )
        for name in names:
            eventually(partial(self.is_healthy, name), why=f"{name} is not healthy")

    def _node_options(self, words: list[str], name: str) -> list[str]:
        """What several Ray nodes on one machine need; nothing for other programs."""
        if name not in ("ray-head", "ray-worker", "service"):
            return []
        options = [
            "--node-ip-address=127.0.0.1",
            f"--temp-dir={self._temp_dir}",
            f"--dashboard-agent-grpc-port={free_port()}",
            f"--metrics-export-port={free_port()}",
            "--min-worker-port=0",
            "--max-worker-port=0",
        ]
        if not any("agent-listen-port" in word for word in words):
            options.append(f"--dashboard-agent-listen-port={free_port()}")
        if "--head" in words:
            options.append(f"--dashboard-port={self._port('8265', name)}")
        return options

    def is_healthy(self, name: str) -> bool:
        assert self._processes[name].poll() is None, f"{name} ended: {self.log(name)}"
        service = self._services[name]
        test = self._words(service["healthcheck"]["test"][1:], name)
        environment = self._environment(service, name)
        return subprocess.run(test, cwd=ROOT, env=environment, capture_output=True).returncode == 0

    def log(self, name: str) -> str:
        return (self._folder / f"{name}.log").read_text(errors="replace")[-3000:]

    def stop(self, name: str) -> int:
        """Send SIGTERM, like Compose; returns the exit code."""
        process = self._processes.pop(name)
        process.send_signal(signal.SIGTERM)
        return process.wait(timeout=40)

    def down(self) -> None:
        for name in reversed(list(self._processes)):
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.stop(name)
        shutil.rmtree(self._temp_dir, ignore_errors=True)


@pytest.fixture
def containers(tmp_path: Path, postgres_url: str) -> Iterator[Containers]:
    found = Containers(tmp_path, postgres_url)
    yield found
    found.down()


@SOAK
def test_the_commands_of_compose_train_a_job_and_stop_in_order(containers: Containers) -> None:
    containers.up("ray-head", "api")
    containers.up("ray-worker")  # two Ray nodes of one machine must not start at once
    containers.up("service")
    with containers.client as client:
        eventually(lambda: len(client.cluster().nodes) == 3, why=containers.log("service"))
        eventually(lambda: all(node.accepted for node in client.cluster().nodes))
        slots = [node.resources.get("CPU", 0) for node in client.cluster().nodes]
        assert sorted(slots) == [0, 0, 2]
        job = client.submit(ROOT / "examples" / "digits.yaml")
        assert job.owner == "admin"
        job = client.wait(job.id, timeout_s=90)
        assert job.links.ray_dashboard is not None
        assert job.state is JobState.SUCCEEDED, job.reason
        assert {artifact.path for artifact in client.artifacts(job.id)} >= {"model.safetensors"}
        assert containers.stop("service") == 0
        assert client.get(job.id).state is JobState.SUCCEEDED
    assert containers.stop("api") == 0
