"""The gateway: the Ray driver in a child process, and the port `Cluster` in front of it.

A Ray driver exits when Ray's GCS is lost, so it must not run in the service's process. Parent and
child exchange length-prefixed pickled messages over a socket pair. Pickle is safe because both
processes run the same program. When the child dies, every open call fails with ClusterUnavailable,
and a new child is started, with increasing pauses.

    parent -> child   (call number, method, arguments)
    child -> parent   (call number, True, answer) or (call number, False, message)
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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ray_workers.shared.commands import Command
from ray_workers.shared.contracts import AttemptSpec, PollReply
from ray_workers.shared.node_needs import NodeEnvironment, NodeNeeds
from ray_workers.shared.processes.silence import Silence, SilenceLimits
from ray_workers.shared.self_tests import NodeTest
from service.cluster.port import AttemptRef, ClusterSnapshot, ClusterUnavailable
from service.cluster.ray.embedded import CODE_ROOT, Daemon, EmbeddedRay
from service.config import logging_setup

if TYPE_CHECKING:
    from service.cluster.ray.node_agents import GatewayConfig

logger = logging.getLogger(__name__)

RESTART_PAUSES_S = (0.1, 0.5, 1.0, 2.0, 5.0, 10.0)
CALL_TIMEOUT_S = 30.0
"""Time limit for a response in seconds, in addition to the call's own waiting time."""
CHILD_CALL_LIMIT_S = 60.0
"""Time in seconds after which the child abandons a call. The parent stops waiting before this
time."""
PING_S = 2.0
"""Time limit in seconds for the driver's response to a ping, and pause before the next ping."""
DRIVER, RAY, JOIN = "driver", "ray", "join"
"""Keys for the three periods of silence that the parent measures: of the child, of Ray, and of Ray
while the child is still connecting."""
_LENGTH = struct.Struct("!I")


@dataclass(frozen=True)
class RayTarget:
    """The Ray instance to use: the embedded Ray, or the cluster at an address."""

    deployment_id: str
    storage_url: str
    storage_nonce: str
    embedded: EmbeddedRay | None
    silence_limit_s: float
    """`ray_workers.shared.processes.silence.SilenceLimits.replace_s`."""
    log_format: logging_setup.LogFormat
    """Format of the child's log. The log is written to the service's stderr."""
    address: str = ""
    token_file: Path | None = None


