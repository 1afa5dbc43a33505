"""Clients of a federated job outside of the cluster: `dray federate join` processes."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from dray import Client
from dray.cli.exits import Exit
from dray.views import JobState
from tests.chaos.ground import patiently
from tests.integration.harness import ROOT

ENDS_WITHIN_S = 60.0
"""Time to exit after the job: a long poll may be in progress, or a request to a killed service may
be retried."""


class OutsideClients:
    """One client for each table of a job. All are killed at the end of the block."""

    def __init__(self, client: Client, job_id: str, tables: Sequence[Path]) -> None:
        invited = patiently(lambda: client.invite_clients(job_id, len(tables)))
        tokens = [one.token for one in sorted(invited, key=lambda one: one.client)]
        self._url, self._job_id = client.url, job_id
        self._known = list(zip(tokens, tables, strict=True))
        self._processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> OutsideClients:
        self._processes += [self._start(number) for number in range(len(self._known))]
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()

    def _start(self, number: int) -> subprocess.Popen[bytes]:
        token, table = self._known[number]
        command = [sys.executable, "-m", "dray.cli", "federate", "join", self._job_id]
        with table.with_suffix(".log").open("ab") as log:
            return subprocess.Popen(
                [*command, "--data", str(table)],
                cwd=ROOT,
                stdout=log,
                stderr=log,
                env={**os.environ, "DRAY_URL": self._url, "DRAY_TOKEN": token},
            )

    def one_at_work(self, rng: random.Random) -> int:
        """Return the number of a random running client. Raises IndexError if none is running."""
        return rng.choice([n for n, one in enumerate(self._processes) if one.poll() is None])

    def replace(self, number: int) -> None:
        """Kill a client and restart it."""
        self._processes[number].kill()
        self._processes[number].wait()
        self._processes[number] = self._start(number)

    @contextlib.contextmanager
    def stopped(self, number: int) -> Iterator[None]:
        self._processes[number].send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self._processes[number].send_signal(signal.SIGCONT)

    def exit_codes(self) -> list[int | None]:
        """Wait for all clients and return their exit codes. The code is None for a client that
        doesn't exit."""
        codes: list[int | None] = []
        for process in self._processes:
            try:
                codes.append(process.wait(ENDS_WITHIN_S))
            except subprocess.TimeoutExpired:
                codes.append(None)
        return codes


def of_exits(codes: Sequence[int | None], ended: JobState) -> Iterator[str]:
    """Check that each client exits with its job, and with the exit code for the job's result."""
    wanted = Exit.OK if ended is JobState.SUCCEEDED else Exit.JOB_ENDED_BADLY
    for number, code in enumerate(codes):
        if code != wanted:
            yield f"client {number} ended with {code}, not {wanted:d}, with a job that {ended}"
