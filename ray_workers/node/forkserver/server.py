"""The forkserver: one process per node, which has imported torch and is forked for each rank.

The forkserver is run as `python -m ray_workers.node.forkserver.server SOCKET`. Its stdin is a pipe,
and its node agent keeps the other end of the pipe open: when the agent exits, the forkserver ends
all processes that it started, and exits.

A client connects to SOCKET and sends a request: a line of JSON. To fork a process, the client also
sends, as SCM_RIGHTS, a file descriptor (the write end of a pipe for stdout and stderr) and
optionally a second descriptor that only the forked process uses (`given` in the request). Requests:

    {"op": "rank", "task": RankTask}     fork a training process
    {"op": "store", "address", "temp_dir"}
                                         fork a process that serves a TCPStore behind a proxy at
                                         this address
    {"op": "list"}                       -> {"tasks": [{"job_id", "attempt", "rank",
                                                        "incarnation", "pid", "left"}]}
    {"op": "signal", "job_id", "attempt", "rank", "signal"}
                                         send a signal to the whole session of the newest process
                                         at this rank -> {"pids": [...]}
    {"op": "dump", "job_id", "attempt", "rank"}
                                         make that process print its stacks -> {"pids": [...]}

The responses to a fork are `{"pid": ...}` and, when the process and everything that it started are
gone, `{"exit": code}` (negative: the signal). If there are processes that can't be ended within
STUCK_S, the second response is `{"exit": code, "left": [pids]}`, in which `code` is null if the
forked process is among these processes. The session then stays in the list, and is killed
repeatedly until it is gone. Either form of the second response contains `"memory_kills"`, the
number of processes that the kernel killed for lack of memory between the fork and the end. Before
the end, the client may send `{"signal": number}`, which is delivered to the whole session. If a
client closes its end or dies, its session is ended.

The forkserver is a single thread that runs a single loop, because a fork only copies the thread
that calls it: a lock held by another thread would stay locked in the child forever. For the same
reason, the preload doesn't start threads or use CUDA.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ray_workers.node import session_records
from ray_workers.node.forkserver import rank_init
from ray_workers.node.forkserver.served_client import Client
from ray_workers.shared.paths import preloaded_path
from ray_workers.shared.peers.peer_credentials import is_own_unix
from ray_workers.shared.processes import linux
from ray_workers.shared.processes.linux import PR_SET_CHILD_SUBREAPER, prctl
from ray_workers.shared.processes.procfs import (
    Session,
    boot_id,
    find_members,
    handles,
    is_stopped,
    new_mark,
    num_memory_kills,
    pid_namespace,
    send_signal,
    signal_main_thread,
    started_ticks,
    stat_fields,
)

REQUEST_LIMIT_BYTES = 4 << 20
DUMP_SIGNAL = signal.SIGUSR2
"""Signal that makes a rank print the stack traces of its threads, once the rank has a handler for
this signal."""
SWEEP_S = 0.02
"""Pause between two searches for processes of a killed session."""
STUCK_S = 10.0
"""Number of seconds after which killed processes that still exist are considered stuck."""
SILENT_S = 1.0
"""Number of seconds within which a rank's init process must report the end of a killed rank."""
STUCK_SWEEP_S = 1.0
"""Pause between two searches for stuck processes."""

Find = Callable[[Sequence[Session]], dict[str, list[int]]]
"""Returns the live processes of sessions, keyed by mark: `procfs.find_members`, or a fake in
tests."""


