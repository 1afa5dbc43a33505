"""Starts the ranks for each interval between comparisons, and computes the figures."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path

from benchmarks.blocks import Times
from benchmarks.figures import median_of_ratios
from benchmarks.machine import wait_until_quiet
from benchmarks.replica_checks.work import INTERVALS, STEPS_PER_BLOCK
from benchmarks.report import Result
from benchmarks.step_time.work import NUM_RANKS
from benchmarks.torchrun import torchrun

GOALS = {1: 10.0, 10: 2.0, 100: 1.1}
"""For each interval, the largest acceptable ratio."""
WARMUP_BLOCKS = 4
"""Number of blocks of each kind that are not counted. Must be even, to keep blocks in pairs."""
PAIRS_PER_ROUND = 4
TIMEOUT_S = 1800.0
METHOD = (
    "Two ranks on CPU (gloo, one thread each), started by torchrun, train the same job: blocks of "
    f"{STEPS_PER_BLOCK} steps with comparisons of the replicas and blocks without comparisons "
    "alternate (A B B A), each after a barrier.",
    "Ratio: median over pairs of neighbouring blocks, with an interval from a bootstrap of the "
    "pairs. A/A: the same for neighbouring blocks with comparisons.",
)


def measure(num_rounds: int, progress: Callable[[str], None]) -> Result:
    """Time `num_rounds * PAIRS_PER_ROUND` pairs of blocks for each interval."""
    rows, comparisons = [], []
    for every in INTERVALS:
        busy = wait_until_quiet()
        progress(f"a comparison every {every} steps ({busy:.0%} of the cores were busy before)")
        times = run(every, num_rounds * PAIRS_PER_ROUND)
        progress(f"a comparison every {every} steps: {median_of_ratios(times.pairs())}")
        label = f"every {every} steps"
        rows += times.rows(label, peer="without comparisons")
        comparisons.append(
            times.comparison(f"{label}, with / without comparisons", goal=GOALS[every])
        )
    return Result(
        name="replica_checks",
        title="Comparisons of replicas",
        method=list(METHOD),
        rows=rows,
        comparisons=comparisons,
    )


def run(every: int, num_pairs: int) -> Times:
    """Start the two ranks and read their measurements."""
    num_blocks = 2 * (num_pairs + num_pairs % 2 + WARMUP_BLOCKS)
    with tempfile.TemporaryDirectory(prefix="dray-bench-") as home:
        given = [str(every), str(num_blocks), home]
        torchrun("benchmarks.replica_checks.rank", given, num_ranks=NUM_RANKS, timeout_s=TIMEOUT_S)
        found = json.loads((Path(home) / "times.json").read_text())
    return Times.of(found, steps_per_block=STEPS_PER_BLOCK, warmup_blocks=WARMUP_BLOCKS)
