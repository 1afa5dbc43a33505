"""A complete dray as its users run it: the server, a real Ray, and functions to break them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import pytest
from prometheus_client.parser import text_string_to_metric_families

from dray import Client, views
from ray_workers.node.forkserver.client import list_tasks
from ray_workers.node.rank_environment import RAY_INSTANCE
from ray_workers.node.worker_forks import worker_entry
from ray_workers.shared import paths
from ray_workers.shared.processes.procfs import started_ticks

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_S = 90.0
START_S = 240.0
"""A start of Ray that takes more than 60 s is given up, and the next one has twice as long."""
FORKSERVER_S = 3.0
"""Time limit for a forkserver to list what it runs; a stopped one never answers."""
T = TypeVar("T")


def eventually(
    probe: Callable[[], T], *, within_s: float = PATIENCE_S, why: str = "it never came true"
) -> T:
    """Return what `probe` returns once that is truthy; AssertionError after the time limit.

    A probe and the pause before the next one count as at most a second: if they take longer, the
    machine was stopped, and nothing could have become true.
    """
    left_s = within_s
    while True:
        began = time.monotonic()
        answer = probe()
        if answer:
            return answer
        assert left_s > 0, f"{why} (last answer: {answer!r})"
        time.sleep(0.05)
        left_s -= min(time.monotonic() - began, 1.0)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@dataclass
class Service:
    """`python -m api` with its own home."""

    home: Path
    environment: dict[str, str] = field(default_factory=dict)
    port: int = field(default_factory=free_port)
    process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def client(self) -> Client:
        return Client(self.url)

    def start(self) -> None:
        """Wait until the cluster accepts jobs; a service that never does is ended."""
        self.process = self.spawn()
        try:
            eventually(self.takes_jobs, within_s=START_S, why="the service never took jobs")
        except BaseException as error:
            error.add_note(self.log()[-3000:])
            self.kill()
            raise

    def spawn(self, *arguments: str) -> subprocess.Popen[bytes]:
        self.home.mkdir(parents=True, exist_ok=True)
        with open(self.home / "service.log", "ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "api", *arguments],
                cwd=ROOT,
                stdout=log,
                stderr=log,
                env={
                    **os.environ,
                    "DRAY_HOME": str(self.home),
                    "DRAY_PORT": str(self.port),
                    **self.environment,
                },
            )

    def takes_jobs(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, f"the service ended: {self.log()[-3000:]}"
        try:
            with self.client as client:
                cluster = client.cluster()
                return cluster.connected and any(node.accepted for node in cluster.nodes)
        except Exception:
            return False

    def kill(self) -> None:
        """Kill the service with SIGKILL, like a crash."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def stop(self) -> int:
        """Send SIGTERM; returns the exit code."""
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout=60)

    def log(self) -> str:
        return (self.home / "service.log").read_text(errors="replace")

    # Functions to break and observe the service.

    def gateway_pid(self) -> int:
        assert self.process is not None
        return one(
            pid
            for pid in children_of(self.process.pid)
            if "service.cluster.ray.gateway" in command_line(pid)
        )

    def ray_daemon(self) -> dict[str, Any]:
        daemon: dict[str, Any] = json.loads((self.home / "ray" / "daemon.json").read_text())
        return daemon

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def gcs_pid(self) -> int:
        return self.ray_child("gcs_server")

    def worker_parent(self) -> int:
        """Return the pid of the process from which the embedded Ray's workers are forked, or raise
        ValueError. A fork keeps its command line until it takes the name of a worker."""
        named = processes_of(self.ray_daemon()["instance"], worker_entry.PARENT_MODULE)
        return min(named, key=lambda pid: started_ticks(pid) or math.inf)

    def ray_child(self, program: str) -> int:
        """Return the pid of a program of the embedded Ray, such as `gcs_server`."""
        return one(
            pid
            for pid in children_of(self.ray_daemon()["pid"])
            if program in command_line(pid).split(" ")[0]
        )

    def dashboard(self, path: str) -> Any:
        """Return the JSON answer of the Ray dashboard's HTTP API."""
        with self.ask_dashboard(path) as answer:
            return json.loads(answer.read())

    def ask_dashboard(self, path: str) -> Any:
        token = (self.home / "ray" / "token").read_text().strip()
        request = urllib.request.Request(
            self.ray_daemon()["dashboard_url"] + path,
            headers={"Authorization": f"Bearer {token}"},
        )
        return urllib.request.urlopen(request, timeout=20)

    def actors(self, job_id: str, *, alive: bool = True) -> list[dict[str, Any]]:
        """Return the job's actors, as the Ray dashboard lists them."""
        listed = self.dashboard("/api/v0/actors?detail=true&limit=10000")
        found = listed["data"]["result"]["result"]
        return [
            actor
            for actor in found
            if (actor["name"] or "").startswith(f"dray:{job_id}:")
            and (actor["state"] != "DEAD" or not alive)
        ]

    def actor_pages(self, job_id: str) -> dict[str, dict[str, Any]]:
        """Return what the dashboard's list of actors shows about the job's, by their real ids."""
        listed = self.dashboard("/logical/actors")["data"]["actors"]
        prefix = f"dray:{job_id}:"
        return {key: actor for key, actor in listed.items() if actor["name"].startswith(prefix)}

    def num_known_idle_workers(self) -> int:
        """Return the Ray workers that the dashboard knows to hold no actor."""
        (node,) = self.dashboard("/nodes?view=summary")["data"]["summary"]
        detail = self.dashboard(f"/nodes/{node['raylet']['nodeId']}")["data"]["detail"]
        known = [stats for worker in detail["workers"] for stats in worker["coreWorkerStats"]]
        return sum(
            stats["workerType"] == "WORKER" and set(stats["actorId"]) == {"f"} for stats in known
        )

    def actor_log(self, actor_id: str) -> str:
        """Return the end of an actor's log, as the Ray dashboard shows it."""
        with self.ask_dashboard(f"/api/v0/logs/file?actor_id={actor_id}&lines=100000") as answer:
            text: str = answer.read().decode(errors="replace")
            return text

    def exported_metrics(self, job_id: str) -> dict[str, dict[str, str]]:
        """Return labels of the Ray metrics that the node exports for the job, by unprefixed name.

        If several ranks have a metric, one of them is chosen.
        """
        nodes = self.dashboard("/api/prometheus/sd")
        text = ""
        for target in {target for group in nodes for target in group["targets"]}:
            with urllib.request.urlopen(f"http://{target}/metrics", timeout=20) as answer:
                text += answer.read().decode()
        samples = [s for family in text_string_to_metric_families(text) for s in family.samples]
        return {
            sample.name.removeprefix("ray_"): sample.labels
            for sample in samples
            if sample.labels.get("job") == job_id
        }

    def actor_pid(self, job_id: str, role: str) -> int:
        """Return the pid of the live actor whose name contains `supervisor`, `worker:0` or so.
        Raises IndexError if there is none, as for a single rank of which the supervisor does the
        work."""
        actors = [a for a in self.actors(job_id) if f":{role}" in a["name"] and a["pid"]]
        pids = [int(actor["pid"]) for actor in actors]
        if not pids and role == "supervisor":  # a shared one has another name
            pids = supervisors_of(job_id)
        return pids[-1]


