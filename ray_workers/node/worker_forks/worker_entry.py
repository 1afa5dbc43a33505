"""The script that a raylet runs for each worker process that it needs.

The script passes its arguments to the node's worker parent (`worker_parent`), which has already
imported Ray and forks the worker. Then the script exits. The script takes 0.02 s of CPU time, while
importing Ray takes 0.4 s. If there is no parent, the script starts one. If the parent does not
fork, this process runs Ray's own script and becomes the worker itself.

A worker is never started twice: the forked process continues only if it was able to notify this
process, and this process becomes the worker only once no notification can arrive.

The script imports as little as possible, because its imports cost time for each worker.
"""

from __future__ import annotations

import sys

if __name__ == "__main__" and not sys.flags.isolated:
    del sys.path[0]  # the folder of this script, whose modules could shadow other modules

import contextlib
import fcntl
import marshal
import os
import signal
import socket
import time
from collections.abc import Mapping, Sequence

RAYS_SCRIPT = "DRAY_RAYS_WORKER_SCRIPT"
"""Environment variable with the path of Ray's own worker script."""
PARENT_MODULE = "ray_workers.node.worker_forks.worker_parent"
JOB_OF_WORKER = "RAY_JOB_ID"
NO_JOB = "ffffffff"
"""Value that the raylet sets for a worker that it starts in advance and that any job can use."""
FORKED = b"+"
"""The byte with which the forked process notifies this process."""
CONNECT_LIMIT_S = 5.0
"""Seconds within which a newly started parent must begin to listen."""
CONNECT_PAUSE_S = 0.01
ANSWER_LIMIT_S = 20.0
"""Seconds within which a parent must fork, including its imports before the first fork. A slower
parent is killed, because it might be suspended. Ray itself waits 60 s for a worker."""


def socket_of(arguments: Mapping[str, str], environment: Mapping[str, str]) -> str | None:
    """Return the path of the parent's socket. Each raylet has one parent, whose socket is next to
    the raylet's socket. Return None if the worker must not be forked.

    A worker with a runtime environment is not forked, because it might need a different interpreter
    or different imports. Workers that spill objects are not forked, because there are few of them.
    Without the pid of the raylet, no worker is forked, because the parent would outlive the raylet.
    """
    raylet = arguments.get("--raylet-name")
    is_usual = arguments.get("--runtime-env-hash", "0") == "0" and (
        arguments.get("--worker-type", "WORKER") == "WORKER"
    )
    if raylet is None or not is_usual or not environment.get("RAY_RAYLET_PID"):
        return None
    return f"{raylet}-forks"


def is_forked(path: str, request: bytes, modules: str, limit_s: float = ANSWER_LIMIT_S) -> bool:
    """Make the parent that listens at `path` fork a worker. Return False if the parent certainly
    won't fork.

    `modules` are the comma-separated modules that a parent process imports in addition to Ray if
    this function starts it.
    """
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(limit_s)
        try:
            if not _connect(connection, path, modules):
                return False
            connection.sendall(request)
            connection.shutdown(socket.SHUT_WR)
            return connection.recv(1) == FORKED
        except TimeoutError:
            _end(connection)
            # After the shutdown, this process can't receive a notification from the forked process,
            # but a notification might have arrived before the shutdown. If the parent exited
            # without reading the request, the connection has been reset.
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RD)
                return connection.recv(1) == FORKED
            return False
        except OSError:
            return False


def _connect(connection: socket.socket, path: str, modules: str) -> bool:
    """Connect to the parent, starting one if there is none. Return False if no parent is
    listening."""
    with contextlib.suppress(FileNotFoundError, ConnectionRefusedError):
        connection.connect(path)
        return True
    deadline = time.monotonic() + CONNECT_LIMIT_S
    is_expected = start_parent(path, modules)
    while is_expected and time.monotonic() < deadline:
        with contextlib.suppress(FileNotFoundError, ConnectionRefusedError):
            connection.connect(path)
            return True
        time.sleep(CONNECT_PAUSE_S)
    return False


def _end(connection: socket.socket) -> None:
    """Kill the parent at the other end of the connection."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 4)
    with contextlib.suppress(ProcessLookupError):
        os.kill(int.from_bytes(credentials, sys.byteorder), signal.SIGKILL)


def start_parent(path: str, modules: str) -> bool:
    """Start a parent that listens at `path`, unless a parent already listens there. Return False if
    an earlier parent has found that it must not fork (`worker_parent.refuse`)."""
    with open(f"{path}.lock", "a+b", buffering=0) as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True  # a parent is running, and will listen soon
        if os.fstat(lock.fileno()).st_size:
            return False
        # Fork twice, so that the workers' parent is not a child of this process: Ray kills a
        # worker's children with the worker, and this process might become a worker.
        if (child := os.fork()) == 0:
            if os.fork() == 0:
                os.set_inheritable(lock.fileno(), True)
                # Ray reads its environment variables only once, when it is imported. If the parent
                # had this worker's job id, all forked workers would belong to that job, and the
                # raylet would kill them when the job ends.
                os.environ[JOB_OF_WORKER] = NO_JOB
                words = ["-P", "-m", PARENT_MODULE, path, str(lock.fileno()), modules]
                os.execv(sys.executable, [sys.executable, *words])
            os._exit(0)
        os.waitpid(child, 0)
    return True


def request_of(arguments: Sequence[str]) -> bytes:
    """Return the properties of this process that the worker inherits."""
    with open("/proc/self/oom_score_adj") as file:
        oom_score = file.read()
    return marshal.dumps((list(arguments), dict(os.environ), os.getcwd(), oom_score))  # noqa: PTH109  # pathlib takes long to import


def main() -> None:
    arguments = dict(word.split("=", 1) for word in sys.argv[1:] if "=" in word)
    path = socket_of(arguments, os.environ)
    modules = arguments.get("--worker-preload-modules", "")
    if path is None or not is_forked(path, request_of(sys.argv[1:]), modules):
        words = [sys.executable, os.environ[RAYS_SCRIPT], *sys.argv[1:]]
        os.execv(sys.executable, words)


if __name__ == "__main__":
    main()
