"""The measured service, with all loops and the HTTP server, in a separate process.

`python -m benchmarks.many_jobs.service` prints the figures of each window as a line of JSON, and
exits when its stdin is closed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass, field
from typing import Any

import psutil
import uvicorn
from sqlalchemy import event

from api.app import create_app
from api.http import connections
from api.http.limits import Limits
from benchmarks.many_jobs.cluster import ReportingCluster
from service.config.settings import Settings, read_settings
from service.runtime import Runtime, tune_interpreter

LOOK_S = 0.02
"""Seconds for which the event loop is asked to sleep, to measure how late it wakes."""
WARMUP_S = 5.0
SETTLED_LAG_S, SETTLED_WITHIN_S = 1.5, 40.0
"""The first window begins once every step is stored within SETTLED_LAG_S, or after
SETTLED_WITHIN_S."""


@dataclass
class Figures:
    """Measurements of one window."""

    wall_s: float = 0.0
    cpu_s: float = 0.0
    database_cpu_s: float = 0.0
    """CPU seconds of the database server's processes."""
    writing_s: float = 0.0
    """Seconds for which SQLite's writing connection was in use. For PostgreSQL, the sum over all
    connections."""
    num_steps: int = 0
    memory_bytes: int = 0
    lags_s: list[float] = field(default_factory=list)
    """Seconds from the report of each step to the commit after which it can be read."""
    loop_delays_s: list[float] = field(default_factory=list)


class Meter:
    """Measures the service in windows."""

    def __init__(self, runtime: Runtime, cluster: ReportingCluster, beside: int | None) -> None:
        self._cluster = cluster
        self._beside = None if beside is None else psutil.Process(beside)
        self.figures = Figures()
        self._watch(runtime)

    def _watch(self, runtime: Runtime) -> None:
        engine = runtime.database.engine

        @event.listens_for(engine, "checkout")
        def _taken(_: Any, record: Any, __: Any) -> None:
            record.info["taken"] = time.perf_counter()

        @event.listens_for(engine, "checkin")
        def _given_back(_: Any, record: Any) -> None:
            self.figures.writing_s += time.perf_counter() - record.info["taken"]

        runtime.database.on_commit(self._committed)

    def _committed(self, changed: frozenset[str] | None) -> None:
        now = time.time()
        for job_id in changed or ():
            self.figures.lags_s.extend(now - at for at in self._cluster.stored(job_id))

    async def window(self, seconds: float) -> Figures:
        delays: list[float] = []
        looking = asyncio.create_task(_look(delays))
        self.figures = found = Figures()
        cpu_s, database_cpu_s, began = time.process_time(), self._database_cpu_s(), time.time()
        await asyncio.sleep(seconds)
        found.wall_s = time.time() - began
        found.cpu_s = time.process_time() - cpu_s
        found.database_cpu_s = self._database_cpu_s() - database_cpu_s
        found.loop_delays_s = delays
        found.num_steps = len(found.lags_s)
        found.memory_bytes = psutil.Process().memory_info().rss
        self.figures = Figures()
        looking.cancel()
        return found

    async def settle(self) -> None:
        """Wait until the backlog from the start is stored."""
        await asyncio.sleep(WARMUP_S)
        deadline = time.monotonic() + SETTLED_WITHIN_S
        while time.monotonic() < deadline:
            lags_s = (await self.window(1.0)).lags_s
            if lags_s and max(lags_s) < SETTLED_LAG_S:
                return

    def _database_cpu_s(self) -> float:
        if self._beside is None:
            return 0.0
        total = 0.0
        for one in [self._beside, *self._beside.children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                total += sum(one.cpu_times()[:2])
        return total


async def _look(delays: list[float]) -> None:
    loop = asyncio.get_running_loop()
    while True:
        due = loop.time() + LOOK_S
        await asyncio.sleep(LOOK_S)
        delays.append(loop.time() - due)


@contextlib.asynccontextmanager
async def _serving(runtime: Runtime, settings: Settings) -> AsyncIterator[None]:
    """Serve HTTP on the port in the settings."""
    app = create_app(settings, runtime)
    config = connections.config(app, Limits.of(settings), stop_within_s=1)
    config.port = settings.port
    server = uvicorn.Server(config)
    task = asyncio.create_task(server._serve())
    try:
        yield
    finally:
        server.should_exit = True
        await task


async def _run(num_jobs: int, num_windows: int, seconds: float, beside: int | None) -> None:
    settings = read_settings()
    cluster = ReportingCluster(num_jobs)
    runtime = await Runtime.open(settings, cluster=cluster)
    meter = Meter(runtime, cluster, beside)
    try:
        async with _serving(runtime, settings):
            tune_interpreter()
            await meter.settle()
            for _ in range(num_windows):
                print(json.dumps(asdict(await meter.window(seconds))), flush=True)
            await asyncio.to_thread(sys.stdin.read)
    finally:
        await runtime.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, required=True)
    parser.add_argument("--windows", type=int, required=True)
    parser.add_argument("--seconds", type=float, required=True, help="of a window")
    parser.add_argument("--beside", type=int, help="process id of the database server")
    options = parser.parse_args()
    asyncio.run(_run(options.jobs, options.windows, options.seconds, options.beside))
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