def command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""


def children_of(parent: int) -> Iterator[int]:
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            stat = (entry / "stat").read_bytes()
        except OSError:
            continue
        if int(stat[stat.rindex(b")") + 2 :].split()[1]) == parent:
            yield int(entry.name)


def agent_of(instance: str) -> int:
    """Pid of the node agent of an embedded Ray."""
    return actor_of(instance, "NodeAgent")


def actor_of(instance: str, kind: str) -> int:
    """Pid of the only actor of a class on an embedded Ray."""
    return one(processes_of(instance, f"ray::{kind}"))


def processes_of(instance: str, words: str) -> Iterator[int]:
    """Pids of an embedded Ray, by the mark in their environment, with `words` in their command."""
    mark = f"{RAY_INSTANCE}={instance}".encode()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and words in command_line(int(entry.name)):
            with contextlib.suppress(OSError):  # it has ended in the meantime
                if mark in (entry / "environ").read_bytes():
                    yield int(entry.name)


def one(found: Iterator[int]) -> int:
    (only,) = found
    return only


def fork_sockets() -> list[Path]:
    """Tasks of every forkserver. Listed again if a cluster's folder is deleted in the meantime."""
    while True:
        with contextlib.suppress(FileNotFoundError):
            return list(paths.machine_root().glob("*/*/fork.sock"))


def training_pids(job_id: str) -> dict[int, int]:
    """Rank to pid of the job's training processes on this machine; rank -1 is its store."""
    found = {}
    for path in fork_sockets():
        try:
            tasks = asyncio.run(asyncio.wait_for(list_tasks(str(path)), FORKSERVER_S))
        except Exception:
            continue  # a forkserver that is ending, gone or stopped
        found |= {task["rank"]: task["pid"] for task in tasks if task["job_id"] == job_id}
    return found


