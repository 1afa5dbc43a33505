"""The forkserver's record of a client, and of the process that was forked for the client."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from dataclasses import dataclass, field
from typing import Any

from ray_workers.shared.processes.procfs import Session, num_memory_kills


@dataclass
class Client:
    """A connection and, after a fork has been requested, the forked process."""

    connection: socket.socket
    buffer: bytes = b""
    fds: list[int] = field(default_factory=list)
    request: dict[str, Any] = field(default_factory=dict)
    session: Session | None = None
    """The session of the forked process. Until the pid of the forked process is known, this is the
    session of the init process that reports the pid (`ray_workers.node.forkserver.rank_init`)."""
    init_pid: int = 0
    """Pid of the init process, or 0 once it is gone."""
    reports: int = -1
    """Read end of the init process's pipe, or -1 once that process has closed it."""
    unread: bytes = b""
    """The part of the init process's last line that has been received so far."""
    exit_code: int | None = None
    memory_kills_before: int = 0
    memory_kills: int = 0
    """Number of processes that the kernel killed for lack of memory between the fork and the end of
    the forked process."""
    ending_since: float | None = None
    """The `time.monotonic` time at which the process died or was sent SIGKILL."""
    left: list[int] = field(default_factory=list)
    """Pids of processes that did not exit in time. The client has been notified."""

    @property
    def pid(self) -> int:
        return self.session.pid if self.session else 0

    def end(self, exit_code: int) -> None:
        self.exit_code = exit_code
        self.memory_kills = num_memory_kills() - self.memory_kills_before
        self.begin_end()

    def begin_end(self) -> None:
        if self.ending_since is None:
            self.ending_since = time.monotonic()

    def stands_at(self, message: dict[str, Any]) -> bool:
        """Return whether the process was forked for the rank that a request names."""
        described = self.described()
        names = ("job_id", "attempt", "rank")
        return bool(self.pid) and all(described[name] == message[name] for name in names)

    def described(self) -> dict[str, Any]:
        """Return the process's entry for the list of all processes."""
        task = self.request.get("task", {})
        return {
            "job_id": task.get("job_id", ""),
            "attempt": task.get("attempt", 0),
            "rank": task.get("rank", -1),
            "incarnation": task.get("incarnation", 0),
            "pid": self.pid,
            "left": self.left,
        }

    def send(self, message: dict[str, Any]) -> None:
        # A client that has closed its end doesn't need a response.
        with contextlib.suppress(OSError):
            self.connection.sendall(json.dumps(message).encode() + b"\n")
