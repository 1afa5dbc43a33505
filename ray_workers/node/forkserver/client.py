"""The client of a node's forkserver: starts a process and waits for its end."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import time
from typing import Any

from ray_workers.shared.peers.peer_credentials import is_own_unix

FORK_TIMEOUT_S = 120.0
"""Longest wait for the forkserver to answer; its first answer comes after its preload."""

RESTART_LIMIT_S = 120.0
"""How long a forkserver that is gone may take to be replaced: its node agent starts the next, and
Ray a new agent. An attempt that did not wait would be charged for it, and so would the next. The
start of a group waits less long on a machine that is not overloaded."""
RETRY_S = 0.02


class ForkFailed(RuntimeError):
    """The forkserver is not there, or ended before it answered."""


class ForkedProcess:
    """A process that the forkserver started for us; it dies when this object's socket closes."""

    def __init__(
        self,
        pid: int,
        output: int,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        self.pid = pid
        self.output = output
        """Read end of the pipe that is the process's stdout and stderr."""
        self.left: list[int] = []
        """Once it has ended: pids of what can't be ended."""
        self.memory_kills = 0
        """Once it has ended: processes of its node that the kernel ended meanwhile, for want of
        memory."""
        self._reader = reader
        self._writer = writer

    @classmethod
    async def start(
        cls, socket_path: str, request: dict[str, Any], given: int | None = None
    ) -> ForkedProcess:
        """given: a descriptor that the process gets besides; the request's `given` is its meaning
        (`ray_workers.node.forkserver.forked_child.Given`). The forkserver never reads it."""
        try:
            connection = await _connect(socket_path)
        except OSError as error:
            raise ForkFailed(f"no answer from the forkserver at {socket_path}: {error}") from error
        read_end, write_end = os.pipe()
        writer: asyncio.StreamWriter | None = None
        try:
            line = json.dumps(request).encode() + b"\n"
            sent = socket.send_fds(
                connection, [line], [write_end, *([] if given is None else [given])]
            )
            if sent < len(line):  # the forkserver may have closed a connection that is all sent
                connection.sendall(line[sent:])
            connection.setblocking(False)
            reader, writer = await asyncio.open_unix_connection(sock=connection)
            async with asyncio.timeout(FORK_TIMEOUT_S):
                answer = await reader.readline()
            if not answer:
                raise ForkFailed("the forkserver closed the connection without an answer")
            reply = json.loads(answer)
            if "pid" not in reply:
                raise ForkFailed("the process ended before it began")
            return cls(reply["pid"], read_end, reader, writer)
        except BaseException as error:
            # Also on cancellation: a process that was forked lives as long as the connection.
            os.close(read_end)
            if writer is not None:
                writer.close()
            connection.close()
            if not isinstance(error, OSError | TimeoutError | ForkFailed):
                raise
            raise ForkFailed(f"no answer from the forkserver at {socket_path}: {error}") from error
        finally:
            os.close(write_end)

    async def wait(self) -> int | None:
        """Exit code once the process and its session are seen gone (negative: the signal).

        None if the forkserver itself ended, which takes the process along, or if the process
        survives SIGKILL. Pids of processes that are not gone in time are in `left`.
        """
        line = await self._reader.readline()
        if not line:
            return None
        last_word = json.loads(line)
        self.left, self.memory_kills = last_word["left"], last_word["memory_kills"]
        code: int | None = last_word["exit"]
        return code

    def signal(self, number: int) -> None:
        """Send a signal to every process of the session."""
        self._writer.write(json.dumps({"signal": number}).encode() + b"\n")

    def abandon(self) -> None:
        """Close this end of the connection: the forkserver kills the session."""
        self._writer.close()


async def _connect(socket_path: str) -> socket.socket:
    """A connection to the forkserver, or to the one that replaces it."""
    deadline = time.monotonic() + RESTART_LIMIT_S
    while True:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.connect(socket_path)
            if not is_own_unix(connection):
                raise PermissionError("another user listens there")
        except OSError as error:
            connection.close()
            is_gone = isinstance(error, FileNotFoundError | ConnectionRefusedError)
            if not is_gone or time.monotonic() > deadline:
                raise
        else:
            return connection
        await asyncio.sleep(RETRY_S)


async def list_tasks(socket_path: str) -> list[dict[str, Any]]:
    """The processes of the forkserver at `socket_path`: job_id, attempt, rank, incarnation and pid
    of each, and `left`, the pids of those that can't be ended."""
    tasks: list[dict[str, Any]] = (await _ask(socket_path, {"op": "list"}))["tasks"]
    return tasks


async def send_to_rank(
    socket_path: str, job_id: str, attempt: int, rank: int, number: int
) -> list[int]:
    """Send a signal to every process of a rank's newest incarnation; answer their pids."""
    return await _ask_rank(socket_path, "signal", job_id, attempt, rank, signal=number)


async def ask_dump(socket_path: str, job_id: str, attempt: int, rank: int) -> list[int]:
    """Make a rank write its stacks; empty if it has no handler for that, or does not run."""
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
                raise ForkFailed("another user listens there")
            writer.write(json.dumps(request).encode() + b"\n")
            async with asyncio.timeout(FORK_TIMEOUT_S):
                line = await reader.readline()
        finally:
            writer.close()
        if not line:
            raise ForkFailed("it closed the connection without an answer")
    except (OSError, TimeoutError, ForkFailed) as error:
        raise ForkFailed(f"no forkserver at {socket_path}: {error}") from error
    answer: dict[str, Any] = json.loads(line)
    return answer