def supervisors_of(job_id: str) -> list[int]:
    """Return the pids of the supervisors on this machine that write reports of the job, including
    shared supervisors."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        if command_line(int(entry.name)).startswith("ray::Supervisor"):
            with contextlib.suppress(OSError):  # it has ended in the meantime
                files = [str(each.readlink()) for each in (entry / "fd").iterdir()]
                if any(f"/spool/{job_id}/" in path for path in files):
                    found.append(int(entry.name))
    return found


def spools(job_id: str) -> list[Path]:
    return list(paths.machine_root().glob(f"*/*/spool/{job_id}"))


DIGITS: dict[str, Any] = {
    "name": "digits",
    "recipe": "image_classification",
    "train": {
        "epochs": 4,
        "global_batch_size": 64,
        "optimizer": {"name": "adamw", "lr": 3e-3},
        "schedule": {"name": "cosine", "warmup_steps": 10},
        "seed": 1,
    },
    "resources": {"num_workers": 2},
    "checkpoint": {"every_steps": 10, "keep": 3},
}


def digits(**changes: Any) -> dict[str, Any]:
    """The digits job with other values; `train` and `checkpoint` are merged."""
    spec = json.loads(json.dumps(DIGITS))
    for key, value in changes.items():
        if isinstance(value, dict) and key in spec:
            spec[key] |= value
        else:
            spec[key] = value
    return dict(spec)


def script(path: Path, *args: str, **changes: Any) -> dict[str, Any]:
    """A job that runs a script."""
    return {
        "name": path.stem,
        "script": {"entrypoint": str(path), "args": list(args)},
        "resources": {"num_workers": 1},
        "max_retries": 0,
    } | changes


def step_of(client: Client, job_id: str) -> int:
    progress = client.get(job_id).progress
    return progress.step if progress else 0


def wait_for_step(client: Client, job_id: str, step: int) -> None:
    def reached() -> bool:
        job = client.get(job_id)
        assert not job.state.is_terminal, f"ended before step {step}: {job.reason}"
        return job.progress is not None and job.progress.step >= step

    eventually(reached, why=f"{job_id} never reached step {step}")


def wait_for_checkpoint(client: Client, job_id: str, step: int) -> None:
    """Wait until the service knows a checkpoint at this step or a later one."""
    eventually(
        lambda: any(saved.step >= step for saved in client.checkpoints(job_id)),
        why=f"{job_id} never saved step {step}",
    )


def all_metrics(client: Client, job_id: str) -> dict[str, views.Series]:
    return client.metrics(job_id, max_points=100_000).series


def assert_nothing_left(service: Service, job_id: str, *, within_s: float = 60.0) -> None:
    """Check that no process, actor or spool of the job remains (I7)."""
    eventually(lambda: not left_of(service, job_id), within_s=within_s, why="something is left")


def left_of(service: Service, job_id: str) -> list[Any]:
    """What exists of a job: pids of its processes and supervisors, its actors, and its spools."""
    pids = [*training_pids(job_id).values(), *supervisors_of(job_id)]
    return pids or service.actors(job_id) or spools(job_id)


def assert_events_are_whole(client: Client, job_id: str) -> None:
    """Check I4 and I8: no gaps, and one end."""
    events = list(client.events(job_id))
    assert [event.seq for event in events] == list(range(1, len(events) + 1))
    endings = [e for e in events if e.to_state is not None and e.to_state.is_terminal]
    assert len(endings) == 1


def assert_one_attempt(client: Client, job_id: str) -> None:
    """Check that the job's first attempt is its only one; the events tell why one followed."""
    attempts = [attempt.attempt for attempt in client.attempts(job_id)]
    told = [f"{event.time} {event.code} {event.message}" for event in client.events(job_id)]
    assert attempts == [1], "\n".join(told)


def assert_promises(service: Service, client: Client, job_id: str) -> None:
    """Check I1, I4, I5, I7 and I8 for a job that has ended."""
    job = client.get(job_id)
    assert job.state.is_terminal
    assert_events_are_whole(client, job_id)
    for series in all_metrics(client, job_id).values():
        assert series.steps == sorted(set(series.steps))
    assert_nothing_left(service, job_id)


def assert_books_add_up(client: Client, job_id: str) -> None:
    """The categories of a finished job's slot-seconds add up to what it held, within 1%."""
    goodput = client.get(job_id).goodput
    assert goodput is not None
    classes = goodput.slot_seconds.model_dump()
    held = 0.0
    for attempt in client.attempts(job_id):
        assert attempt.started_at is not None
        assert attempt.finished_at is not None
        seconds = (attempt.finished_at - attempt.started_at).total_seconds()
        held += attempt.world_size * seconds
    assert sum(classes.values()) == pytest.approx(goodput.total, abs=0.01)
    assert goodput.total == pytest.approx(held, rel=0.01), classes


