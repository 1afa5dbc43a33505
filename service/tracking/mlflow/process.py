"""The process with MLflow's client, as its parent sees it: calls that end in time, whatever
happens to the process."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

MLFLOW_CALLS = 4
"""Calls that the process makes at a time."""
LINE_BYTES = 64 << 20
CODE_ROOT = Path(__file__).resolve().parents[2]


class MlflowAway(Exception):
    """MLflow, or the process that calls it, does not answer: the call may be made again."""


class MlflowRefused(Exception):
    """MLflow does not take what it was given."""


class MlflowProcess:
    """Starts the process with the first call, and again after it died or was ended.

    A call that is not answered in time ends the process: its other calls fail too, and may all be
    made again.
    """

    def __init__(self, tracking_uri: str, storage_url: str) -> None:
        self._arguments = (tracking_uri, storage_url)
        self._numbers = itertools.count()
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._process: asyncio.subprocess.Process | None = None
        self._reading: asyncio.Task[None] | None = None
        self._starting = asyncio.Lock()

    @property
    def pid(self) -> int | None:
        """Of the process, while there is one."""
        return self._process.pid if self._process is not None else None

    async def call(self, method: str, *arguments: Any, limit_s: float) -> Any:
        """The answer of `client.Runs`. Raises MlflowAway or MlflowRefused."""
        async with self._starting:
            process = self._process or await self._start()
        assert process.stdin is not None
        number = next(self._numbers)
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._calls[number] = answer
        try:
            async with asyncio.timeout(limit_s):
                process.stdin.write(json.dumps([number, method, arguments]).encode() + b"\n")
                await process.stdin.drain()
                return await answer
        except TimeoutError:
            if self._process is process:
                await self.stop()
            raise MlflowAway(f"MLflow did not answer within {limit_s:.0f} s") from None
        except OSError:
            raise MlflowAway("the process that calls MLflow ended") from None
        finally:
            self._calls.pop(number, None)

    async def _start(self) -> asyncio.subprocess.Process:
        environment = {
            # Its own patience would only hold up the answer: the calls are repeated here.
            "MLFLOW_HTTP_REQUEST_TIMEOUT": "30",
            "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
            **os.environ,
        }
        code_path = [str(CODE_ROOT), *filter(None, [environment.get("PYTHONPATH")])]
        environment["PYTHONPATH"] = os.pathsep.join(code_path)
        environment.pop("DRAY_DATABASE_URL", None)
        self._process = process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "service.tracking.mlflow.client", *self._arguments),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=LINE_BYTES,
            env=environment,
            start_new_session=True,
        )
        self._reading = asyncio.create_task(self._read(process))
        return process

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        try:
            async for line in process.stdout:
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
            if self._process is process:
                self._process = None
            self._fail_calls()
            await _end(process)

    def _fail_calls(self) -> None:
        for waiting in self._calls.values():
            if not waiting.done():
                waiting.set_exception(MlflowAway("the process that calls MLflow ended"))

    async def stop(self) -> None:
        """End the process at once; a later call starts another one."""
        process, self._process = self._process, None
        if process is not None:
            await _end(process)
        if self._reading is not None:
            await asyncio.wait({self._reading})


async def _end(process: asyncio.subprocess.Process) -> None:
    # Not Process.kill(): that may reap the child itself, behind asyncio's back.
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)
    await process.wait()
