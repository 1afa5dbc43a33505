"""Many running jobs on one service: its processor time, and how late what they report is stored."""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from benchmarks.figures import ratio_of_medians
from benchmarks.machine import ROOT, BenchmarkError, clean_environment, wait_until_quiet
from benchmarks.many_jobs import jobs, workload
from benchmarks.processes import free_port
from benchmarks.report import Comparison, Result, Row, Table, seconds
from benchmarks.serving.load import exchange, get
from benchmarks.serving.servers import postgres
from service.config.settings import Settings

SIZES = (100, 300, 1000, 2000)
NUM_WAITING = 10_000
WINDOW_S = 4.0
ASK_EVERY_S = 0.1
"""Between two questions, of which every other one is for `/healthz`."""
GOAL_CORES, GOAL_LAG_S, GOAL_EXPLAIN_S = 1.0, 2.0, 0.05
NUM_CHECKED = 20
"""Jobs whose series are read in full at the end."""

METHOD = (
    "One service with all its loops and its HTTP server runs in a separate process. It uses an "
    f"in-memory cluster on which every job has {workload.NUM_RANKS} ranks and takes a step every "
    f"{workload.PERIOD_S:g} s. As in a recipe, rank 0 reports {len(workload.RANK_0)} metrics and "
    f"the progress, and every other rank reports {len(workload.EVERY_RANK)} metrics. Each rank "
    f"writes a log line every {workload.LINE_EVERY} steps, and the supervisor writes a ledger "
    f"every {workload.LEDGER_EVERY} steps. Replies are unpickled like the gateway's, but there "
    "is no gateway process.",
    "The jobs have been running before: their chunks of metrics and logs are filled to "
    f"different degrees. The windows of {WINDOW_S:g} s begin when the backlog from the start has "
    "been stored.",
    "Cores: CPU time per second of the service, and of PostgreSQL's processes. Lag: for every "
    "step, the time from a rank's report to the commit after which it can be read. Late: how "
    "much later than requested the event loop wakes a task. Connections: the fraction of time in "
    "which SQLite's writing connection is in use, or for PostgreSQL, the sum over all "
    "connections.",
    f"At the end, {NUM_CHECKED} jobs are read over HTTP, to check that each has every step "
    "exactly once, in order.",
    f"Explain: while {NUM_WAITING:,} additional jobs wait, their explanations are requested one "
    f"after the other over one connection, every {2 * ASK_EVERY_S:g} s, alternating with "
    "`/healthz`, which reads nothing.",
)


@dataclass(frozen=True)
class Case:
    """The jobs that run on one service."""

    database: str
    num_running: int
    num_waiting: int = 0

    @property
    def label(self) -> str:
        waiting = f" and {self.num_waiting:,} waiting" if self.num_waiting else ""
        return f"{self.database}, {self.num_running:,} running{waiting}"


CASES = (
    *(Case(database, size) for size in SIZES for database in ("SQLite", "PostgreSQL")),
    *(Case("SQLite", size, NUM_WAITING) for size in (100, 1000)),
)


@dataclass
class Taken:
    """The windows of one case."""

    windows: list[dict[str, Any]] = field(default_factory=list)
    """`service.Figures` of each."""
    explain_s: list[float] = field(default_factory=list)
    healthz_s: list[float] = field(default_factory=list)

    def over_time(self, name: str) -> list[float]:
        return [window[name] / window["wall_s"] for window in self.windows]

    def all(self, name: str) -> list[float]:
        return [value for window in self.windows for value in window[name]]


def measure(num_rounds: int, progress: Callable[[str], None]) -> Result:
    taken = {}
    for case in CASES:
        wait_until_quiet()
        taken[case] = take(case, num_rounds)
        progress(said(case, taken[case]))
    return conclude(taken)


def said(case: Case, taken: Taken) -> str:
    return f"{case.label}: " + ", ".join(_cells(taken))


def take(case: Case, num_windows: int) -> Taken:
    """Run a service with these jobs. BenchmarkError if something that was reported is lost."""
    with (
        _database(case.database) as (url, pid),
        tempfile.TemporaryDirectory(prefix="dray-bench-") as home,
    ):
        jobs.write(Settings(home=Path(home), database_url=url), case.num_running, case.num_waiting)
        port = free_port()
        environment = {
            "DRAY_HOME": home,
            "DRAY_PORT": str(port),
            "DRAY_RAY_ADDRESS": "memory:0",
            **({"DRAY_DATABASE_URL": url} if url else {}),
        }
        command = [
            *(sys.executable, "-m", "benchmarks.many_jobs.service"),
            *("--jobs", str(case.num_running)),
            *("--windows", str(num_windows), "--seconds", str(WINDOW_S)),
            *(["--beside", str(pid)] if pid else []),
        ]
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=clean_environment() | environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            taken = asyncio.run(_watch(process, port, case, num_windows))
            _check(port, case.num_running)
            return taken
        finally:
            process.communicate()


