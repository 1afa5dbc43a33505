"""The embedded Ray: a one-node cluster that dray starts as a daemon, and that outlives the service.

If Ray were started by `ray.init()`, it would die, together with the training, when its parent
process is killed. Therefore, the embedded Ray is started by `ray start --block` in its own session.
A restarted service finds the embedded Ray through the record in the home directory, and connects to
it again. Each process of the embedded Ray has an instance mark in its environment, so that
processes that a crash left behind can be found and ended.
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
from ray_workers.shared.processes.procfs import pid_namespace
from service.cluster.ray import start_failure

logger = logging.getLogger(__name__)

CODE_ROOT = Path(__file__).resolve().parents[3]
"""The folder that contains the package `service`."""
RAY_START = "ray_workers.node.worker_forks.ray_start"
"""The module that replaces the command `ray`, so that workers are forked."""
WORKER_NICENESS = "RAY_worker_niceness"
"""Ray's setting for the niceness of its workers (15 by default)."""
ON_LOOPBACK = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
"""Ray's setting for whether other machines can reach its nodes. Despite its name, it has an effect
on every operating system: false binds a node to 127.0.0.1."""
START_TIMEOUT_S = 60.0
MAX_START_TIMEOUT_S = 600.0
"""Maximum start timeout in seconds. The timeout is doubled after each start that timed out,
because the machine might be slow."""
STOP_TIMEOUT_S = 6.0
KILL_LIMIT_S = 30.0
"""Time in seconds to wait for killed processes to end. A process that waits for a GPU driver, or
for a file on an unavailable server, might never end."""
CHECK_S = 0.05
LOOPBACK = "127.0.0.1"
INSTANCE_BYTES = 3
"""Length in bytes of an embedded Ray's random instance mark. The mark must be short because it is
part of the paths of sockets (see `ray_workers.shared.paths`)."""
MEMORY_LIMITS = {
    "RAY_maximum_gcs_destroyed_actor_cached_count": "300",
    "RAY_maximum_gcs_dead_worker_cached_count": "200",
    "RAY_maximum_gcs_dead_node_cached_count": "10",
    "RAY_task_events_max_num_task_in_gcs": "1000",
    "RAY_task_events_max_dropped_task_attempts_tracked_per_job_in_gcs": "1000",
}
"""Limits on how many dead actors, workers and nodes, and how many finished calls, Ray remembers for
its dashboard. With Ray's defaults, such as 100,000 actors, the GCS would keep growing for months.
Ray has no such limit for removed placement groups, which take a few kB each."""
PID_NAMESPACE = "place"
"""File in Ray's temp-dir that names the host and the container in which Ray runs."""


class EmbeddedRayError(RuntimeError):
    """Raised if the embedded Ray could not be started or stopped. The message gives the reason."""


@dataclass(frozen=True)
class Daemon:
    """The stored record of a running embedded Ray."""

    pid: int
    started_ticks: int
    """Start time of the process in clock ticks since boot, which identifies the process because
    pids are reused."""
    instance: str
    address: str
    dashboard_url: str