class ForkServer:
    """Serves a Unix socket until the lifeline closes."""

    def __init__(
        self, listener: socket.socket, lifeline: int, directory: Path, find: Find = find_members
    ) -> None:
        """directory: the folder for records of sessions."""
        self._listener = listener
        self._lifeline = lifeline
        self._directory = directory
        self._find = find
        self._pid_namespace, self._boot_id = pid_namespace(), boot_id()
        self._started = int(stat_fields(os.getpid())[19])
        self._clients: list[Client] = []
        self._abandoned: list[Client] = []  # the client is gone, or knows that its process is stuck
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)

    def serve(self) -> None:
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        packing, is_packed = linux.pack(), False  # done while there are no requests
        while True:
            watched: list[Any] = [self._listener, self._lifeline, self._wake_read]
            connections = [client.connection for client in self._clients]
            reports = {c.reports: c for c in self._clients + self._abandoned if c.reports >= 0}
            waited_for = [*watched, *connections, *reports]
            pause_s = self._pause_s() if is_packed else 0.0
            ready, _, _ = select.select(waited_for, [], [], pause_s)
            if not ready and not is_packed:
                is_packed = next(packing, True)
            if self._lifeline in ready and not os.read(self._lifeline, 4096):
                return self._end_everything()
            if self._wake_read in ready:
                os.read(self._wake_read, 4096)
            for fd, client in reports.items():
                if fd in ready:
                    self._read_reports(client)
            for client in list(self._clients):
                if client.connection in ready:
                    self._receive(client)
            if self._listener in ready:
                self._accept()
            self._reap()

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        if is_own_unix(connection):
            self._clients.append(Client(connection))
        else:
            sys.stderr.write("refused a connection from another user\n")
            connection.close()

    def _pause_s(self) -> float | None:
        """Return the maximum number of seconds to wait for an event. If no session is being ended,
        there is no limit, and the result is None."""
        ending = [c for c in self._clients + self._abandoned if c.ending_since is not None]
        if not ending:
            return None
        return STUCK_SWEEP_S if all(client.left for client in ending) else SWEEP_S

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
                # An invalid request, or a fork that fails for lack of memory, must not terminate
                # existing processes.
                sys.stderr.write(f"refused a request: {error!r}\n")
                return self._lost(client)
        return None

    def _handle(self, client: Client, message: dict[str, Any]) -> None:
        if "signal" in message and "op" not in message:
            if client.pid and client.exit_code is None:
                self._signal(client, message["signal"])
        elif message["op"] == "list":
            client.send(
                {"tasks": [c.described() for c in self._clients + self._abandoned if c.pid]}
            )
        elif message["op"] in ("signal", "dump"):
            ranks = [c for c in self._clients if c.exit_code is None and c.stands_at(message)]
            # Use the newest process, because earlier processes of the rank may still exist.
            pids = self._deliver(message, ranks[-1]) if ranks else []
            client.send({"pids": pids})
        else:
            client.request = message
            self._fork(client)

    def _deliver(self, message: dict[str, Any], rank: Client) -> list[int]:
        """Send a signal, or make the rank print its stack traces. Returns the pids that were sent a
        signal."""
        if message["op"] == "signal":
            return self._signal(rank, message["signal"])
        if not handles(rank.pid, DUMP_SIGNAL):
            return []
        # If a process is suspended, the kernel may deliver its signals to any of its threads.
        signal_main_thread(rank.pid, DUMP_SIGNAL)
        if is_stopped(rank.pid):
            send_signal([rank.pid], signal.SIGCONT)
        return [rank.pid]

    def _signal(self, client: Client, number: int) -> list[int]:
        pids = self._members([client])[client.pid]
        send_signal(pids, number)
        if number == signal.SIGKILL:
            client.begin_end()
        return pids

    def _members(self, clients: Sequence[Client]) -> dict[int, list[int]]:
        """Return the pids of each client's live processes, keyed by the pid of the process that
        was forked for the client."""
        found = self._find([client.session for client in clients if client.session])
        members = {}
        for client in clients:
            if client.session:
                # Kill the init process last, so that the other processes aren't assigned another
                # parent.
                left = set(found[client.session.mark]) - {client.init_pid}
                if client.exit_code is None:
                    left.add(client.pid)  # it may be too new to be found by its session
                members[client.pid] = sorted(left)
        return members

    def _fork(self, client: Client) -> None:
        if client.pid or not client.fds:
            raise ValueError(
                "a connection can start only one process, and must send a pipe for the output of "
                "the process"
            )
        mark, own = new_mark(), os.getpid()
        client.memory_kills_before = num_memory_kills()
        client.reports, write_end = os.pipe()
        os.set_blocking(client.reports, False)
        client.init_pid = os.fork()
        if client.init_pid == 0:
            rank_init.run(client.request, client.fds, mark, own, write_end)
        for fd in (write_end, *client.fds):
            os.close(fd)
        client.fds.clear()
        client.session = Session(
            client.init_pid, int(stat_fields(client.init_pid)[19]), mark, closed=True
        )

    def _read_reports(self, client: Client) -> None:
        """Read the reports of an init process: the pid that it forked, and how that process
        ended."""
        with contextlib.suppress(BlockingIOError):
            while client.reports >= 0:
                if data := os.read(client.reports, 4096):
                    client.unread += data
                else:  # the forkserver is now the rank's parent, and the kernel reports its end
                    os.close(client.reports)
                    client.reports = -1
                    client.begin_end()
        *lines, client.unread = client.unread.split(b"\n")
        for line in lines:
            what, number = line.split()
            if what == b"pid":
                self._begun(client, int(number))
            else:
                client.end(int(number))

    def _begun(self, client: Client, pid: int) -> None:
        assert client.session is not None
        started = started_ticks(pid)
        client.session = Session(
            pid, client.session.started if started is None else started, client.session.mark
        )
        self._save_record(client, client.session)
        client.send({"pid": pid})

    def _record(self, client: Client, session: Session) -> session_records.SessionRecord:
        described = client.described()
        task = client.request.get("task", {})
        resources = task.get("spec", {}).get("resources", {})
        return session_records.SessionRecord(
            place=self._pid_namespace,
            boot_id=self._boot_id,
            server_pid=os.getpid(),
            server_started=self._started,
            pid=session.pid,
            started=session.started,
            mark=session.mark,
            job_id=described["job_id"],
            attempt=described["attempt"],
            rank=described["rank"],
            gpus=task.get("env", {}).get("CUDA_VISIBLE_DEVICES", ""),
            shares_gpus=resources.get("share_gpus", False),
        )

    def _save_record(self, client: Client, session: Session) -> None:
        try:
            session_records.write_session(self._directory, self._record(client, session))
        except OSError as error:
            # The rank can train without the record, which is only needed if the forkserver dies.
            sys.stderr.write(f"could not save the record of a session: {error!r}\n")

    def _lost(self, client: Client) -> None:
        """End the session of a client that has disconnected."""
        self._clients.remove(client)
        client.connection.close()
        for fd in client.fds:
            os.close(fd)
        if client.pid:
            self._abandoned.append(client)
            self._signal(client, signal.SIGKILL)

    def _reap(self) -> None:
        """Collect dead processes, kill the other processes of their sessions, and report empty
        sessions."""
        self._collect_exit_codes()
        for client in self._clients + self._abandoned:
            if client.pid and client.exit_code is None and started_ticks(client.pid) is None:
                client.begin_end()  # its init process is about to report the end, or is suspended
        ending = [c for c in self._clients + self._abandoned if c.ending_since is not None]
        left = self._members(ending)
        for client in ending:
            if left[client.pid]:
                self._press(client, left[client.pid])
            elif client.exit_code is not None:
                self._gone(client)

    def _press(self, client: Client, left: list[int]) -> None:
        """Kill the remaining processes of a client's session. If the processes don't disappear in
        time, notify the client."""
        send_signal(left, signal.SIGKILL)
        session, since = client.session, client.ending_since
        assert session is not None
        assert since is not None
        if client.exit_code is None and time.monotonic() - since > SILENT_S:
            self._end_init(client)
        if client.exit_code is not None and not any(_session_of(p) == session.pid for p in left):
            client.session = replace(session, closed=True)
        if client.left or time.monotonic() - since < STUCK_S:
            return
        client.left = left
        sys.stderr.write(f"processes that still exist {STUCK_S:g} s after SIGKILL: {left}\n")
        self._dismiss(client)
        self._abandoned.append(client)

    def _gone(self, client: Client) -> None:
        self._end_init(client)
        self._dismiss(client)
        self._remove_record(client)

    def _end_init(self, client: Client) -> None:
        """End an init process that is done or suspended. Its children become children of the
        forkserver."""
        if client.init_pid:
            send_signal([client.init_pid], signal.SIGKILL)

    def _remove_record(self, client: Client) -> None:
        """Remove a session's record. If the rank has a GPU, the node agent removes the record
        instead, once it finds that the GPU's memory is free."""
        assert client.session is not None
        record = self._record(client, client.session)
        if not record.gpus:
            session_records.remove_session(self._directory, record)

    def _dismiss(self, client: Client) -> None:
        """Send a client its final response: how its process ended, and which processes remain."""
        for group in (self._clients, self._abandoned):
            if client in group:
                group.remove(client)
        last_answer = {"exit": client.exit_code, "left": client.left}
        client.send(last_answer | {"memory_kills": client.memory_kills})
        client.connection.close()
        if client.reports >= 0 and not client.left:
            os.close(client.reports)
            client.reports = -1

    def _collect_exit_codes(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            for client in self._clients + self._abandoned:
                self._read_reports(client)  # first, because the pid may not be known yet
                if client.init_pid == pid:
                    client.init_pid = 0
                if client.pid == pid and client.exit_code is None:
                    client.end(os.waitstatus_to_exitcode(status))

    def _end_everything(self) -> None:
        forked = [client for client in self._clients + self._abandoned if client.pid]
        for client in forked:
            self._end_init(client)  # the rank dies with it, and becomes this process's child
        deadline = time.monotonic() + STUCK_S
        while left := [pid for pids in self._members(forked).values() for pid in pids]:
            send_signal(left, signal.SIGKILL)
            if time.monotonic() > deadline:
                return  # the records stay for the next forkserver
            time.sleep(SWEEP_S)
            self._collect_exit_codes()
        for client in forked:
            self._remove_record(client)


def _session_of(pid: int) -> int:
    fields = stat_fields(pid)
    return int(fields[3]) if fields else 0


def main(path: str, find: Find = find_members) -> None:
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    from ray_workers.training import preload

    preload.preload()
    names = [Path(task.path, "comm").read_text().strip() for task in os.scandir("/proc/self/task")]
    if len(names) != 1:
        # Some libraries, such as allocators, start their own threads. Most of these libraries work
        # after a fork.
        print(  # noqa: T201
            f"threads are running after the preload, but a fork copies only one of them: {names}",
            flush=True,
        )
    with contextlib.suppress(OSError):  # the disk is full
        preloaded_path(path).write_text("\n".join(sorted({n.split(".")[0] for n in sys.modules})))
    gc.collect()
    gc.freeze()
    # Give the socket its final name only once it is listening, because clients connect as soon as
    # the name exists.
    unready = Path(f"{path}.new")
    unready.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(unready))
    unready.chmod(0o600)
    listener.listen(1024)
    unready.rename(path)
    directory = session_records.sessions_dir(Path(path).parent)
    ForkServer(listener, sys.stdin.fileno(), directory, find).serve()


if __name__ == "__main__":
    main(sys.argv[1])
