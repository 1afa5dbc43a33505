"""The gateway: the Ray driver in a child process, and the port `Cluster` in front of it.

A Ray driver exits with its process when Ray's GCS is lost, so it must not be the service's own.
Parent and child speak over a socket pair in pickled messages, each behind its length; they are
one program, so pickle crosses no boundary of trust. When the child dies every open call fails
with ClusterUnavailable, and a new child is started, with growing pauses.

    parent -> child   (call number, method, arguments)
    child -> parent   (call number, True, answer) or (call number, False, sentence)
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import pickle
import signal
import socket
import struct
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ray_workers.contracts import AttemptSpec, Drill, Grant, PollReply
from service.cluster.embedded import Daemon, EmbeddedRay
from service.cluster.port import AttemptRef, ClusterSnapshot, ClusterUnavailable

if TYPE_CHECKING:
    from service.cluster.ray_side import GatewayConfig

logger = logging.getLogger(__name__)

CODE_ROOT = Path(__file__).resolve().parents[2]
RESTART_PAUSES_S = (0.1, 0.5, 1.0, 2.0, 5.0, 10.0)
CALL_TIMEOUT_S = 30.0
"""Longest wait for an answer, on top of what the call itself may wait."""
CHILD_CALL_LIMIT_S = 60.0
"""When the child gives up a call; the parent has long since."""
_LENGTH = struct.Struct("!I")


@dataclass(frozen=True)
class RayTarget:
    """Which Ray to use: the embedded one, or a cluster by address."""

    deployment_id: str
    storage_url: str
    storage_nonce: str
    embedded: EmbeddedRay | None
    address: str = ""
    token_file: Path | None = None


class GatewayCluster:
    """The port `Cluster` by a child process that holds the Ray driver."""

    def __init__(self, target: RayTarget) -> None:
        self._target = target
        self._numbers = itertools.count()
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._writer: asyncio.StreamWriter | None = None
        self._child: asyncio.subprocess.Process | None = None
        self._keeper: asyncio.Task[None] | None = None
        self._problem = "the Ray driver is starting"

    async def start(self) -> None:
        self._keeper = asyncio.create_task(self._keep_running())

    async def stop(self) -> None:
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.wait({self._keeper})
        await self._end_child()
        if self._target.embedded is not None:
            await asyncio.to_thread(self._target.embedded.stop)

    @property
    def pid(self) -> int | None:
        """Of the child, while there is one."""
        return self._child.pid if self._child is not None else None

    async def snapshot(self) -> ClusterSnapshot:
        answer: ClusterSnapshot = await self._call("snapshot")
        return answer

    async def launch(self, spec: AttemptSpec) -> None:
        await self._call("launch", spec)

    async def poll(
        self, ref: AttemptRef, cursor: Mapping[str, int], wait_s: float, max_bytes: int
    ) -> PollReply:
        answer: PollReply = await self._call(
            "poll", ref, dict(cursor), wait_s, max_bytes, waits_s=wait_s
        )
        return answer

    async def give_up(self, ref: AttemptRef) -> None:
        await self._call("give_up", ref)

    async def stop_attempt(self, ref: AttemptRef) -> None:
        await self._call("stop_attempt", ref)

    async def preempt(self, ref: AttemptRef, grace_s: float) -> None:
        await self._call("preempt", ref, grace_s)

    async def drill(self, ref: AttemptRef, drill: Drill) -> None:
        await self._call("drill", ref, drill)

    async def grow(self, ref: AttemptRef, grant: Grant) -> None:
        await self._call("grow", ref, grant)

    async def acknowledge(self, ref: AttemptRef) -> None:
        await self._call("acknowledge", ref)

    async def attempts(self) -> list[AttemptRef]:
        answer: list[AttemptRef] = await self._call("attempts")
        return answer

    async def _call(self, method: str, *arguments: Any, waits_s: float = 0.0) -> Any:
        if self._writer is None:
            raise ClusterUnavailable(self._problem)
        number = next(self._numbers)
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._calls[number] = answer
        try:
            _send(self._writer, (number, method, arguments))
            return await asyncio.wait_for(answer, CALL_TIMEOUT_S + waits_s)
        except TimeoutError:
            raise ClusterUnavailable(f"Ray did not answer {method} in time") from None
        except OSError as error:
            raise ClusterUnavailable(f"the Ray driver is gone: {error}") from None
        finally:
            self._calls.pop(number, None)

    async def _keep_running(self) -> None:
        pauses = iter(RESTART_PAUSES_S)
        while True:
            try:
                reader = await self._start_child()
                pauses = iter(RESTART_PAUSES_S)
                await self._read_answers(reader)
                self._problem = "the Ray driver ended and is being started again"
            except Exception as error:
                self._problem = f"Ray can't be reached: {error}"
            logger.warning("%s", self._problem)
            await self._end_child()
            await asyncio.sleep(next(pauses, RESTART_PAUSES_S[-1]))

    async def _start_child(self) -> asyncio.StreamReader:
        """Start embedded Ray where it is ours, then the driver; returns when it is connected."""
        target, daemon = self._target, None
        if target.embedded is not None:
            daemon = await asyncio.to_thread(target.embedded.ensure)
        ours, theirs = socket.socketpair()
        with theirs:
            self._child = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "service.cluster.gateway", str(theirs.fileno())),
                pass_fds=[theirs.fileno()],
                env=self._child_environment(),
                start_new_session=True,
            )
        reader, writer = await asyncio.open_unix_connection(sock=ours)
        _send(writer, self._config(daemon))
        ready, problem = await _receive(reader)
        if not ready:
            writer.close()
            raise ClusterUnavailable(problem)
        self._writer = writer
        return reader

    def _config(self, daemon: Daemon | None) -> dict[str, Any]:
        """Fields of GatewayConfig; the class itself needs ray, which this process is free of."""
        target = self._target
        return {
            "deployment_id": target.deployment_id,
            "address": daemon.address if daemon else target.address,
            "dashboard_url": daemon.dashboard_url if daemon else None,
            "shared": daemon is None,
            "storage_url": target.storage_url,
            "storage_nonce": target.storage_nonce,
        }

    def _child_environment(self) -> dict[str, str]:
        environment = {**os.environ, "PYTHONPATH": str(CODE_ROOT)}
        if self._target.embedded is not None:
            environment |= self._target.embedded.environment()
        elif self._target.token_file is not None:
            environment["RAY_AUTH_MODE"] = "token"
            environment["RAY_AUTH_TOKEN_PATH"] = str(self._target.token_file)
        return environment

    async def _read_answers(self, reader: asyncio.StreamReader) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, OSError):
            while True:
                number, succeeded, answer = await _receive(reader)
                waiting = self._calls.get(number)
                if waiting is None or waiting.done():
                    continue
                if succeeded:
                    waiting.set_result(answer)
                else:
                    waiting.set_exception(ClusterUnavailable(answer))

    async def _end_child(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        for waiting in self._calls.values():
            if not waiting.done():
                waiting.set_exception(ClusterUnavailable(self._problem))
        if self._child is not None:
            # Not Process.kill(): that may reap the child itself, behind asyncio's back.
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._child.pid, signal.SIGKILL)
            await self._child.wait()
            self._child = None


def _send(writer: asyncio.StreamWriter, message: object) -> None:
    data = pickle.dumps(message)
    writer.write(_LENGTH.pack(len(data)) + data)


async def _receive(reader: asyncio.StreamReader) -> Any:
    (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
    return pickle.loads(await reader.readexactly(length))


async def _serve(fd: int) -> None:
    """The child's side: connect to Ray, then answer calls until the parent is gone."""
    from service.cluster import ray_side

    reader, writer = await asyncio.open_unix_connection(sock=socket.socket(fileno=fd))
    config: GatewayConfig = ray_side.GatewayConfig(**await _receive(reader))
    cluster = ray_side.RayCluster(config)
    try:
        await cluster.start()
    except Exception as error:
        _send(writer, (False, str(ray_side.as_unavailable(error))))
        await writer.drain()
        return
    _send(writer, (True, ""))

    async def answer(number: int, method: str, arguments: tuple[Any, ...]) -> None:
        try:
            async with asyncio.timeout(CHILD_CALL_LIMIT_S):
                reply = (number, True, await getattr(cluster, method)(*arguments))
        except Exception as error:
            reply = (number, False, str(ray_side.as_unavailable(error)))
        _send(writer, reply)

    running: set[asyncio.Task[None]] = set()
    with contextlib.suppress(asyncio.IncompleteReadError, OSError):
        while True:
            task = asyncio.create_task(answer(*await _receive(reader)))
            running.add(task)
            task.add_done_callback(running.discard)


if __name__ == "__main__":
    # Only the parent's end of the socket decides when to leave: not a Ctrl-C in its terminal.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    asyncio.run(_serve(int(sys.argv[1])))
    # Ray's own threads would otherwise be waited for; what matters lives elsewhere.
    os._exit(0)
