"""Jobs per second compared with other queues, and submit to claim with few and many rows."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

import numpy as np

from benchmarks.figures import ratio_of_medians, ratio_of_percentiles
from benchmarks.machine import ROOT, BenchmarkError, clean_environment, wait_until_quiet
from benchmarks.queue_speed import jobs
from benchmarks.report import Comparison, Result, Row, Table, seconds
from benchmarks.serving.jobs import finished
from benchmarks.serving.scale import make_database
from benchmarks.serving.servers import postgres
from service.runtime import Runtime

NUM_SINGLE, NUM_ARRAY = 300, 2_000
MANY = 1_000_000
WAITING = 10_000
PER_BLOCK, PER_SLOW_BLOCK = 60, 10
"""Jobs per block. PER_SLOW_BLOCK applies if other jobs wait, because each job requires a plan of
the whole queue."""
LIMIT_S = 300.0
GOALS = {"single": 1.0, "array": 5.0, "concurrent": 1.0}
GOAL_OF_MANY = 1.2
RAM = Path("/dev/shm")
DATABASES = {"SQLite": "huey", "SQLite in RAM": "huey", "PostgreSQL": "procrastinate"}
"""The peer for each database."""
NUM_SYNCS = 200
WORKERS = {"huey": (2, 8), "procrastinate": (16, 64)}
"""Worker counts that are tried for each peer in the first round. The best one is used in the other
rounds."""

METHOD = (
    f"Through the queue: {NUM_SINGLE} jobs are submitted one after the other, the same number by "
    f"sixteen concurrent callers, or {NUM_ARRAY:,} as one array. The time ends when the end of "
    "the last job is stored. dray runs as its service without HTTP, in one process with its "
    f"loops and an in-memory cluster of {jobs.NUM_NODES} nodes with {jobs.CPUS_PER_NODE} CPUs, "
    "on which a job succeeds as soon as it is launched. Each job is stored like any other job: "
    "its document, an attempt and three events.",
    "huey runs on SQLite with fsync at every commit, and keeps its results. procrastinate runs "
    "on PostgreSQL with the server's default settings, like dray. It keeps its jobs and, for an "
    "array, defers them in one call; huey has no such call. Both run an empty function in the "
    "submitting process. Two worker counts are tried in a first round, which is not counted, and "
    "the faster one is used.",
    f"A commit waits for the disk. A row shows how long a write of 4 KiB with a sync takes on this "
    f"machine. SQLite is also measured with its files in {RAM}, where a sync takes no time.",
    "Each turn is a separate process with an empty database, and contenders take turns within a "
    "round. There are half as many rounds as requested. A sample is the time per job. The ratio "
    "of medians, theirs / ours, is how many times more jobs per second dray runs. A/A: dray's "
    "odd rounds against its even rounds.",
    "dray is limited by the CPU: a job has a searchable document, an attempt, events and a place "
    "in a plan, 7 rows in total, whereas a peer's task has one or two rows. "
    "docs/adr/0038-what-a-job-of-an-array-costs.md breaks down the time. If jobs are submitted "
    "one at a time, each submission is a commit, and a scheduling round has few jobs among which "
    "to share its cost. docs/adr/0046-what-a-single-job-costs.md compares the parts with those "
    "of a peer.",
    "Submit to claim: from the call until the caller sees that the job has been claimed. "
    f"Services with an empty table and with {MANY:,} finished jobs, in one process, alternate in "
    f"turns of {PER_BLOCK} sequential jobs. The first turn is not counted. A queue in which "
    f"{WAITING:,} other jobs wait is also measured, in turns of {PER_SLOW_BLOCK} jobs.",
)


@dataclass(frozen=True)
class Turn:
    """A contender, and how its jobs are submitted."""

    database: str
    contender: str
    how: str
    workers: int = 0

    @property
    def num_jobs(self) -> int:
        return NUM_ARRAY if self.how == "array" else NUM_SINGLE

    def run(self, home: Path, database_url: str) -> float:
        """Return the seconds per job. Raises BenchmarkError if the turn fails."""
        module = "benchmarks.queue_speed.jobs"
        command = [sys.executable, "-m", module, self.contender, self.how, str(self.num_jobs)]
        command += [str(home), "--database", database_url, "--workers", str(self.workers)]
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=clean_environment(),
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
        if done.returncode:
            raise BenchmarkError(f"{self} failed: {done.stderr[-2000:]}")
        figures = json.loads(done.stdout.splitlines()[-1])
        return float(figures["all_s"]) / self.num_jobs


@dataclass
class Place:
    """A service with a given number of jobs, and its samples."""

    database: str
    num_finished: int
    num_waiting: int
    samples: list[float] = field(default_factory=list)

    @property
    def label(self) -> str:
        return f"{self.database}, {self.num_finished:,} finished, {self.num_waiting:,} waiting"

    @property
    def per_block(self) -> int:
        return PER_SLOW_BLOCK if self.num_waiting else PER_BLOCK


def turns() -> Iterator[Turn]:
    for how in ("single", "concurrent", "array"):
        for database, peer in DATABASES.items():
            if database == "SQLite in RAM" and not RAM.is_dir():
                continue
            yield Turn(database, "dray", how)
            if how != "concurrent":
                for workers in WORKERS[peer]:
                    yield Turn(database, peer, how, workers)


def fastest(tried: Mapping[Turn, float]) -> list[Turn]:
    """Return the fastest of the turns that differ only in their number of workers. tried: the time
    of each turn."""
    best: dict[tuple[str, str, str], Turn] = {}
    for turn in sorted(tried, key=tried.__getitem__):
        best.setdefault((turn.database, turn.contender, turn.how), turn)
    return [turn for turn in tried if turn in best.values()]


def measure(num_rounds: int, progress: Callable[[str], None]) -> Result:
    num_rounds = max(2, num_rounds // 2)
    with ExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="dray-bench-")))
        where = RAM if RAM.is_dir() else None
        in_ram = Path(
            stack.enter_context(tempfile.TemporaryDirectory(prefix="dray-bench-", dir=where))
        )
        url, _ = stack.enter_context(postgres())
        syncs = _syncs(root)
        numbers = count()

        def take(turn: Turn) -> float:
            number = next(numbers)
            within = in_ram if turn.database == "SQLite in RAM" else root
            home = within / f"turn-{number}"
            home.mkdir()
            on_postgres = turn.database == "PostgreSQL"
            return turn.run(home, make_database(url, f"turn_{number}") if on_postgres else "")

        samples: dict[Turn, list[float]]
        samples = {turn: [] for turn in fastest({turn: take(turn) for turn in turns()})}
        progress("through the queue: all contenders have completed their first turn")
        for round_ in range(num_rounds):
            wait_until_quiet(at_most_s=5)
            for turn in samples if round_ % 2 == 0 else reversed(samples):
                samples[turn].append(take(turn))
            progress(f"through the queue: round {round_ + 1} of {num_rounds}")
        places = [
            *asyncio.run(
                _from_submit_to_claim(root / "sqlite", "SQLite", None, num_rounds, progress)
            ),
            *asyncio.run(
                _from_submit_to_claim(root / "postgres", "PostgreSQL", url, num_rounds, progress)
            ),
        ]
    return conclude(samples, places, syncs)


def _syncs(folder: Path) -> list[float]:
    """Return the seconds that writes of 4 KiB with a sync take on the disk of a folder."""
    taken = []
    with (folder / "sync").open("wb", buffering=0) as file:
        for _ in range(NUM_SYNCS):
            began = time.perf_counter()
            file.write(bytes(4096))
            os.fsync(file.fileno())
            taken.append(time.perf_counter() - began)
    return taken


async def _from_submit_to_claim(
    root: Path, database: str, url: str | None, num_rounds: int, progress: Callable[[str], None]
) -> list[Place]:
    async with AsyncExitStack() as stack:
        places: list[tuple[Place, Runtime]] = []
        for number_finished, number_waiting in ((0, 0), (MANY, 0), (0, WAITING)):
            place = Place(database, number_finished, number_waiting)
            home = root / f"{number_finished}-{number_waiting}"
            named = f"queue_{number_finished}_{number_waiting}"
            database_url = make_database(url, named) if url else f"sqlite:///{home}/dray.db"
            if number_finished:
                progress(f"writing {place.label}")
                await asyncio.to_thread(finished, home, number_finished, database_url)
            runtime = await stack.enter_async_context(jobs.service(home, database_url))
            if number_waiting:
                await runtime.jobs.submit(jobs.waiting(number_waiting))
            places.append((place, runtime))
        for round_ in range(num_rounds + 1):
            for place, runtime in places if round_ % 2 == 0 else reversed(places):
                block = [await jobs.claimed_s(runtime) for _ in range(place.per_block)]
                if round_ > 0:
                    place.samples += block
            progress(f"submit to claim on {database}: round {round_} of {num_rounds}")
    return [place for place, _ in places]


def conclude(
    samples: dict[Turn, list[float]], places: Sequence[Place], syncs: Sequence[float]
) -> Result:
    comparisons, rates = [], []
    for turn, ours in samples.items():
        rates.append([turn.database, turn.how, _named(turn), f"{1 / np.median(ours):,.0f}"])
        if turn.contender != "dray":
            continue
        peers = [
            (each, taken)
            for each, taken in samples.items()
            if each.database == turn.database and each.contender != "dray"
        ]
        rivals = [(e, t) for e, t in peers if e.how == turn.how] or [
            (e, t) for e, t in peers if e.how == "single"
        ]
        best, theirs = min(rivals, key=lambda pair: float(np.median(pair[1])))
        ratio, goal = ratio_of_medians(theirs, ours), GOALS[turn.how]
        comparisons.append(
            Comparison(
                label=f"jobs per second on {turn.database}, {turn.how}: dray / {best.contender}",
                n=len(ours),
                ratio=ratio,
                same=ratio_of_medians(ours[::2], ours[1::2]),
                goal=f"at least {goal:g}",
                met=ratio.value >= goal,
            )
        )
    empties = {p.database: p for p in places if not p.num_finished and not p.num_waiting}
    for full in (place for place in places if place.num_finished):
        empty = empties[full.database]
        ratio = ratio_of_percentiles(full.samples, empty.samples, 99)
        comparisons.append(
            Comparison(
                label=f"p99 of submit to claim: {full.label} / empty",
                n=len(full.samples),
                ratio=ratio,
                same=ratio_of_percentiles(empty.samples[::2], empty.samples[1::2], 99),
                goal=f"at most {GOAL_OF_MANY}",
                met=ratio.value <= GOAL_OF_MANY,
            )
        )
    times = [
        [place.label, *(seconds(float(np.percentile(place.samples, p))) for p in (50, 99))]
        for place in places
    ]
    return Result(
        name="queue_speed",
        title="Jobs through the queue",
        method=METHOD,
        rows=[
            *(Row(f"{t.database}, {t.how}: {_named(t)}", taken) for t, taken in samples.items()),
            Row("a write of 4 KiB with a sync", syncs),
        ],
        comparisons=comparisons,
        tables=[
            Table("Jobs per second (median)", ["database", "jobs", "", "jobs / s"], rates),
            Table("Submit to claim", ["", "p50", "p99"], times),
        ],
        raw={place.label: place.samples for place in places},
    )


def _named(turn: Turn) -> str:
    if turn.contender == "dray":
        return turn.contender
    return f"{turn.contender}, {turn.workers} workers"