class EmbeddedRay:
    """Starts, finds and ends the Ray instance of one home directory. The calls block."""

    def __init__(
        self, home: Path, num_slots: int, deployment_id: str, rank_env: Collection[str] = ()
    ) -> None:
        """rank_env: variables that are passed to ranks in addition to the variables on the
        allowlist."""
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
        """Return the running daemon, or start one after ending the processes of a dead daemon.

        Raises EmbeddedRayError if the new daemon doesn't start, if the dead daemon's processes
        don't end, or after `stop` was called."""
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
        """End the daemon and every process with its mark, and don't start another daemon. If
        processes take too long to end, the next service ends them in `ensure`."""
        self._stopping = True
        try:
            self.end()
        except EmbeddedRayError as error:
            logger.error("%s", error)

    def end(self) -> None:
        """End the daemon and every process with its mark, or raise EmbeddedRayError. The next call
        of `ensure` starts another daemon."""
        with self._lock:
            known = self._read_record()
            if known is not None:
                self._end(known)

    def environment(self) -> dict[str, str]:
        """Return the environment variables that a driver needs to connect."""
        return {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(self.token_file),
            # Give up quickly, because the GCS of a single machine is not restarted.
            "RAY_gcs_rpc_server_reconnect_timeout_s": "5",
            # By default, Ray would replace 127.0.0.1 with the machine's address, and all of its
            # servers would listen on all interfaces.
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
            # The log monitor reads every worker's log ten times per second for drivers that print
            # logs. dray's driver doesn't print logs.
            "--include-log-monitor=false",
            f"--num-cpus={self._num_slots}",
            f"--temp-dir={temp_dir}",
            "--disable-usage-stats",
            "--log-color=false",  # by default, Ray also writes colour codes to files
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
            # Write this file only after the process has started, because `remove_dead_sessions`
            # deletes folders that contain this file if their Ray has no running processes.
            (temp_dir / PID_NAMESPACE).write_text(pid_namespace())
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
        """Wait until Ray is running. Raises EmbeddedRayError with Ray's message if Ray exits or
        takes too long."""
        limit_s = self._start_timeout_s
        deadline = time.monotonic() + limit_s
        while not _has_started(log_path):
            if self._stopping:
                raise EmbeddedRayError("the service is stopping")
            if process.poll() is not None:
                why = start_failure.reason(log_path, temp_dir)
                why = why or f"it ended with code {process.returncode}"
                raise EmbeddedRayError(f"the embedded Ray did not start: {why} (see {log_path})")
            if time.monotonic() > deadline:
                self._start_timeout_s = min(2 * limit_s, MAX_START_TIMEOUT_S)
                why = start_failure.reason(log_path, temp_dir) or "it reported no error"
                raise EmbeddedRayError(
                    f"the embedded Ray did not start within {limit_s:.0f} s: {why} (see {log_path})"
                )
            time.sleep(CHECK_S)

    def _daemon_environment(self, instance: str) -> dict[str, str]:
        code_path = [str(CODE_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        return {
            **MEMORY_LIMITS,
            **rank_environment.of_node(os.environ, self._rank_env),
            **self.environment(),
            RAY_INSTANCE: instance,
            # With Ray's default niceness, all other work on the machine would take precedence over
            # training, supervisors and agents. Supervisors and agents need little CPU time, but
            # need it immediately.
            WORKER_NICENESS: "0",
            # A process group leader can't become a session leader, but workers must (see
            # `ray_workers.supervision.preload_minimal`). Ray uses process groups to end the
            # children of dead workers, but dray's workers have no children, because the forkserver
            # starts all processes.
            "RAY_process_group_cleanup_enabled": "false",
            RANK_NICENESS: os.environ.get(WORKER_NICENESS, "0"),
            paths.NODE_TMPDIR: os.environ.get(paths.NODE_TMPDIR) or tempfile.gettempdir(),
            # The temporary files of Ray's own processes are deleted when this folder is deleted.
            "TMPDIR": str(_temp_dir(instance)),
            "PYTHONPATH": os.pathsep.join(code_path),
            # One thread per rank, because several ranks share this machine's cores.
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
            NODE_ADDRESS: LOOPBACK,
            "RAY_metrics_report_interval_ms": "2000",
            # Ray's dashboard overwrites an actor's id with the id that its process had when
            # statistics were last collected. A job's actors start in processes that were idle and
            # had no actor id at the last collection. The dashboard pages of these actors therefore
            # work only after the next collection, and the default interval is 30 s.
            "NODE_STATS_UPDATE_INTERVAL_SECONDS": "1",
            "RAY_DASHBOARD_STATS_UPDATING_INTERVAL": "1",
            # Draining is pointless, because there are no other nodes.
            "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
            # If memory ran out, Ray would kill one of its own workers. If it killed the node agent,
            # every job on the node would end. With Ray's memory monitor disabled, the kernel kills
            # the largest process, which is the rank at fault.
            "RAY_memory_monitor_refresh_ms": "0",
            # By default, a raylet starts only one worker process per CPU at a time, and discards
            # further requests (see `service.cluster.ray.prestart`).
            "RAY_worker_maximum_startup_concurrency": "8",
            # By default, each worker would leave behind an unneeded event file, and Ray's dashboard
            # would open the event files of all earlier workers every 2 seconds.
            "RAY_event_log_reporter_enabled": "false",
            "SCAN_EVENT_DIR_INTERVAL_SECONDS": "60",
            "RAY_preload_python_modules": "ray_workers.supervision.preload_minimal",
            "RAY_DISABLE_IMPORT_WARNING": "1",
        }

    def _end(self, daemon: Daemon) -> None:
        """Send SIGTERM and then SIGKILL to the processes with the mark until all of them are gone.
        If that takes too long, keep the record and raise EmbeddedRayError."""
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
                    "these processes of the embedded Ray were killed but have not ended: "
                    f"{', '.join(map(str, pids))}; `cat /proc/PID/stack` shows what each process "
                    "is waiting for"
                )
            time.sleep(CHECK_S)
        shutil.rmtree(_temp_dir(daemon.instance), ignore_errors=True)
        self._remove_nodes()
        self._record.unlink(missing_ok=True)

    def _remove_nodes(self) -> None:
        """Delete the files of this Ray's nodes on this machine once none of the nodes' recorded
        processes is running. Recorded processes are checked because processes that were started
        with an empty environment don't have the mark.

        Spools are kept so that the service can read them through the node of the next Ray instance.
        """
        root = paths.deployment_root(self._deployment_id)
        nodes = list(session_records.nodes_of(root))
        if not orphans.reap_within(nodes, STOP_TIMEOUT_S):
            orphans.remove_folders(nodes)
            with contextlib.suppress(OSError):  # the folder doesn't exist, or contains spools
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
    """Delete folders of embedded Ray instances without processes, for example after a power cut.

    A folder that doesn't name this host and container is kept, because the processes of its Ray
    instance are not visible in this container.
    """
    for folder in paths.machine_root().glob("ray-*"):
        try:
            is_ours = (folder / PID_NAMESPACE).read_text() == pid_namespace()
        except OSError:
            continue
        # The PID_NAMESPACE file is written after the first process has started, so the folder of a
        # Ray instance that is still starting is not deleted.
        if is_ours and not any(_marked(folder.name.removeprefix("ray-"))):
            shutil.rmtree(folder, ignore_errors=True)


def _has_started(log_path: Path) -> bool:
    return b"--block" in log_path.read_bytes()


def _start_ticks(pid: int) -> int | None:
    """Return the start time (field 22 of /proc/PID/stat, see proc(5)); None if there is no such
    live process."""
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
    """Yield the pids of live processes with the instance's mark in their environment."""
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
    """Return distinct free ports."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind((LOOPBACK, 0))
        return [each.getsockname()[1] for each in sockets]
