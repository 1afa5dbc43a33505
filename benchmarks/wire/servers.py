"""Bytes and time of a step with parameter servers, compared with all-reduce of the same model."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.figures import median_of_ratios
from benchmarks.machine import wait_until_quiet
from benchmarks.report import Result, Row, Table
from benchmarks.torchrun import train
from benchmarks.wire.measure import MOST_SPOOL_BYTES, SHAPES, TIMEOUT_S, job
from ray_workers.shared import spool_reader
from ray_workers.shared.contracts import ALL_SENT_BYTES, SENT_BYTES
from ray_workers.shared.frames import MetricsReport
from service.ingest.decoding import decode

NUM_WORKERS, NUM_STEPS, FIRST_STEP = 3, 12, 4
NUM_ELEMENTS = 25_500_000
MOST_ROUNDS = 5
STEP_TIME = "perf/step_time_s"
DENSE = "all-reduce, 3 ranks"
SERVERS = {"kind": "parameter_server"}


@dataclass(frozen=True)
class Contender:
    sync: dict[str, Any]
    sent: float
    """Data sent by all ranks in a step, in units of fp32 gradients."""
    num_servers: int = 0


CONTENDERS = {
    DENSE: Contender({"kind": "all_reduce"}, 2 * (NUM_WORKERS - 1)),
    "synchronous, 1 server": Contender({**SERVERS, "servers": 1}, 2 * NUM_WORKERS, 1),
    "synchronous, 2 servers": Contender({**SERVERS, "servers": 2}, 2 * NUM_WORKERS, 2),
    "synchronous, 1 server, bf16 pushed": Contender(
        {**SERVERS, "servers": 1, "push_dtype": "bf16"}, 1.5 * NUM_WORKERS, 1
    ),
    "asynchronous, 1 server": Contender({**SERVERS, "servers": 1, "mode": "asynchronous"}, 2.0, 1),
}
LIMIT = 1.03
METHOD = [
    f"The language model of 8 layers of width 512 ({SHAPES}) is trained on CPU by {NUM_WORKERS} "
    "workers with sgd, each with one sample of 32 bytes per step. With an asynchronous server, "
    "a step belongs to one worker, which computes all of its three samples. The servers are "
    "additional processes on the same cores, so sending is limited only by the cores.",
    "Bytes are the bytes that all ranks send in a step (`sync/sent_bytes`) and, for a worker, "
    f"the median of `perf/sent_bytes` from step {FIRST_STEP} on. The limit is the data that the "
    "algorithm sends: 2 (n - 1) gradients for a ring of n ranks, and a gradient and the weights "
    "for each worker with servers. 3% is allowed for headers, the loss, and the weights that "
    "are pulled before the first step.",
    f"The time is the median step of rank 0 from step {FIRST_STEP} to {NUM_STEPS}, divided by "
    "the number of workers for an asynchronous worker. The contenders take turns, and the ratio "
    "is the median over the rounds.",
]


@dataclass(frozen=True)
class Step:
    seconds: float
    by_worker: float
    by_all: float


def measure(num_rounds: int, progress: Callable[[str], None]) -> Result:
    """num_rounds: most turns of each contender."""
    steps: dict[str, list[Step]] = {name: [] for name in CONTENDERS}
    for number in range(min(num_rounds, MOST_ROUNDS)):
        wait_until_quiet()
        for name, contender in CONTENDERS.items():
            steps[name].append(_step(contender))
            progress(f"round {number}: {name}: {steps[name][-1]}")
    rows = []
    dense_s = [each.seconds for each in steps[DENSE]]
    for name, contender in CONTENDERS.items():
        sent = statistics.median(each.by_all for each in steps[name])
        by_worker = statistics.median(each.by_worker for each in steps[name])
        part = sent / (4 * NUM_ELEMENTS) / contender.sent
        seconds = [each.seconds for each in steps[name]]
        ratio = median_of_ratios(list(zip(seconds, dense_s, strict=True)))
        rows.append(
            [
                name,
                f"{sent / 1e6:,.1f}",
                f"{by_worker / 1e6:,.1f}",
                f"{part:.3f}",
                "yes" if part <= LIMIT else "no",
                f"{statistics.median(seconds) * 1e3:,.0f}",
                str(ratio),
            ]
        )
    columns = ["", "MB, all ranks", "MB, a worker", "of the algorithm's", "within 3%"]
    columns += ["ms a step", f"time of {DENSE} [95%]"]
    return Result(
        name="parameter_servers",
        title="Parameter servers beside all-reduce, 25.5 million elements",
        method=METHOD,
        rows=[Row(name, [each.seconds for each in found]) for name, found in steps.items()],
        comparisons=[],
        tables=[Table("A step", columns, rows)],
    )


def _step(contender: Contender) -> Step:
    """Train once. BenchmarkError if it fails."""
    with tempfile.TemporaryDirectory(prefix="dray-bench-") as home:
        folder = Path(home)
        num_ranks = NUM_WORKERS + contender.num_servers
        document = job(folder, contender.sync, num_ranks, NUM_WORKERS, NUM_STEPS)
        train(document, folder, num_ranks=num_ranks, timeout_s=TIMEOUT_S)
        content = spool_reader.read(folder / "spool-0", 0, MOST_SPOOL_BYTES)
        reports = [
            report
            for report in map(decode, spool_reader.decode("r0.0.metrics", content))
            if isinstance(report, MetricsReport)
        ]

    def median(key: str, first_step: int = FIRST_STEP) -> float:
        return statistics.median(
            report.values[key]
            for report in reports
            if key in report.values and report.step >= first_step
        )

    beside = NUM_WORKERS if contender.sync.get("mode") == "asynchronous" else 1
    return Step(median(STEP_TIME) / beside, median(SENT_BYTES), median(ALL_SENT_BYTES, 1))
