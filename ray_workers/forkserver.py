"""The forkserver: one process per node with torch already imported, forked for each rank.

Run as `python -m ray_workers.forkserver SOCKET`, with a pipe on stdin that its node agent holds:
when the agent is gone, the forkserver ends every process it started and exits.

A client connects to SOCKET and sends one request: a line of JSON, with a file descriptor (the
write end of a pipe for stdout and stderr) attached as SCM_RIGHTS. Requests:

    {"op": "rank", "task": RankTask}     fork a training process
    {"op": "store"}                      fork a process that serves a TCPStore
    {"op": "list"}                       -> {"tasks": [{"job_id", "attempt", "rank",
                                                        "incarnation", "pid"}]}
    {"op": "signal", "job_id", "attempt", "rank", "signal"}
                                         a signal to the whole session of the newest process
                                         at this rank -> {"pids": [...]}
    {"op": "dump", "job_id", "attempt", "rank"}
                                         have it write its stacks -> {"pids": [...]}

A fork is answered by `{"pid": ...}` and, when the process and every process of its session are
seen gone, `{"exit": code}` (negative: the signal). In between the client may send
`{"signal": number}`, delivered to the whole session. A client that closes its end, or dies,
takes the session with it.

Everything here is one thread and one loop, because a fork copies only the thread that calls it:
a lock that another thread held would stay locked in the child for ever. For the same reason the
preload starts no thread and touches no CUDA.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import json
import os
import secrets
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ray_workers.contracts import RankTask
from ray_workers.processes import (
    MARK_VARIABLE,
    handles,
    is_stopped,
    send_signal,
    session_members,
)

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
REQUEST_LIMIT_BYTES = 4 << 20
DUMP_SIGNAL = signal.SIGUSR2
"""On which a rank writes the stacks of its threads, once it has a handler for it."""
SWEEP_S = 0.02
"""Pause between two looks for what is left of a session that was killed."""


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


@dataclass
class Client:
    """One connection and, once it asked for one, the process forked for it."""

    connection: socket.socket
    buffer: bytes = b""
    fds: list[int] = field(default_factory=list)
    request: dict[str, Any] = field(default_factory=dict)
    pid: int = 0
    mark: str = ""
    exit_code: int | None = None

    def members(self) -> list[int]:
        """Live processes of what was forked for this client."""
        return session_members(self.pid, self.mark)

    def stands_at(self, message: dict[str, Any]) -> bool:
        """Whether it was forked for the rank that a request names."""
        described = _described(self)
        names = ("job_id", "attempt", "rank")
        return bool(self.pid) and all(described[name] == message[name] for name in names)

    def send(self, message: dict[str, Any]) -> None:
        # A client that does not listen any more finds out by itself.
        with contextlib.suppress(OSError):
            self.connection.sendall(json.dumps(message).encode() + b"\n")


class ForkServer:
    """Serves one Unix socket until its lifeline closes."""

    def __init__(self, listener: socket.socket, lifeline: int) -> None:
        self._listener = listener
        self._lifeline = lifeline
        self._clients: list[Client] = []
        self._abandoned: list[Client] = []  # killed because their client is gone
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)

    def serve(self) -> None:
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        while True:
            sweeping = any(c.exit_code is not None for c in self._clients + self._abandoned)
            watched: list[Any] = [self._listener, self._lifeline, self._wake_read]
            connections = [client.connection for client in self._clients]
            ready, _, _ = select.select(
                [*watched, *connections], [], [], SWEEP_S if sweeping else None
            )
            if self._lifeline in ready and not os.read(self._lifeline, 4096):
                return self._end_everything()
            if self._wake_read in ready:
                os.read(self._wake_read, 4096)
            for client in list(self._clients):
                if client.connection in ready:
                    self._receive(client)
            if self._listener in ready:
                self._clients.append(Client(self._listener.accept()[0]))
            self._reap()

    def _receive(self, client: Client) -> None:
        try:
            data, fds, _, _ = socket.recv_fds(client.connection, 1 << 16, 4)
        except OSError:
            data, fds = b"", []
        client.fds += fds
        if not data:
            return self._lost(client)
        client.buffer += data
        if len(client.buffer) > REQUEST_LIMIT_BYTES:
            return self._lost(client)
        while b"\n" in client.buffer:
            line, client.buffer = client.buffer.split(b"\n", 1)
            try:
                self._handle(client, json.loads(line))
            except (KeyError, TypeError, ValueError, OSError) as error:
                # One bad request, or no room for one more process, is not the others' end.
                sys.stderr.write(f"refused a request: {error!r}\n")
                return self._lost(client)
        return None

    def _handle(self, client: Client, message: dict[str, Any]) -> None:
        if "signal" in message and "op" not in message:
            if client.pid and client.exit_code is None:
                send_signal(client.members(), message["signal"])
        elif message["op"] == "list":
            client.send(
                {"tasks": [_described(c) for c in self._clients + self._abandoned if c.pid]}
            )
        elif message["op"] in ("signal", "dump"):
            ranks = [c for c in self._clients if c.exit_code is None and c.stands_at(message)]
            # The newest: of one that was given up there may be something left.
            pids = self._deliver(message, ranks[-1]) if ranks else []
            client.send({"pids": pids})
        else:
            client.request = message
            self._fork(client)

    def _deliver(self, message: dict[str, Any], rank: Client) -> list[int]:
        """Send a signal, or have a stack written; answer to whom it went."""
        if message["op"] == "signal":
            pids = rank.members()
            send_signal(pids, message["signal"])
            return pids
        if not handles(rank.pid, DUMP_SIGNAL):
            return []
        send_signal([rank.pid], DUMP_SIGNAL)
        if is_stopped(rank.pid):
            send_signal([rank.pid], signal.SIGCONT)
        return [rank.pid]

    def _fork(self, client: Client) -> None:
        if client.pid or not client.fds:
            raise ValueError("a connection starts one process, and brings the pipe for its output")
        client.mark = secrets.token_hex(8)
        pid = os.fork()
        if pid == 0:
            os.environ[MARK_VARIABLE] = client.mark
            _child(client.request, client.fds[-1])
        os.close(client.fds.pop())
        client.pid = pid
        client.send({"pid": pid})

    def _lost(self, client: Client) -> None:
        """The client is gone: its session goes too."""
        self._clients.remove(client)
        client.connection.close()
        for fd in client.fds:
            os.close(fd)
        if client.pid:
            send_signal(client.members(), signal.SIGKILL)
            self._abandoned.append(client)

    def _reap(self) -> None:
        """Collect the dead, and report those of whose session nothing is left."""
        self._collect_exit_codes()
        for group in (self._clients, self._abandoned):
            for client in [c for c in group if c.exit_code is not None]:
                if left := client.members():
                    send_signal(left, signal.SIGKILL)
                    continue
                group.remove(client)
                client.send({"exit": client.exit_code})
                client.connection.close()

    def _collect_exit_codes(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            for client in self._clients + self._abandoned:
                if client.pid == pid:
                    client.exit_code = os.waitstatus_to_exitcode(status)

    def _end_everything(self) -> None:
        forked = [client for client in self._clients + self._abandoned if client.pid]
        while left := [pid for client in forked for pid in client.members()]:
            send_signal(left, signal.SIGKILL)
            self._collect_exit_codes()
            time.sleep(SWEEP_S)


def _described(client: Client) -> dict[str, Any]:
    task = client.request.get("task", {})
    return {
        "job_id": task.get("job_id", ""),
        "attempt": task.get("attempt", 0),
        "rank": task.get("rank", -1),
        "incarnation": task.get("incarnation", 0),
        "pid": client.pid,
    }


def _child(request: dict[str, Any], output: int) -> None:
    """The forked side; never returns."""
    code = 1
    try:
        os.setsid()
        _keep_niceness()
        _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        os.dup2(output, 1)
        os.dup2(output, 2)
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.closerange(3, os.sysconf("SC_OPEN_MAX"))
        atexit._clear()  # the parent's handlers are not ours to run
        gc.enable()
        code = _operation(request)()
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        _leave(code)


def _keep_niceness() -> None:
    """Give the new session the niceness that Ray gave its worker.

    Where Linux groups processes by session (sched_autogroup), a process's own niceness counts only
    within its session, and a service beside the ranks would wait for each of them in turn.
    """
    with contextlib.suppress(OSError), open("/proc/self/autogroup", "w") as group:
        group.write(str(os.nice(0)))


def _operation(request: dict[str, Any]) -> Callable[[], int]:
    if request["op"] == "rank":
        from ray_workers.training import entry

        task = RankTask.from_json(json.dumps(request["task"]))
        return lambda: entry.main(task)
    if request["op"] == "store":
        from ray_workers.training import store

        return store.serve
    raise ValueError(f"unknown request: {request['op']!r}")


def _leave(code: int) -> None:
    """End as an interpreter would, without the parent's half of the interpreter's life."""
    try:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code & 0xFF)


def main(path: str) -> None:
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    from ray_workers.training import preload

    preload.preload()
    names = [Path(task.path, "comm").read_text().strip() for task in os.scandir("/proc/self/task")]
    if len(names) != 1:
        # A library that keeps its own thread, such as an allocator's; most can be forked.
        print(f"the preload left threads, and a fork copies only one: {names}", flush=True)  # noqa: T201
    gc.collect()
    gc.freeze()
    # At its name only when it listens: whoever finds it there may connect.
    unready = Path(f"{path}.new")
    unready.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(unready))
    unready.chmod(0o600)
    listener.listen(1024)
    unready.rename(path)
    ForkServer(listener, sys.stdin.fileno()).serve()


if __name__ == "__main__":
    main(sys.argv[1])
