"""The script that a raylet runs for each worker process that it wants.

The script passes its arguments to the node's worker parent (`worker_parent`), which has Ray
imported and forks the worker, and ends. This takes 0.02 s of a core instead of 0.4 s for importing
Ray. The script starts a parent if there is none. If the parent does not fork, this process becomes
the worker itself, by Ray's own script.

A worker is never started twice: the forked process continues only if it could notify this process,
and this process starts the worker only once no notification can arrive any more.

The script imports only what it needs, since each worker spends the time for it.
"""

from __future__ import annotations

import sys

if __name__ == "__main__" and not sys.flags.isolated:
    del sys.path[0]  # the folder of this script, whose modules may shadow others

import contextlib
import fcntl
import marshal
import os
import signal
import socket
import time
from collections.abc import Mapping, Sequence

RAYS_SCRIPT = "DRAY_RAYS_WORKER_SCRIPT"
"""Environment variable with the path of Ray's own script."""
PARENT_MODULE = "ray_workers.node.worker_forks.worker_parent"
JOB_OF_WORKER = "RAY_JOB_ID"
NO_JOB = "ffffffff"
"""The raylet's value for a worker that it starts ahead for any job."""
FORKED = b"+"
"""The byte with which the forked process notifies this process."""
CONNECT_LIMIT_S = 5.0
"""Seconds in which a parent that was just started has to listen."""
CONNECT_PAUSE_S = 0.01
ANSWER_LIMIT_S = 20.0
"""Seconds in which a parent has to fork, including its imports at first. A slower parent is ended,
since it may be stopped. Ray itself waits for a worker for 60 s."""


def socket_of(arguments: Mapping[str, str], environment: Mapping[str, str]) -> str | None:
    """The socket of the parent for this worker, one for each raylet, next to the raylet's socket.
    None if the worker must not be forked.

    A worker with a runtime environment of its own may need another interpreter, or other imports;
    workers that spill objects are few; and a parent without its raylet's pid would outlive it.
    """
    raylet = arguments.get("--raylet-name")
    is_usual = arguments.get("--runtime-env-hash", "0") == "0" and (
        arguments.get("--worker-type", "WORKER") == "WORKER"
    )
    if raylet is None or not is_usual or not environment.get("RAY_RAYLET_PID"):
        return None
    return f"{raylet}-forks"


def is_forked(path: str, request: bytes, modules: str, limit_s: float = ANSWER_LIMIT_S) -> bool:
    """Have the parent that listens at `path` fork a worker; False if it never will.

    modules: modules that a parent imports besides Ray if it is started here, separated by commas.
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
            # From here on the forked process can't notify this one, but it may have done so before.
            # A parent that ended with the request unread has reset the connection.
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RD)
                return connection.recv(1) == FORKED
            return False
        except OSError:
            return False


def _connect(connection: socket.socket, path: str, modules: str) -> bool:
    """Connect to the parent, starting it if there is none; False if it does not listen."""
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
    """End the parent at the other end."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 4)
    with contextlib.suppress(ProcessLookupError):
        os.kill(int.from_bytes(credentials, sys.byteorder), signal.SIGKILL)


def start_parent(path: str, modules: str) -> bool:
    """Start a parent that is to listen at `path`, unless there is one. False if an earlier parent
    has found that it must not fork (`worker_parent.refuse`)."""
    with open(f"{path}.lock", "a+b", buffering=0) as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True  # a parent lives, and listens soon
        if os.fstat(lock.fileno()).st_size:
            return False
        # Forked twice, so that it is no child of this process: Ray ends the children of a worker
        # together with the worker, and this process may become one.
        if (child := os.fork()) == 0:
            if os.fork() == 0:
                os.set_inheritable(lock.fileno(), True)
                # Ray reads its variables once, when it is imported. With this worker's job, all
                # forks would belong to that job, and the raylet would end them once it is over.
                os.environ[JOB_OF_WORKER] = NO_JOB
                words = ["-P", "-m", PARENT_MODULE, path, str(lock.fileno()), modules]
                os.execv(sys.executable, [sys.executable, *words])
            os._exit(0)
        os.waitpid(child, 0)
    return True


def request_of(arguments: Sequence[str]) -> bytes:
    """The properties of this process that the worker inherits."""
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
