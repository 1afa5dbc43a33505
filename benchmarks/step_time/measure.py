"""Both loops in the same two processes, block against block."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

from benchmarks.blocks import Times
from benchmarks.figures import median_of_ratios
from benchmarks.machine import BenchmarkError, wait_until_quiet
from benchmarks.report import Result
from benchmarks.step_time.work import NUM_RANKS, WORKS, Work
from benchmarks.torchrun import torchrun
from ray_workers.shared import spool_reader
from ray_workers.shared.frames import MetricsReport
from service.ingest.decoding import decode

GOAL = 1.02
WARMUP_BLOCKS = 4
"""Blocks of each loop that are not counted; even, so that the pairs stay pairs."""
TIMEOUT_S = 1800.0
MOST_SPOOL_BYTES = 1 << 28

METHOD = (
    "Two ranks on CPU (gloo, one thread each), started by torchrun, run both loops: dray's "
    "`Loop.fit` with its schedule, gradient norm, loss, and a report of every step to the real "
    "spool, and a plain DDP loop that reports nothing. Both use the same model (the digits CNN), "
    "data and batch size, fused AdamW without weight decay, and DDP with gradient_as_bucket_view.",
    "2 ms: width {small.model[width]}, global batch {small.global_batch_size}. 100 ms: width "
    "{large.model[width]}, global batch {large.global_batch_size}. The names are approximate "
    "step times; the table shows the measured times.",
    "Blocks of whole epochs alternate (A B B A), each after a barrier. A block's time is its "
    "total time divided by the number of steps, a mean that includes work done only in some "
    "steps, but not evaluation and checkpoints. The spool is not read during the measurement, "
    "and Ray does not run.",
    "Ratio: median over pairs of neighbouring blocks, with an interval from a bootstrap of the "
    "pairs. A/A: the same for neighbouring blocks of dray's loop.",
)


def measure(num_rounds: int, progress: Callable[[str], None]) -> Result:
    """Time each of the works in `num_rounds * pairs_per_round` pairs of blocks."""
    times: dict[str, Times] = {}
    for name, work in WORKS.items():
        busy = wait_until_quiet()
        progress(f"steps of about {name} ({busy:.0%} of the cores were busy before)")
        times[name] = run(work, num_rounds * work.pairs_per_round)
        progress(f"steps of about {name}: {median_of_ratios(times[name].pairs())}")
    return conclude(times)


def run(work: Work, num_pairs: int) -> Times:
    """Start the two ranks and read what they measured.

    Raises BenchmarkError if they fail, or if a step of dray's was not reported.
    """
    num_blocks = num_pairs + num_pairs % 2 + WARMUP_BLOCKS
    with tempfile.TemporaryDirectory(prefix="dray-bench-") as home:
        folder = Path(home)
        torchrun(
            "benchmarks.step_time.rank",
            [work.name, str(num_blocks), home],
            num_ranks=NUM_RANKS,
            timeout_s=TIMEOUT_S,
        )
        found = json.loads((folder / "times.json").read_text())
        for rank in range(NUM_RANKS):
            _check_reports(folder / f"spool-{rank}", found["num_steps"])
    return Times.of(found, steps_per_block=found["steps_per_block"], warmup_blocks=WARMUP_BLOCKS)


def conclude(times: Mapping[str, Times]) -> Result:
    """The figures that follow from the samples."""
    rows, comparisons = [], []
    for name, each in times.items():
        rows += each.rows(f"{name} step", peer="plain DDP")
        comparisons.append(each.comparison(f"{name} step, dray / plain DDP", goal=GOAL))
    small, large = WORKS["2 ms"], WORKS["100 ms"]
    return Result(
        name="step_time",
        title="Step time",
        method=[line.format(small=small, large=large) for line in METHOD],
        rows=rows,
        comparisons=comparisons,
    )


def _check_reports(directory: Path, num_steps: int) -> None:
    """A loop that did not report would be timed for work it did not do."""
    frames = spool_reader.decode("r0.0.metrics", spool_reader.read(directory, 0, MOST_SPOOL_BYTES))
    steps = {report.step for report in map(decode, frames) if isinstance(report, MetricsReport)}
    if steps != set(range(1, num_steps + 1)):
        raise BenchmarkError(f"{len(steps)} of {num_steps} steps were reported in {directory}")