@contextmanager
def _database(name: str) -> Iterator[tuple[str, int | None]]:
    """The URL of an empty database, and the process id of its server; nothing for SQLite."""
    if name == "SQLite":
        yield "", None
        return
    with postgres() as (url, processes):
        yield url, processes[0].pid


async def _watch(process: subprocess.Popen[str], port: int, case: Case, num_windows: int) -> Taken:
    """The windows as the service prints them, and what it answers meanwhile."""
    taken = Taken()
    asking: asyncio.Task[None] | None = None
    assert process.stdout is not None
    try:
        while line := await asyncio.to_thread(process.stdout.readline):
            taken.windows.append(json.loads(line))
            if case.num_waiting and asking is None:  # the first one is for warming up
                asking = asyncio.create_task(_ask(port, case.num_waiting, taken))
            if len(taken.windows) == num_windows:
                break
    finally:
        if asking is not None:
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
    if not taken.windows:
        raise BenchmarkError(f"the service of {case.label} ended with code {process.wait()}")
    return taken


async def _ask(port: int, num_waiting: int, taken: Taken) -> None:
    chance = random.Random(0)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        while True:
            job_id = jobs.WAITING.format(chance.randrange(num_waiting))
            asked = ((f"/v1/jobs/{job_id}/explain", taken.explain_s), ("/healthz", taken.healthz_s))
            for path, took_s in asked:
                began = time.perf_counter()
                await exchange(reader, writer, get(path, port))
                took_s.append(time.perf_counter() - began)
                await asyncio.sleep(ASK_EVERY_S)
    finally:
        writer.close()


def _check(port: int, num_running: int) -> None:
    """Check that every step of the last minutes exists once and in order."""
    for number in range(0, num_running, max(1, num_running // NUM_CHECKED)):
        path = f"http://127.0.0.1:{port}/v1/jobs/{jobs.RUNNING.format(number)}/metrics"
        for rank in (0, workload.NUM_RANKS - 1):
            asked = {"rank": rank, "max_points": 10_000}
            answer = httpx.get(path, params=asked, trust_env=False, timeout=60)
            series = answer.raise_for_status().json()["series"]
            if set(series) != set(workload.names_of(rank)):
                raise BenchmarkError(f"job {number} has other metrics: {sorted(series)}")
            for name, found in series.items():
                if found["steps"] != list(range(1, len(found["steps"]) + 1)):
                    raise BenchmarkError(f"{name} of job {number} lacks steps or repeats some")


def conclude(taken: dict[Case, Taken]) -> Result:
    rows, comparisons = [], []
    for case, found in taken.items():
        cores = found.over_time("cpu_s")
        rows.append(Row(f"{case.label}: processor time in a second", cores))
        if case.num_waiting:
            rows.append(Row(f"{case.label}: explain", found.explain_s))
            rows.append(Row(f"{case.label}: /healthz", found.healthz_s))
        if case.num_running == 1000 and not case.num_waiting:
            lag_s = _percentile(found.all("lags_s"), 99)
            comparisons.append(
                Comparison(
                    label=f"{case.label}: the service / one core",
                    n=len(cores),
                    ratio=ratio_of_medians(cores, [GOAL_CORES]),
                    same=ratio_of_medians(cores[::2], cores[1::2]),
                    goal=f"at most 1; p99 of the lag at most {GOAL_LAG_S:g} s",
                    met=float(np.median(cores)) <= GOAL_CORES and lag_s <= GOAL_LAG_S,
                )
            )
    cells = [[case.label, *_cells(found)] for case, found in taken.items()]
    columns = [
        "",
        "cores",
        "database's",
        "steps/s",
        "lag p50",
        "p99",
        "late p99",
        "connections",
        "MiB",
    ]
    asked = [
        [
            case.label,
            *(seconds(_percentile(found.explain_s, share)) for share in (50, 99)),
            *(seconds(_percentile(found.healthz_s, share)) for share in (50, 99)),
        ]
        for case, found in taken.items()
        if case.num_waiting
    ]
    return Result(
        name="many_jobs",
        title="Many running jobs",
        method=METHOD,
        rows=rows,
        comparisons=comparisons,
        tables=[
            Table("The service", columns, cells),
            Table(
                f"Explain of a waiting job (goal: p99 at most {seconds(GOAL_EXPLAIN_S)})",
                ["", "p50", "p99", "/healthz p50", "p99"],
                asked,
            ),
        ],
    )


def _cells(taken: Taken) -> list[str]:
    lags_s, late_s = taken.all("lags_s"), taken.all("loop_delays_s")
    return [
        f"{np.median(taken.over_time('cpu_s')):.2f}",
        f"{np.median(taken.over_time('database_cpu_s')):.2f}",
        f"{np.median(taken.over_time('num_steps')):.0f}",
        *(seconds(_percentile(lags_s, share)) for share in (50, 99)),
        seconds(_percentile(late_s, 99)),
        f"{np.median(taken.over_time('writing_s')):.0%}",
        f"{taken.windows[-1]['memory_bytes'] / 2**20:.0f}",
    ]


def _percentile(values: list[float], share: float) -> float:
    return float(np.percentile(values, share)) if values else float("nan")
