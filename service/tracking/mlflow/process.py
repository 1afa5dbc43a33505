"""Runs MLflow's client in a separate process, and calls it. All calls have a time limit."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

MLFLOW_CALLS = 4
"""Number of calls that the process makes concurrently."""
LINE_BYTES = 64 << 20
END_LIMIT_S = 5.0
"""Seconds to wait for a killed process to exit."""
DEFAULTS = {
    # The service limits the duration of calls and retries them itself, so the client should not
    # retry. The server may take a long time to store an upload after it has received the last byte.
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "3600",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
    # A redirected POST becomes a GET, whose response would be mistaken for MLflow's response to the
    # POST.
    "MLFLOW_ALLOW_HTTP_REDIRECTS": "false",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",  # the URL can contain a password
}
"""Default settings of MLflow's client. Variables in the service's environment override these
settings."""
_ENDED = "the process that calls MLflow has exited"
CODE_ROOT = Path(__file__).resolve().parents[3]


class MlflowAway(Exception):
    """MLflow, or the process that calls it, does not respond. The call can be repeated."""


class MlflowRefused(Exception):
    """MLflow refused a call."""


class MlflowProcess:
    """Starts the process at the first call, and restarts it after it has exited or been killed. If
    a call times out, the process is killed. All its pending calls then fail, and can be repeated.
    """

    def __init__(self, tracking_uri: str, storage_url: str) -> None:
        self._addresses = (tracking_uri, storage_url)
        self._child: _Child | None = None
        self._starting = asyncio.Lock()

    @property
    def pid(self) -> int | None:
        """The process's id; None if no process is running."""
        return None if self._child is None or self._child.is_over else self._child.process.pid

    async def call(self, method: str, *arguments: Any, limit_s: float) -> Any:
        """Call a method of `client.Runs`. Raises MlflowAway or MlflowRefused."""
        async with self._starting:
            if self._child is None or self._child.is_over:
                self._child = _Child(await _start())
                self._child.write(self._addresses)
            child = self._child
        try:
            async with asyncio.timeout(limit_s):
                return await child.call(method, arguments)
        except TimeoutError:
            child.end()
            raise MlflowAway(f"MLflow did not respond within {limit_s:.0f} s") from None
        except OSError:
            raise MlflowAway(_ENDED) from None

    async def stop(self) -> None:
        """Kill the process; a later call starts another one."""
        if self._child is not None:
            self._child.end()
            # A process that is blocked on an unreachable file server can't be killed.
            await asyncio.wait({self._child.reading}, timeout=END_LIMIT_S)


class _Child:
    """A process and its pending calls."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.is_over = False
        self.reading = asyncio.create_task(self._read())
        self._numbers = itertools.count()
        self._calls: dict[int, asyncio.Future[Any]] = {}

    async def call(self, method: str, arguments: Sequence[Any]) -> Any:
        number = next(self._numbers)
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._calls[number] = answer
        try:
            self.write([number, method, arguments])
            assert self.process.stdin is not None
            await self.process.stdin.drain()
            return await answer
        finally:
            self._calls.pop(number, None)

    def write(self, line: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(line).encode() + b"\n")

    async def _read(self) -> None:
        assert self.process.stdout is not None
        try:
            async for line in self.process.stdout:
                number, outcome, answer = json.loads(line)
                waiting = self._calls.get(number)
                if waiting is None or waiting.done():
                    continue
                if outcome == "ok":
                    waiting.set_result(answer)
                else:
                    kind = MlflowRefused if outcome == "refused" else MlflowAway
                    waiting.set_exception(kind(answer))
        finally:
            self.end()
            await self.process.wait()

    def end(self) -> None:
        """Kill the process, and fail its calls."""
        self.is_over = True
        # Don't use Process.kill(), which might reap the child before asyncio does.
        if self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.process.pid, signal.SIGKILL)
        for waiting in self._calls.values():
            if not waiting.done():
                waiting.set_exception(MlflowAway(_ENDED))


async def _start() -> asyncio.subprocess.Process:
    environment = {**DEFAULTS, **os.environ}
    code_path = [str(CODE_ROOT), *filter(None, [environment.get("PYTHONPATH")])]
    environment["PYTHONPATH"] = os.pathsep.join(code_path)
    environment.pop("DRAY_DATABASE_URL", None)
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "service.tracking.mlflow.client"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        limit=LINE_BYTES,
        env=environment,
        start_new_session=True,
    )
