"""Keeps a node's forkserver running, and ends what it could not take along when it was killed."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

from ray_workers import orphans
from ray_workers.forking import ForkFailed, list_tasks

CODE_ROOT = Path(__file__).resolve().parent.parent
LOOK_S = 0.2
"""Pause between two looks at whether it lives."""
ANSWER_LOOK_S = 0.05
RESTART_PAUSES_S = (0.0, 1.0, 5.0, 15.0)
"""Before each restart in a row of one that ended before it served."""
REAP_BOUND_S = 5.0
"""How long is waited for what it left to be gone; whoever asks what is left goes on killing."""


class ForkserverKeeper:
    """One forkserver at a time; the pipe that this object holds is its life."""

    def __init__(self, directory: Path, socket_path: str, module: str) -> None:
        """directory: the node's folder; module: what to run, `ray_workers.forkserver`."""
        self._directory = directory
        self._socket_path = socket_path
        self._module = module
        self._log_path = directory / "forkserver.log"
        self._failure: str | None = None
        self._process = self._start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def _start(self) -> subprocess.Popen[bytes]:
        Path(self._socket_path).unlink(missing_ok=True)
        environment = dict(os.environ)
        environment.setdefault("OMP_NUM_THREADS", "1")
        environment["PYTHONPATH"] = os.pathsep.join(
            [str(CODE_ROOT), *filter(None, [environment.get("PYTHONPATH")])]
        )
        with self._log_path.open("wb") as log:
            return subprocess.Popen(
                [sys.executable, "-m", self._module, self._socket_path],
                stdin=subprocess.PIPE,  # its lifeline: closes when this process ends
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )

    async def keep(self) -> None:
        """Until cancelled: start it again whenever it ends, and end what it left."""
        failures = 0
        while True:
            served = False
            while (code := self._process.poll()) is None:
                served = served or Path(self._socket_path).exists()
                await asyncio.sleep(LOOK_S)
            tail = self._log_path.read_text(errors="replace")[-2000:].strip().splitlines()[-1:]
            self._failure = f"its forkserver ended with code {code}: {tail}"
            print(self._failure, flush=True)  # noqa: T201  # into the node agent's log
            self._close_lifeline()
            failures = 0 if served else failures + 1
            await asyncio.sleep(RESTART_PAUSES_S[min(failures, len(RESTART_PAUSES_S) - 1)])
            try:
                self._process = self._start()
            except OSError as error:  # no memory or no disk for it now
                print(f"its forkserver can't be started: {error}", flush=True)  # noqa: T201
                continue
            await asyncio.to_thread(orphans.reap_within, [self._directory], REAP_BOUND_S)

    def _close_lifeline(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()

    async def problem(self) -> str | None:
        """None once it serves; why it does not, if it ended."""
        while True:
            try:
                await list_tasks(self._socket_path)
            except ForkFailed:
                if self._failure is not None:
                    return self._failure
                await asyncio.sleep(ANSWER_LOOK_S)
            else:
                self._failure = None
                return None

    def stop(self) -> None:
        """End it with all that it started. Blocking."""
        self._close_lifeline()
        self._process.wait()