@dataclass
class RayByHand:
    """A Ray cluster on this machine, started with `ray start` as an operator would."""

    folder: Path
    slots_per_node: int = 2
    gpus_per_node: int | None = None
    """Number of GPUs that Ray counts, real or not; None for the GPUs that it finds."""
    environment: dict[str, str] = field(default_factory=dict)
    labels: dict[str, str] = field(default_factory=dict)
    """Labels of nodes by node name, in the form that `ray start` accepts."""
    environments: dict[str, dict[str, str]] = field(default_factory=dict)
    """Additional variables of single nodes, by node name."""
    nodes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    port: int = field(default_factory=free_port)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def token_file(self) -> Path:
        return self.folder / "token"

    def start(self, *names: str) -> None:
        """Start a head, and nodes with these names."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self.token_file.write_text("a-token-of-this-test-cluster-0123456789\n")
        # Its dashboard consists of ten processes, which none of these tests needs.
        self._spawn("head", "--head", f"--port={self.port}", "--include-dashboard=false")
        self._await("head")
        self.join(*names)

    def join(self, *names: str) -> None:
        """Add nodes, or start nodes again; returns when `ray start` reports that they run."""
        for name in names:  # one at a time: two at once could pick the same ports
            self._spawn(name, f"--address={self.address}")
            self._await(name)

    def _await(self, name: str) -> None:
        log = self._log_path(name)
        eventually(lambda: b"--block" in log.read_bytes(), why=log.read_text())

    def _log_path(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    def _spawn(self, name: str, *arguments: str) -> None:
        with open(self._log_path(name), "wb") as log:
            node = subprocess.Popen(
                [
                    *(sys.executable, "-m", "ray.scripts.scripts", "start", "--block"),
                    *arguments,
                    "--node-ip-address=127.0.0.1",
                    f"--num-cpus={self.slots_per_node}",
                    *([] if self.gpus_per_node is None else [f"--num-gpus={self.gpus_per_node}"]),
                    *([f"--labels={self.labels[name]}"] if name in self.labels else []),
                    f"--dashboard-agent-listen-port={free_port()}",
                    f"--dashboard-agent-grpc-port={free_port()}",
                    f"--metrics-export-port={free_port()}",
                    "--min-worker-port=0",
                    "--max-worker-port=0",
                    "--include-log-monitor=false",
                    f"--temp-dir={tempfile.gettempdir()}/dray-test-{self.port}",
                    "--disable-usage-stats",
                ],
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self._environment() | self.environments.get(name, {}),
            )
        self.nodes[name] = node

    def node_id(self, name: str) -> str:
        """Return Ray's id of the node."""
        raylet = one(p for p in children_of(self.nodes[name].pid) if "raylet/raylet" in _name(p))
        arguments = Path(f"/proc/{raylet}/cmdline").read_bytes().decode().split("\0")
        (node_id,) = [a.removeprefix("--node_id=") for a in arguments if a.startswith("--node_id=")]
        return node_id

    def processes_of(self, name: str) -> list[int]:
        """Return every process of a node, whatever started it."""
        found, left = [], [self.nodes[name].pid]
        while left:
            found.append(left.pop())
            left += children_of(found[-1])
        return found

    def signal_node(self, name: str, number: int) -> None:
        # Find all of them before the first is killed: orphans can't be found by their parent.
        for pid in self.processes_of(name):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def kill_node(self, name: str) -> None:
        """Stop the node as if its power failed."""
        self.signal_node(name, signal.SIGSTOP)  # so that no process starts another one meanwhile
        self.signal_node(name, signal.SIGKILL)
        self.nodes.pop(name).wait()

    def drain_node(self, name: str, within_s: int) -> None:
        """Tell Ray that the node will leave, like an autoscaler or a spot notice."""
        command = [
            *(sys.executable, "-m", "ray.scripts.scripts", "drain-node"),
            *("--address", self.address, "--node-id", self.node_id(name)),
            *("--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "a spot notice"),
            *("--deadline-remaining-seconds", str(within_s)),
        ]
        subprocess.run(command, env=self._environment(), check=True, capture_output=True)

    def _environment(self) -> dict[str, str]:
        return {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(self.token_file),
            "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
            "OMP_NUM_THREADS": "1",
            **self.environment,
        }

    def stop(self) -> None:
        for node in reversed(self.nodes.values()):
            node.terminate()
        for node in self.nodes.values():
            node.wait(timeout=30)


def _name(pid: int) -> str:
    return command_line(pid).split(" ")[0]