class GatewayCluster:
    """Implements the `Cluster` port with a child process that runs the Ray driver."""

    def __init__(self, target: RayTarget) -> None:
        self._target = target
        self._numbers = itertools.count()
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._writer: asyncio.StreamWriter | None = None
        self._child: asyncio.subprocess.Process | None = None
        self._running: asyncio.Task[None] | None = None
        self._problem = "the Ray driver is starting"
        self._limits = SilenceLimits(target.silence_limit_s)
        self._silence = Silence()

    async def start(self) -> None:
        self._running = asyncio.create_task(self._keep_running())

    async def stop(self) -> None:
        if self._running is not None:
            self._running.cancel()
            await asyncio.wait({self._running})
        await self._end_child()
        if self._target.embedded is not None:
            await asyncio.to_thread(self._target.embedded.stop)

    @property
    def pid(self) -> int | None:
        """The process id of the child; None while the child is not running."""
        return self._child.pid if self._child is not None else None

    async def snapshot(self) -> ClusterSnapshot:
        if self._writer is not None:
            self._silence.asked(RAY)
        answer: ClusterSnapshot = await self._call("snapshot")
        # Ray considers a node dead if its raylet is suspended, and an embedded Ray has only one
        # node.
        if not answer.nodes and self._target.embedded is not None:
            raise ClusterUnavailable("the raylet of the embedded Ray does not respond")
        self._silence.answered(RAY)
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

    async def send(self, ref: AttemptRef, command: Command) -> None:
        await self._call("send", ref, command)

    async def acknowledge(self, ref: AttemptRef) -> None:
        await self._call("acknowledge", ref)

    async def attempts(self) -> list[AttemptRef]:
        answer: list[AttemptRef] = await self._call("attempts")
        return answer

    async def request_nodes(
        self, bundles: Sequence[tuple[Mapping[str, float], int]], released: Sequence[str]
    ) -> None:
        asked = [(dict(bundle), number) for bundle, number in bundles]
        await self._call("request_nodes", asked, list(released))

    async def prepare(self, node_id: str, needs: NodeNeeds) -> NodeEnvironment:
        answer: NodeEnvironment = await self._call("prepare", node_id, needs)
        return answer

    async def forget(self, node_id: str, needs: NodeNeeds) -> None:
        await self._call("forget", node_id, needs)

    async def check(self, node_id: str, check_id: str, num_held: int) -> NodeTest:
        answer: NodeTest = await self._call("check", node_id, check_id, num_held)
        return answer

    async def kept_jobs(self) -> list[str]:
        answer: list[str] = await self._call("kept_jobs")
        return answer

    async def drop_jobs(self, job_ids: Sequence[str]) -> None:
        await self._call("drop_jobs", list(job_ids))

    async def _call(
        self, method: str, *arguments: Any, waits_s: float = 0.0, limit_s: float = CALL_TIMEOUT_S
    ) -> Any:
        if self._writer is None:
            raise ClusterUnavailable(self._problem)
        number = next(self._numbers)
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._calls[number] = answer
        try:
            _send(self._writer, (number, method, arguments))
            # Don't use `wait_for`, which would lose a cancellation that arrives at the same time as
            # the response.
            async with asyncio.timeout(limit_s + waits_s):
                return await answer
        except TimeoutError:
            raise ClusterUnavailable(f"Ray did not respond to {method} in time") from None
        except OSError as error:
            raise ClusterUnavailable(f"the Ray driver has exited: {error}") from None
        finally:
            self._calls.pop(number, None)

    async def _keep_running(self) -> None:
        pauses = iter(RESTART_PAUSES_S)
        while True:
            try:
                reader = await self._start_child()
                pauses = iter(RESTART_PAUSES_S)
                self._problem = await self._serve_calls(reader)
            except Exception as error:
                self._problem = f"Ray can't be reached: {error}"
            logger.warning("%s", self._problem)
            await self._end_child()
            await asyncio.sleep(next(pauses, RESTART_PAUSES_S[-1]))

    async def _serve_calls(self, reader: asyncio.StreamReader) -> str:
        """Serve until the child exits, or until the child or Ray has been silent for too long.
        Returns the reason."""
        answers = asyncio.ensure_future(self._read_answers(reader))
        silence = asyncio.ensure_future(self._until_silent())
        try:
            await asyncio.wait({answers, silence}, return_when=asyncio.FIRST_COMPLETED)
            if silence.done():
                return silence.result()
            return "the Ray driver exited and is being restarted"
        finally:
            answers.cancel()
            silence.cancel()

    async def _until_silent(self) -> str:
        while True:
            self._silence.asked(DRIVER)
            with contextlib.suppress(ClusterUnavailable):
                await self._call("ping", limit_s=PING_S)
                self._silence.answered(DRIVER)
            driver_s, ray_s = self._silence.seconds(DRIVER), self._silence.seconds(RAY)
            if driver_s > self._limits.gateway_s:
                return f"the Ray driver did not respond for {driver_s:.0f} s and is being restarted"
            if ray_s > self._limits.ray_s:
                return f"Ray did not respond for {ray_s:.0f} s"
            await asyncio.sleep(PING_S)

    async def _start_child(self) -> asyncio.StreamReader:
        """Start the embedded Ray, if it is used, and the driver. Returns when the driver is
        connected.

        If an embedded Ray has been silent for too long, or if no driver could connect to it for too
        long, it is ended first, because its processes might be suspended.
        """
        target, daemon = self._target, None
        if target.embedded is not None:
            if self._is_ray_given_up():
                logger.warning("the embedded Ray does not respond and is being restarted")
                await asyncio.to_thread(target.embedded.end)
                self._silence.answered(JOIN)
            daemon = await asyncio.to_thread(target.embedded.ensure)
        self._silence.answered(RAY)
        self._silence.asked(JOIN)
        ours, theirs = socket.socketpair()
        with theirs:
            self._child = await asyncio.create_subprocess_exec(
                *self._child_command(theirs.fileno()),
                pass_fds=[theirs.fileno()],
                env=self._child_environment(),
                start_new_session=True,
            )
        reader, writer = await asyncio.open_unix_connection(sock=ours)
        _send(writer, self._config(daemon))
        try:
            ready, problem = await self._receive_in_time(reader)
            if not ready:
                raise ClusterUnavailable(problem)
        except BaseException:
            writer.close()
            raise
        self._silence.answered(JOIN)
        self._writer = writer
        return reader

    async def _receive_in_time(self, reader: asyncio.StreamReader) -> tuple[bool, str]:
        """Return whether the child is connected and, if it is not, the problem."""
        self._silence.answered(DRIVER)
        self._silence.asked(DRIVER)
        receiving = asyncio.ensure_future(_receive(reader))
        try:
            while not receiving.done():
                await asyncio.wait({receiving}, timeout=PING_S)
                if self._silence.seconds(DRIVER) > self._limits.join_s:
                    raise ClusterUnavailable("the Ray driver did not connect in time")
        finally:
            receiving.cancel()
        self._silence.answered(DRIVER)
        answer: tuple[bool, str] = receiving.result()
        return answer

    def _is_ray_given_up(self) -> bool:
        asked, joining = self._silence.seconds(RAY), self._silence.seconds(JOIN)
        return asked > self._limits.ray_s or joining > self._limits.join_s

    def _config(self, daemon: Daemon | None) -> dict[str, Any]:
        """Return the fields of GatewayConfig as a dict, because the module that defines
        GatewayConfig imports ray, which this process must not import."""
        target = self._target
        return {
            "deployment_id": target.deployment_id,
            "address": daemon.address if daemon else target.address,
            "dashboard_url": daemon.dashboard_url if daemon else None,
            "shared": daemon is None,
            "storage_url": target.storage_url,
            "storage_nonce": target.storage_nonce,
            "silence_limit_s": target.silence_limit_s,
        }

    def _child_command(self, fd: int) -> list[str]:
        module = "service.cluster.ray.gateway"
        return [sys.executable, "-m", module, str(fd), self._target.log_format]

    def _child_environment(self) -> dict[str, str]:
        # Without RAY_COLOR_PREFIX=0, Ray adds colour codes to messages about its nodes.
        environment = {**os.environ, "PYTHONPATH": str(CODE_ROOT), "RAY_COLOR_PREFIX": "0"}
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
            # Don't use `Process.kill()`, which could reap the child before asyncio does.
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
    """Run the child: connect to Ray, and serve calls until the parent has exited."""
    from service.cluster.ray import driver, node_agents

    reader, writer = await asyncio.open_unix_connection(sock=socket.socket(fileno=fd))
    config: GatewayConfig = node_agents.GatewayConfig(**await _receive(reader))
    cluster = driver.RayCluster(config)
    try:
        await cluster.start()
    except Exception as error:
        _send(writer, (False, str(driver.as_unavailable(error))))
        await writer.drain()
        return
    _send(writer, (True, ""))

    async def answer(number: int, method: str, arguments: tuple[Any, ...]) -> None:
        try:
            async with asyncio.timeout(CHILD_CALL_LIMIT_S):
                reply = (number, True, await getattr(cluster, method)(*arguments))
        except Exception as error:
            reply = (number, False, str(driver.as_unavailable(error)))
        _send(writer, reply)

    running: set[asyncio.Task[None]] = set()
    with contextlib.suppress(asyncio.IncompleteReadError, OSError):
        while True:
            task = asyncio.create_task(answer(*await _receive(reader)))
            running.add(task)
            task.add_done_callback(running.discard)


if __name__ == "__main__":
    logging_setup.configure("json" if sys.argv[2] == "json" else "text")
    # The child exits when the parent closes the socket, not when Ctrl-C is pressed in its terminal.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    asyncio.run(_serve(int(sys.argv[1])))
    # Skip the normal exit, which would wait for Ray's threads.
    os._exit(0)
