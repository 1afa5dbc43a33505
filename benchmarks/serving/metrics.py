"""Metrics in and out: dray's ingest compared with MLflow's `log_batch`, and reading a long
series."""

from __future__ import annotations

import asyncio
import json
import math
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from benchmarks.figures import ratio_of_medians
from benchmarks.machine import ROOT, BenchmarkError, clean_environment, wait_until_quiet
from benchmarks.report import Comparison, Result, Row
from benchmarks.serving.servers import MLFLOW
from dray.spec import JobSpec
from ray_workers.shared.contracts import Frame, FrameKind, Outcome, Phase, PollReply
from ray_workers.shared.slices import Slice
from service.config.settings import Settings
from service.db.migrate import migrate
from service.db.session import Database
from service.ingest.attempt_results import Received, record
from service.jobs.queries import Queries
from service.jobs.service import Jobs
from service.lifecycle.claims import Deployment, Wanted, claim
from service.storage.storage import Storage
from service.telemetry.series_filters import MetricsFilter

BATCH_POINTS = 1000
BATCHES_PER_BLOCK = 10
MLFLOW_BATCHES_PER_BLOCK = 2
LONG_POINTS = 1_000_000
ANSWER_POINTS = 1000
NEW_POINTS = 100
SPIKE = 1e6
INGEST_GOAL = 1 / 20
READ_GOAL_S = 0.05
POLL_GOAL = 2.0
KEYS = ("train/loss", "train/accuracy", "perf/samples_per_s", "perf/step_s", "train/lr")

METHOD = (
    f"Ingest: {BATCH_POINTS} points, {len(KEYS)} metrics with {BATCH_POINTS // len(KEYS)} steps, "
    "in one transaction on SQLite. dray: `recording.record` on the frames of one reply, called "
    "in the same way as by the reconciler and synced to disk at each commit. MLflow: "
    "`MlflowClient.log_batch` on its SQLite store, in a separate process without MLflow's "
    "server or HTTP. Each uses its default durability (MLflow uses SQLite's default, which also "
    "syncs).",
    "Blocks of batches alternate. A sample is one batch. The first round is not counted.",
    f"Read: {ANSWER_POINTS} points out of a series of {LONG_POINTS:,} with one spike, read with "
    f"`Reading.metrics` and serialized to JSON, as in the API. Poll: the {NEW_POINTS} newest "
    "points of the same job are requested with `after_step`, and compared with a job that has "
    f"only {NEW_POINTS} points. Calls alternate.",
    "Ratio of medians, with intervals from bootstraps. A/A: dray's odd samples against its even "
    "samples.",
)


@dataclass
class Samples:
    ours_s: list[float] = field(default_factory=list)
    mlflow_s: list[float] = field(default_factory=list)
    read_s: list[float] = field(default_factory=list)
    poll_s: list[float] = field(default_factory=list)
    short_s: list[float] = field(default_factory=list)


class Service:
    """The parts of the service that process metrics, with a SQLite home."""

    def __init__(self, home: Path) -> None:
        self._settings = settings = Settings(home=home)
        self.database = Database(settings.database_url)
        migrate(self.database)
        self.storage = Storage(settings.storage_url)
        self._jobs = Jobs(self.database, self.storage, self.database.signals, settings)
        self.queries = Queries(self.database, self.storage, self.database.signals, settings)
        self._cursor = 0

    def running_job(self) -> str:
        spec = JobSpec.model_validate({"recipe": "image_classification"})
        job, _ = asyncio.run(self._jobs.submit(spec))
        wanted = Wanted(job.id, 0, job.queue, (Slice("node", 1),), {"CPU": 1.0})
        now = datetime.now(UTC)
        at = Deployment("d", "session", self._settings)
        self.database.write_sync(lambda s: claim(s, [wanted], at, now))
        return job.id

    def record(self, job_id: str, frames: Sequence[Frame], outcome: Outcome | None = None) -> float:
        """Store the frames of one reply, and return how long it took. outcome: given for the last
        reply."""
        self._cursor += 1
        now = datetime.now(UTC)
        reply = PollReply(
            {"rank-0": self._cursor},
            Phase.RUNNING if outcome is None else Phase.ENDED,
            {Phase.RUNNING: now.timestamp()},
            tuple(frames),
            more=False,
            outcome=outcome,
            silent=(),
        )
        received = Received(job_id, 1, reply)
        began = time.perf_counter()
        (done,) = self.database.write_sync(lambda s: record(s, self.storage, [received], now))
        took = time.perf_counter() - began
        if not done.changed:
            raise BenchmarkError("a reply was not stored")
        return took

    def read(self, job_id: str, after_step: int | None = None) -> tuple[float, list[object]]:
        """Return the seconds, and the values of the response."""
        began = time.perf_counter()
        found = asyncio.run(
            self.queries.metrics(
                job_id, MetricsFilter(after_step=after_step, max_points=ANSWER_POINTS)
            )
        )
        found.model_dump_json()
        took = time.perf_counter() - began
        return took, list(found.series[KEYS[0]].values)


def frames(first_step: int, num_steps: int, keys: Sequence[str] = KEYS) -> list[Frame]:
    """Return the frames of rank 0 for these steps."""
    at = time.time()
    return [
        Frame(
            0,
            0,
            FrameKind.METRICS,
            at,
            {"step": step, "values": {key: math.sin(step / 1000) for key in keys}},
        )
        for step in range(first_step, first_step + num_steps)
    ]


