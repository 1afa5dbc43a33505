"""Keeps a node's forkserver running, and ends processes that outlive a forkserver.

A suspended forkserver doesn't start processes, and doesn't notice when processes end. The manager
pings the forkserver, kills it if it hasn't responded for too long, and starts a new one.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import ray_workers
from ray_workers.node import orphans
from ray_workers.node.forkserver.client import ForkFailed, list_tasks
from ray_workers.node.rank_environment import of_ranks
from ray_workers.shared.paths import NODE_TMPDIR, compiled_code_dir
from ray_workers.shared.processes.procfs import started_ticks
from ray_workers.shared.processes.silence import Silence, SilenceLimits

CODE_ROOT = Path(ray_workers.__file__).resolve().parents[1]
CHECK_S = 0.2
"""Pause between two checks of whether a forkserver is serving."""
ANSWER_CHECK_S = 0.05
PING_S = 2.0
"""Maximum number of seconds to wait for the response to a ping, and the pause before the next
ping."""
RESTART_PAUSES_S = (0.0, 1.0, 5.0, 15.0)
"""Pauses before consecutive restarts of a forkserver that ended before it started serving."""
REAP_BOUND_S = 5.0
"""Maximum number of seconds to wait until the processes of a dead forkserver have ended. Later
calls of `orphans.reap` kill the remaining processes."""


class ForkserverManager:
    """Runs one forkserver at a time. The forkserver exits when the pipe that this object holds is
    closed."""

    def __init__(
        self, directory: Path, socket_path: str, module: str, limits: SilenceLimits
    ) -> None:
        """directory: the node's folder. module: `ray_workers.node.forkserver.server`."""
        self._directory = directory
        self._socket_path = socket_path
        self._module = module
        self._log_path = directory / "forkserver.log"
        self._pid_path = directory / "forkserver.pid"
        self._failure: str | None = None
        self._killed_because: str | None = None
        """The reason why the current forkserver was killed, if it was killed."""
        self.limits = limits
        self._silence = Silence()
        self._serves = False
        self._process = self._start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def silent_since(self) -> float | None:
        """Unix time in seconds at which a serving forkserver stopped responding. None if the
        forkserver has been silent for at most `report_s` seconds."""
        if not self._serves or self._silence.seconds(self.pid) <= self.limits.report_s:
            return None
        return self._silence.since(self.pid)

    def _start(self) -> subprocess.Popen[bytes]:
        Path(self._socket_path).unlink(missing_ok=True)
        self._kill_predecessor()
        environment = of_ranks(os.environ)
        environment.setdefault("OMP_NUM_THREADS", "1")
        # Without this variable, torch would store compiled code in TMPDIR, which differs from rank
        # to rank.
        environment.setdefault(NODE_TMPDIR, tempfile.gettempdir())
        # Other users could guess the name of torch's default folder for compiled code, and use the
        # folder.
        environment.setdefault("TORCHINDUCTOR_CACHE_DIR", str(compiled_code_dir()))
        environment["PYTHONPATH"] = os.pathsep.join(
            [str(CODE_ROOT), *filter(None, [environment.get("PYTHONPATH")])]
        )
        with self._log_path.open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", self._module, self._socket_path],
                stdin=subprocess.PIPE,  # its lifeline: closes when this process ends
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )
        with contextlib.suppress(OSError):  # the disk is full
            self._pid_path.write_text(f"{process.pid} {started_ticks(process.pid)}")
        return process

    def _kill_predecessor(self) -> None:
        """Kill this node's previous forkserver, whose agent is dead. A suspended forkserver doesn't
        notice that its lifeline has closed, and would keep its ranks alive forever."""
        with contextlib.suppress(OSError, ValueError):
            pid, started = map(int, self._pid_path.read_text().split())
            if started_ticks(pid) == started:
                os.kill(pid, signal.SIGKILL)

    async def run(self) -> None:
        """Restart the forkserver whenever it ends, and end its remaining processes. Runs until
        cancelled."""
        failures = 0
        while True:
            self._serves, self._killed_because = False, None
            listening = asyncio.ensure_future(self._end_when_silent())
            try:
                code = await self._ended()
            finally:
                listening.cancel()
            lines = self._log_path.read_text(errors="replace")[-2000:].strip().splitlines()
            ended = ": ".join([f"the node's forkserver exited with code {code}", *lines[-1:]])
            self._failure = self._killed_because or ended
            print(self._failure, flush=True)  # noqa: T201  # into the node agent's log
            self._close_lifeline()
            failures = 0 if self._serves else failures + 1
            await asyncio.sleep(RESTART_PAUSES_S[min(failures, len(RESTART_PAUSES_S) - 1)])
            try:
                self._process = self._start()
            except OSError as error:  # no memory or disk space at the moment
                print(f"the node's forkserver can't be started: {error}", flush=True)  # noqa: T201
                continue
            await asyncio.to_thread(orphans.reap_within, [self._directory], REAP_BOUND_S)

    async def _ended(self) -> int:
        """Return the exit code of the forkserver once it has ended."""
        while (code := self._process.poll()) is None:
            ended, loop = asyncio.Event(), asyncio.get_running_loop()
            process = os.pidfd_open(self.pid)  # readable when it has ended
            loop.add_reader(process, ended.set)
            try:
                await ended.wait()
            finally:
                loop.remove_reader(process)
                os.close(process)
        return code

    async def _end_when_silent(self) -> None:
        """Ping the current forkserver, and kill it when it has been silent for too long. A
        forkserver that isn't serving yet may still be importing modules."""
        process = self._process
        while True:
            if not self._serves and Path(self._socket_path).exists():
                self._serves = True
                self._silence.answered(process.pid)  # it was importing modules, not silent
            self._silence.asked(process.pid)
            with contextlib.suppress(ForkFailed, TimeoutError):
                async with asyncio.timeout(PING_S):
                    await list_tasks(self._socket_path)
                self._silence.answered(process.pid)
            limits, silent_s = self.limits, self._silence.seconds(process.pid)
            if silent_s > (limits.gateway_s if self._serves else limits.start_s):
                self._killed_because = (
                    "the node's forkserver was killed because it did not respond for "
                    f"{silent_s:.0f} s"
                )
                process.kill()
                return self._silence.answered(process.pid)
            await asyncio.sleep(PING_S if self._serves else CHECK_S)

    def _close_lifeline(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()

    async def problem(self) -> str | None:
        """Return None once the forkserver is serving, or the reason if it has ended."""
        while True:
            try:
                await list_tasks(self._socket_path)
            except ForkFailed:
                if self._failure is not None:
                    return self._failure
                await asyncio.sleep(ANSWER_CHECK_S)
            else:
                self._failure = None
                return None

    def stop(self) -> None:
        """End the forkserver and all processes that it started. Blocks."""
        self._close_lifeline()
        self._process.wait()
