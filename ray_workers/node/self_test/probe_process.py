"""Starts the processes that test devices (`probe`), and limits the time of each of their steps."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ray_workers.node.forkserver.manager import CODE_ROOT
from ray_workers.node.rank_environment import of_ranks
from ray_workers.shared.processes.machine_speed import OVERLOADED, WaitMeter

END_LIMIT_S = 5.0
"""Seconds to wait for the end of a process that was killed. A process that waits for a lost GPU
might never end."""
ANSWER_LIMIT_BYTES = 1 << 20


class StepError(Exception):
    """The step could not be run, for the reason in the message. The device might be healthy."""


class WrongValue(Exception):
    """The device returned a wrong value."""


class StepTimeout(Exception):
    """The step did not finish in time."""


@dataclass(frozen=True)
class StepLimits:
    """Time limits of a self-test in seconds. Usually, a test takes a few seconds."""

    begin_s: float = 60.0
    """For the start of a process, the import of torch and the creation of the device's context."""
    step_s: float = 20.0
    watch_period_s: float = 0.2
    """Between two checks whether a job has started on a GPU that is being tested."""


class ProbeProcess:
    """A running process. Use it as an asynchronous context manager, which kills the process and all
    processes that it has started."""

    def __init__(self, arguments: Sequence[str], visible: str) -> None:
        """`arguments` is the command, without the kind and the parent's pid. `visible` is the
        process's CUDA_VISIBLE_DEVICES."""
        self._arguments = arguments
        self._visible = visible
        self._process: asyncio.subprocess.Process | None = None
        self._waits = WaitMeter()
        self.is_stuck = False
        """Whether the process did not end although it was killed."""

    async def start(self, kind: str) -> None:
        environment = of_ranks(os.environ)
        environment["CUDA_VISIBLE_DEVICES"] = self._visible
        environment["PYTHONPATH"] = os.pathsep.join(
            [str(CODE_ROOT), *filter(None, [environment.get("PYTHONPATH")])]
        )
        self._process = await asyncio.create_subprocess_exec(
            *self._arguments,
            kind,
            str(os.getpid()),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            env=environment,
            start_new_session=True,
            limit=ANSWER_LIMIT_BYTES,
        )

    async def step(self, name: str, limit_s: float) -> Any:
        """Run a step, and return its result. Raises WrongValue, StepError or StepTimeout."""
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        self._waits.sample([process.pid])
        try:
            async with asyncio.timeout(limit_s):
                with contextlib.suppress(ConnectionError):
                    process.stdin.write(f"{name}\n".encode())
                    await process.stdin.drain()
                line = await process.stdout.readline()
        except TimeoutError:
            raise StepTimeout(f"did not finish within {limit_s:g} s") from None
        if not line:
            raise StepError(f"the test process ended {await self._how_it_ended()}")
        try:
            answer: Mapping[str, Any] = json.loads(line)
        except ValueError:
            raise StepError("the test process sent an invalid answer") from None
        if "wrong" in answer:
            raise WrongValue(str(answer["wrong"]))
        if "error" in answer:
            raise StepError(str(answer["error"]))
        return answer.get("ok")

    def is_overloaded(self) -> bool:
        """Whether the process often had to wait for a processor since the step began."""
        return self._process is not None and self._waits.sample([self._process.pid]) >= OVERLOADED

    async def _how_it_ended(self) -> str:
        assert self._process is not None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(END_LIMIT_S):
                code = await self._process.wait()
                return f"with exit code {code}" if code >= 0 else f"by signal {-code}"
        return "without an answer"

    async def end(self) -> None:
        """Kill the process and its children, and wait for a limited time until the process has
        ended."""
        process = self._process
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        try:
            async with asyncio.timeout(END_LIMIT_S):
                await process.wait()
        except TimeoutError:
            self.is_stuck = True

    async def __aenter__(self) -> ProbeProcess:
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.shield(self.end())


COMMAND = (sys.executable, "-m", "ray_workers.node.self_test.probe")