def measure(num_rounds: int, progress: Callable[[str], None]) -> Result:
    samples = Samples()
    with tempfile.TemporaryDirectory(prefix="dray-bench-") as folder:
        service = Service(Path(folder) / "home")
        progress(f"writing a series of {LONG_POINTS:,} points")
        long, short = _long_job(service), service.running_job()
        service.record(short, frames(1, NEW_POINTS, KEYS[:1]))
        job, step = service.running_job(), 1
        peer = _start_mlflow(Path(folder))
        try:
            for number in range(num_rounds + 1):
                wait_until_quiet(at_most_s=10)
                taken = Samples()
                for _ in range(BATCHES_PER_BLOCK):
                    per_key = BATCH_POINTS // len(KEYS)
                    taken.ours_s.append(service.record(job, frames(step, per_key)))
                    step += per_key
                taken.mlflow_s += _mlflow_block(peer)
                _read_block(service, long, short, taken)
                if number:
                    _extend(samples, taken)
                    progress(
                        f"round {number}: a batch {taken.ours_s[-1] * 1e3:.1f} ms, "
                        f"MLflow {taken.mlflow_s[-1] * 1e3:.0f} ms"
                    )
        finally:
            peer.terminate()
            peer.wait(30)
            service.database.close()
    return conclude(samples)


def _long_job(service: Service) -> str:
    job_id = service.running_job()
    for first in range(1, LONG_POINTS + 1, 10_000):
        part = frames(first, 10_000, KEYS[:1])
        if first <= LONG_POINTS // 3 < first + 10_000:
            body = {"step": LONG_POINTS // 3, "values": {KEYS[0]: SPIKE}}
            part[LONG_POINTS // 3 - first] = Frame(0, 0, FrameKind.METRICS, time.time(), body)
        service.record(job_id, part)
    return job_id


def _read_block(service: Service, long: str, short: str, taken: Samples) -> None:
    for _ in range(BATCHES_PER_BLOCK):
        took, values = service.read(long)
        if len(values) > ANSWER_POINTS or SPIKE not in values:
            raise BenchmarkError("the response has too many points, or lacks the spike")
        taken.read_s.append(took)
        took, values = service.read(long, LONG_POINTS - NEW_POINTS)
        if len(values) != NEW_POINTS:
            raise BenchmarkError(f"a poll answered {len(values)} points")
        taken.poll_s.append(took)
        taken.short_s.append(service.read(short)[0])


def _start_mlflow(folder: Path) -> subprocess.Popen[str]:
    python = MLFLOW / "python"
    if not python.exists():
        raise BenchmarkError(f"{python} does not exist: `make bench` installs it")
    script = ROOT / "benchmarks" / "serving" / "mlflow_batches.py"
    peer = subprocess.Popen(
        [str(python), str(script), str(folder / "mlflow.db"), str(BATCH_POINTS), *KEYS],
        env={**clean_environment(), "PYTHONPATH": ""},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    if _line(peer) != "ready":
        raise BenchmarkError("MLflow's store did not open")
    return peer


def _mlflow_block(peer: subprocess.Popen[str]) -> list[float]:
    assert peer.stdin is not None
    print(MLFLOW_BATCHES_PER_BLOCK, file=peer.stdin, flush=True)
    took: list[float] = json.loads(_line(peer))
    return took


def _line(peer: subprocess.Popen[str]) -> str:
    assert peer.stdout is not None
    return peer.stdout.readline().strip()


def _extend(samples: Samples, taken: Samples) -> None:
    for name, values in vars(taken).items():
        getattr(samples, name).extend(values)


def conclude(samples: Samples) -> Result:
    ingest = ratio_of_medians(samples.ours_s, samples.mlflow_s)
    poll = ratio_of_medians(samples.poll_s, samples.short_s)
    read_p50 = sorted(samples.read_s)[len(samples.read_s) // 2]
    return Result(
        name="metrics",
        title="Metrics in and out",
        method=METHOD,
        rows=[
            Row(f"dray: a batch of {BATCH_POINTS} points", samples.ours_s),
            Row(f"MLflow log_batch of {BATCH_POINTS} points", samples.mlflow_s),
            Row(f"{ANSWER_POINTS} points out of {LONG_POINTS:,}", samples.read_s),
            Row(f"poll for {NEW_POINTS} new points of {LONG_POINTS:,}", samples.poll_s),
            Row(f"all of a series of {NEW_POINTS} points", samples.short_s),
        ],
        comparisons=[
            Comparison(
                label="ingest of a batch, dray / MLflow log_batch",
                n=len(samples.ours_s),
                ratio=ingest,
                same=ratio_of_medians(samples.ours_s[::2], samples.ours_s[1::2]),
                goal=f"at most 1/{1 / INGEST_GOAL:.0f}",
                met=ingest.value <= INGEST_GOAL,
            ),
            Comparison(
                label=f"poll for {NEW_POINTS} new points, long / short series",
                n=len(samples.poll_s),
                ratio=poll,
                same=ratio_of_medians(samples.poll_s[::2], samples.poll_s[1::2]),
                goal=f"at most {POLL_GOAL:g}: the new points only; and the read above at most "
                f"{READ_GOAL_S * 1e3:.0f} ms (p50 {read_p50 * 1e3:.0f} ms)",
                met=poll.value <= POLL_GOAL and read_p50 <= READ_GOAL_S,
            ),
        ],
    )
