"""The embedded Ray: a one-node cluster of our own, as a daemon that outlives the service.

The Ray that `ray.init()` starts dies with a SIGKILLed parent, and with it the training. So this
one is started by `ray start --block` in a session of its own; a restarted service finds it by the
record under the home directory and joins it again. Every process of it carries an instance mark
in its environment, by which the processes that a crash left behind are found and ended.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Collection, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from ray_workers.node import orphans, rank_environment, session_records
from ray_workers.node.rank_environment import NODE_ADDRESS, RANK_NICENESS, RAY_INSTANCE
from ray_workers.shared import paths
from ray_workers.shared.processes.procfs import place
from service.cluster.ray import start_failure

logger = logging.getLogger(__name__)

CODE_ROOT = Path(__file__).resolve().parents[3]
"""The folder that holds the package `service`."""
RAY_START = "ray_workers.node.worker_forks.ray_start"
"""Module that does what the command `ray` does, with workers that are forked."""
WORKER_NICENESS = "RAY_worker_niceness"
"""Ray's setting of its workers' niceness, which is 15 by default."""
ON_LOOPBACK = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
"""Ray's setting whether nodes have addresses that other machines reach, which has effect on every
system: false keeps a node at 127.0.0.1."""
START_TIMEOUT_S = 60.0
MAX_START_TIMEOUT_S = 600.0
"""After each start that took too long the next one gets twice the time: the machine is slow."""
STOP_TIMEOUT_S = 6.0
KILL_LIMIT_S = 30.0
"""For which the ends of killed processes are waited for. One that waits for a GPU's driver, or for
a file of a server that is gone, may never end."""
CHECK_S = 0.05
LOOPBACK = "127.0.0.1"
INSTANCE_BYTES = 3
"""Of the random mark of an embedded Ray; its folder has its name, and paths of sockets are short
(`ray_workers.shared.paths`)."""
MEMORY_LIMITS = {
    "RAY_maximum_gcs_destroyed_actor_cached_count": "300",
    "RAY_maximum_gcs_dead_worker_cached_count": "200",
    "RAY_maximum_gcs_dead_node_cached_count": "10",
    "RAY_task_events_max_num_task_in_gcs": "1000",
    "RAY_task_events_max_dropped_task_attempts_tracked_per_job_in_gcs": "1000",
}
"""How many dead actors, workers and nodes, and finished calls, Ray remembers. By its own defaults,
such as 100,000 actors, the GCS grows for months; the dashboard shows the newest. There is no such
limit for placement groups that were removed, a few kB each."""
PLACE = "place"
"""File in the temp-dir of a Ray that says on which host and in which container it runs."""


class EmbeddedRayError(RuntimeError):
    """The embedded Ray could not be started or ended; the message says why."""


@dataclass(frozen=True)
class Daemon:
    """The record of a running embedded Ray."""

    pid: int
    started_ticks: int
    """Start time of the process in clock ticks since boot: a pid alone may be used again."""
    instance: str
    address: str
    dashboard_url: str


class EmbeddedRay:
    """Starts, finds again and ends the Ray under one home directory. Blocking calls."""

    def __init__(
        self, home: Path, num_slots: int, deployment_id: str, rank_env: Collection[str] = ()
    ) -> None:
        """rank_env: names of variables that ranks get besides those of the allow-list."""
        self._directory = home / "ray"
        self._num_slots = num_slots
        self._deployment_id = deployment_id
        self._rank_env = tuple(rank_env)
        self._lock = threading.Lock()
        self._stopping = False
        self._start_timeout_s = START_TIMEOUT_S
        self._record = self._directory / "daemon.json"
        self.token_file = self._directory / "token"

    def ensure(self) -> Daemon:
        """The running daemon; starts one, after ending the processes that a dead one left.

        EmbeddedRayError if it does not start, the dead one's processes do not end, or `stop` came
        first.
        """
        with self._lock:
            if self._stopping:
                raise EmbeddedRayError("the service is stopping")
            return self._ensure()

    def _ensure(self) -> Daemon:
        self._directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        known = self._read_record()
        if known is not None:
            if _is_alive(known) and _accepts(known.address):
                return known
            self._end(known)
        self._write_token()
        return self._start()

    def stop(self) -> None:
        """End the daemon and everything that carries its mark; none is started any more. The
        next service's `ensure` ends the processes that take too long here."""
        self._stopping = True
        try:
            self.end()
        except EmbeddedRayError as error:
            logger.error("%s", error)

    def end(self) -> None:
        """End the daemon and everything that carries its mark; the next `ensure` starts another.
        EmbeddedRayError if a process does not end."""
        with self._lock:
            known = self._read_record()
            if known is not None:
                self._end(known)

    def environment(self) -> dict[str, str]:
        """The environment variables that a driver needs to join."""
        return {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(self.token_file),
            # The GCS of one machine does not come back: give up on it soon.
            "RAY_gcs_rpc_server_reconnect_timeout_s": "5",
            # Without it Ray takes the machine's address in the place of 127.0.0.1, and then all of
            # its servers listen on all interfaces.
            ON_LOOPBACK: "false",
        }

    def _start(self) -> Daemon:
        instance = secrets.token_hex(INSTANCE_BYTES)
        ports = _free_ports(6)
        address, dashboard = f"{LOOPBACK}:{ports[0]}", f"http://{LOOPBACK}:{ports[1]}"
        log_path = self._directory / "daemon.log"
        temp_dir = _temp_dir(instance)
        remove_dead_sessions()
        paths.own_folder(temp_dir)
        command = [
            *(sys.executable, "-m", RAY_START, "start", "--head", "--block"),
            f"--node-ip-address={LOOPBACK}",
            f"--port={ports[0]}",
            f"--dashboard-host={LOOPBACK}",
            f"--dashboard-port={ports[1]}",
            f"--dashboard-agent-listen-port={ports[2]}",
            f"--dashboard-agent-grpc-port={ports[3]}",
            f"--metrics-export-port={ports[4]}",
            f"--ray-client-server-port={ports[5]}",
            "--min-worker-port=0",
            "--max-worker-port=0",
            "--include-dashboard=true",
            # The monitor reads every worker's log ten times a second, for drivers that print them.
            "--include-log-monitor=false",
            f"--num-cpus={self._num_slots}",
            f"--temp-dir={temp_dir}",
            "--disable-usage-stats",
            "--log-color=false",  # by itself it colours files as well
        ]
        with log_path.open("wb") as log:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=self._daemon_environment(instance),
            )
        daemon = Daemon(process.pid, _start_ticks(process.pid) or 0, instance, address, dashboard)
        try:
            self._write_record(daemon)
            # Written once there are processes: a folder without any is taken for a dead Ray's.
            (temp_dir / PLACE).write_text(place())
            self._await_start(process, log_path, temp_dir)
        except BaseException:  # such as a full disk
            self._end(daemon)
            raise
        return daemon

    def _write_record(self, daemon: Daemon) -> None:
        draft = self._record.with_suffix(".new")
        draft.write_text(json.dumps(asdict(daemon)))
        draft.replace(self._record)

    def _await_start(
        self, process: subprocess.Popen[bytes], log_path: Path, temp_dir: Path
    ) -> None:
        """Wait until Ray is up. EmbeddedRayError, in Ray's own words, if it ends or takes long."""
        limit_s = self._start_timeout_s
        deadline = time.monotonic() + limit_s
        while not _log_says_started(log_path):
            if self._stopping:
                raise EmbeddedRayError("the service is stopping")
            if process.poll() is not None:
                said = start_failure.reason(log_path, temp_dir)
                said = said or f"it ended with code {process.returncode}"
                raise EmbeddedRayError(f"the embedded Ray did not start: {said} (see {log_path})")
            if time.monotonic() > deadline:
                self._start_timeout_s = min(2 * limit_s, MAX_START_TIMEOUT_S)
                said = start_failure.reason(log_path, temp_dir) or "it reported no error"
                raise EmbeddedRayError(
                    f"the embedded Ray was not up after {limit_s:.0f} s: {said} (see {log_path})"
                )
            time.sleep(CHECK_S)

    def _daemon_environment(self, instance: str) -> dict[str, str]:
        code_path = [str(CODE_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        return {
            **MEMORY_LIMITS,
            **rank_environment.of_node(os.environ, self._rank_env),
            **self.environment(),
            RAY_INSTANCE: instance,
            # Ray's default would have training wait for all other work of the machine, and so would
            # supervisors and agents, which take little of a CPU and need it at once.
            WORKER_NICENESS: "0",
            # A worker that leads a process group could not lead a session
            # (`ray_workers.supervision.preload_minimal`). By the groups Ray ends the children of
            # dead workers, of which ours have none: the forkserver starts all processes.
            "RAY_process_group_cleanup_enabled": "false",
            RANK_NICENESS: os.environ.get(WORKER_NICENESS, "0"),
            paths.NODE_TMPDIR: os.environ.get(paths.NODE_TMPDIR) or tempfile.gettempdir(),
            # Temporary files of Ray's own processes are deleted with this folder.
            "TMPDIR": str(_temp_dir(instance)),
            "PYTHONPATH": os.pathsep.join(code_path),
            # One thread for each rank: several ranks share this machine's cores.
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
            NODE_ADDRESS: LOOPBACK,
            "RAY_metrics_report_interval_ms": "2000",
            # Ray's dashboard overwrites an actor's id with the one that its process had in the last
            # statistics. A job's actors start in processes that were idle then and had none, so
            # their pages open only after the next statistics: by default, up to 30 s later.
            "NODE_STATS_UPDATE_INTERVAL_SECONDS": "1",
            "RAY_DASHBOARD_STATS_UPDATING_INTERVAL": "1",
            # Draining is for nodes that others may move to; ours is the only one.
            "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
            # When memory runs out Ray would end its own workers, and with a node agent every job of
            # the node. The kernel ends the largest process, which is the rank at fault.
            "RAY_memory_monitor_refresh_ms": "0",
            # By default a raylet starts one worker process per CPU at a time, and forgets further
            # requests (`service.cluster.ray.prestart`).
            "RAY_worker_maximum_startup_concurrency": "8",
            # Each worker would leave a file of events that nobody reads, and Ray's dashboard would
            # open the files of all workers that there ever were every 2 seconds.
            "RAY_event_log_reporter_enabled": "false",
            "SCAN_EVENT_DIR_INTERVAL_SECONDS": "60",
            "RAY_preload_python_modules": "ray_workers.supervision.preload_minimal",
            "RAY_DISABLE_IMPORT_WARNING": "1",
        }

    def _end(self, daemon: Daemon) -> None:
        """SIGTERM, then SIGKILL whatever still carries the mark; returns when all are gone.
        EmbeddedRayError, and the record stays, if that takes too long."""
        if _is_alive(daemon):
            with contextlib.suppress(ProcessLookupError):
                os.kill(daemon.pid, signal.SIGTERM)
        deadline = time.monotonic() + STOP_TIMEOUT_S
        while pids := list(_marked(daemon.instance)):
            _reap(daemon.pid)
            if time.monotonic() > deadline or not _is_alive(daemon):
                for pid in pids:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
            if time.monotonic() > deadline + KILL_LIMIT_S:
                raise EmbeddedRayError(
                    "these processes of the embedded Ray do not end though they were killed: "
                    f"{', '.join(map(str, pids))}; `cat /proc/PID/stack` shows what each waits for"
                )
            time.sleep(CHECK_S)
        shutil.rmtree(_temp_dir(daemon.instance), ignore_errors=True)
        self._remove_nodes()
        self._record.unlink(missing_ok=True)

    def _remove_nodes(self) -> None:
        """Delete the files of its nodes on this machine, once no process of their records runs. A
        process that was started with an empty environment does not carry the Ray's mark.

        Spools stay until the service has read them, through the next Ray's node.
        """
        root = paths.deployment_root(self._deployment_id)
        nodes = list(session_records.nodes_of(root))
        if not orphans.reap_within(nodes, STOP_TIMEOUT_S):
            orphans.remove_folders(nodes)
            with contextlib.suppress(OSError):  # there is none, or it holds such spools
                root.rmdir()

    def _read_record(self) -> Daemon | None:
        try:
            return Daemon(**json.loads(self._record.read_text()))
        except (FileNotFoundError, ValueError, TypeError):
            return None

    def _write_token(self) -> None:
        if self.token_file.exists():
            return
        fd = os.open(self.token_file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(fd, "w") as file:
            file.write(secrets.token_hex(32))


def _temp_dir(instance: str) -> Path:
    return paths.machine_root() / f"ray-{instance}"


def remove_dead_sessions() -> None:
    """Delete the folders of embedded Rays of which nothing is left, as after a power cut.

    A folder without a note of this host and container is left alone: its processes can't be seen
    from here.
    """
    for folder in paths.machine_root().glob("ray-*"):
        try:
            is_ours = (folder / PLACE).read_text() == place()
        except OSError:
            continue
        # The note is written after the first process, so that a Ray that starts is not deleted.
        if is_ours and not any(_marked(folder.name.removeprefix("ray-"))):
            shutil.rmtree(folder, ignore_errors=True)


def _log_says_started(log_path: Path) -> bool:
    return b"--block" in log_path.read_bytes()


def _start_ticks(pid: int) -> int | None:
    """Field 22 of /proc/PID/stat (proc(5)); None if there is no such process or it is dead."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    fields = stat[stat.rindex(b")") + 2 :].split()
    return None if fields[0] in (b"Z", b"X") else int(fields[19])


def _is_alive(daemon: Daemon) -> bool:
    return _start_ticks(daemon.pid) == daemon.started_ticks


def _reap(pid: int) -> None:
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)


def _accepts(address: str) -> bool:
    host, port = address.rsplit(":", 1)
    try:
        with socket.create_connection((host, int(port)), timeout=2.0):
            return True
    except OSError:
        return False


def _marked(instance: str) -> Iterator[int]:
    """Pids of the live processes that carry the instance's mark in their environment."""
    mark = f"{RAY_INSTANCE}={instance}".encode()
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit():
            continue
        try:
            environment = Path(entry.path, "environ").read_bytes()
        except OSError:
            continue
        if mark in environment.split(b"\0") and _start_ticks(int(entry.name)) is not None:
            yield int(entry.name)


def _free_ports(count: int) -> list[int]:
    """Ports that were free just now, each a different one."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind((LOOPBACK, 0))
        return [each.getsockname()[1] for each in sockets]
