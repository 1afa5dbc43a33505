"""The client of a node's forkserver. The client starts a process through the forkserver, and waits
until the process has ended."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import time
from typing import Any

from ray_workers.shared.peers.peer_credentials import is_own_unix

FORK_TIMEOUT_S = 120.0
"""Maximum number of seconds to wait for a response from the forkserver, which doesn't respond
before its preload is complete."""

RESTART_LIMIT_S = 120.0
"""Maximum number of seconds to wait for the replacement of a dead forkserver: its node agent starts
a new forkserver, or Ray starts a new agent. Without the wait, the failure would be charged to this
attempt and the next. When a group starts on a machine that isn't overloaded, the wait is
shorter."""
RETRY_S = 0.02


class ForkFailed(RuntimeError):
    """The forkserver doesn't exist, or ended before it responded."""


class ForkedProcess:
    """A process that the forkserver started for this client. The process is killed when the socket
    closes."""

    def __init__(
        self,
        pid: int,
        output: int,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        self.pid = pid
        self.output = output
        """Read end of the pipe for the process's stdout and stderr."""
        self.left: list[int] = []
        """The pids of processes that could not be ended; set once the process has ended."""
        self.memory_kills = 0
        """Number of processes on the node that the kernel killed for lack of memory while this
        process was running; set once this process has ended."""
        self._reader = reader
        self._writer = writer

    @classmethod
    async def start(
        cls, socket_path: str, request: dict[str, Any], given: int | None = None
    ) -> ForkedProcess:
        """Start a process. given: an additional descriptor for the process. The request's `given`
        field (`forked_child.Given`) states the purpose of the descriptor. The forkserver never
        reads from the descriptor."""
        try:
            connection = await _connect(socket_path)
        except OSError as error:
            raise ForkFailed(
                f"no response from the forkserver at {socket_path}: {error}"
            ) from error
        read_end, write_end = os.pipe()
        writer: asyncio.StreamWriter | None = None
        try:
            line = json.dumps(request).encode() + b"\n"
            sent = socket.send_fds(
                connection, [line], [write_end, *([] if given is None else [given])]
            )
            if sent < len(line):  # else the forkserver may have closed the connection already
                connection.sendall(line[sent:])
            connection.setblocking(False)
            reader, writer = await asyncio.open_unix_connection(sock=connection)
            async with asyncio.timeout(FORK_TIMEOUT_S):
                answer = await reader.readline()
            if not answer:
                raise ForkFailed("the forkserver closed the connection without a response")
            reply = json.loads(answer)
            if "pid" not in reply:
                raise ForkFailed("the forked process exited before it reported its pid")
            return cls(reply["pid"], read_end, reader, writer)
        except BaseException as error:
            # Also close the connection on cancellation, because a forked process runs until its
            # connection is closed.
            os.close(read_end)
            if writer is not None:
                writer.close()
            connection.close()
            if not isinstance(error, OSError | TimeoutError | ForkFailed):
                raise
            raise ForkFailed(
                f"no response from the forkserver at {socket_path}: {error}"
            ) from error
        finally:
            os.close(write_end)

    async def wait(self) -> int | None:
        """Return the exit code (negative: the signal), once the process and its session are gone.

        Returns None if the forkserver itself ended, which also ends the process, or if the process
        survives SIGKILL. After SIGKILL, `left` contains the pids of the processes that did not
        disappear in time.
        """
        line = await self._reader.readline()
        if not line:
            return None
        last_answer = json.loads(line)
        self.left, self.memory_kills = last_answer["left"], last_answer["memory_kills"]
        code: int | None = last_answer["exit"]
        return code

    def signal(self, number: int) -> None:
        """Send a signal to every process of the session."""
        self._writer.write(json.dumps({"signal": number}).encode() + b"\n")

    def abandon(self) -> None:
        """Close this end of the connection, which makes the forkserver kill the session."""
        self._writer.close()


async def _connect(socket_path: str) -> socket.socket:
    """Return a connection to the forkserver, or to its replacement."""
    deadline = time.monotonic() + RESTART_LIMIT_S
    while True:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.connect(socket_path)
            if not is_own_unix(connection):
                raise PermissionError("another user is listening there")
        except OSError as error:
            connection.close()
            is_gone = isinstance(error, FileNotFoundError | ConnectionRefusedError)
            if not is_gone or time.monotonic() > deadline:
                raise
        else:
            return connection
        await asyncio.sleep(RETRY_S)


async def list_tasks(socket_path: str) -> list[dict[str, Any]]:
    """Return the processes of the forkserver at `socket_path`: the job_id, attempt, rank,
    incarnation and pid of each, and `left`, the pids of processes that can't be ended."""
    tasks: list[dict[str, Any]] = (await _ask(socket_path, {"op": "list"}))["tasks"]
    return tasks


async def send_to_rank(
    socket_path: str, job_id: str, attempt: int, rank: int, number: int
) -> list[int]:
    """Send a signal to every process of a rank's latest incarnation. Returns their pids."""
    return await _ask_rank(socket_path, "signal", job_id, attempt, rank, signal=number)


async def ask_dump(socket_path: str, job_id: str, attempt: int, rank: int) -> list[int]:
    """Make a rank print its stack traces. Returns a list with the rank's pid, or an empty list if
    the rank has no handler for the signal or isn't running."""
    return await _ask_rank(socket_path, "dump", job_id, attempt, rank)


async def _ask_rank(
    socket_path: str, op: str, job_id: str, attempt: int, rank: int, **more: int
) -> list[int]:
    request = {"op": op, "job_id": job_id, "attempt": attempt, "rank": rank, **more}
    reached: list[int] = (await _ask(socket_path, request))["pids"]
    return reached


async def _ask(socket_path: str, request: dict[str, Any]) -> dict[str, Any]:
    try:
        reader, writer = await asyncio.open_unix_connection(socket_path)
        try:
            if not is_own_unix(writer.get_extra_info("socket")):
                raise ForkFailed("another user is listening there")
            writer.write(json.dumps(request).encode() + b"\n")
            async with asyncio.timeout(FORK_TIMEOUT_S):
                line = await reader.readline()
        finally:
            writer.close()
        if not line:
            raise ForkFailed("the server closed the connection without a response")
    except (OSError, TimeoutError, ForkFailed) as error:
        raise ForkFailed(f"no forkserver at {socket_path}: {error}") from error
    answer: dict[str, Any] = json.loads(line)
    return answer
