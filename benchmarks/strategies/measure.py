"""Step times of dray's strategies relative to plain torch programs, interleaved."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path

from benchmarks.blocks import Times
from benchmarks.equality.work import write_text
from benchmarks.machine import wait_until_quiet
from benchmarks.report import Result
from benchmarks.strategies.work import BATCH_SIZE, MODEL, STEPS_PER_BLOCK, WAYS
from benchmarks.torchrun import torchrun

GOAL = 1.02
WARMUP_BLOCKS = 2
PAIRS_PER_ROUND = 4
TIMEOUT_S = 900.0
METHOD = [
    (
        "Two ranks with one thread each (four ranks for a product of two axes) train the language "
        "model "
    )
    + ", ".join(f"{name} {value}" for name, value in MODEL.items())
    + f" with AdamW and {BATCH_SIZE} samples per step, on CPU over gloo.",
    f"In the same processes, blocks of {STEPS_PER_BLOCK} steps of dray's loop, with metrics and "
    "reports, alternate with blocks of a plain program that uses the same parts of torch "
    "(`benchmarks/strategies/plain.py`): A B B A. The result is the median ratio of "
    "neighbouring blocks with its 95% interval, and the same for two blocks of the same kind.",
    "The model itself defines how its matrices (with torch's `parallelize_module`) and its "
    "positions (by exchanging heads) are divided, also for the plain program. For these "
    "strategies, only the loop is compared.",
]


def measure(num_rounds: int, progress: Callable[[str], None]) -> Result:
    rows, comparisons = [], []
    for way in WAYS:
        busy = wait_until_quiet()
        times = run(way, num_rounds * PAIRS_PER_ROUND)
        compared = times.comparison(f"{way}, step, dray / plain torch", goal=GOAL)
        progress(f"{way}: {compared.ratio} ({busy:.0%} of the cores were busy before)")
        rows += times.rows(way, peer="plain torch")
        comparisons.append(compared)
    return Result(
        name="strategies",
        title="Step time of each strategy",
        method=METHOD,
        rows=rows,
        comparisons=comparisons,
    )


def run(way: str, num_pairs: int) -> Times:
    """Seconds of a step in each block after the warm-up. Raises BenchmarkError if it fails."""
    num_blocks = num_pairs + num_pairs % 2 + WARMUP_BLOCKS
    with tempfile.TemporaryDirectory(prefix="dray-bench-") as home:
        folder = Path(home)
        torchrun(
            "benchmarks.strategies.rank",
            [way, str(num_blocks), str(write_text(folder)), home],
            num_ranks=WAYS[way].num_ranks,
            timeout_s=TIMEOUT_S,
        )
        found = json.loads((folder / "times.json").read_text())
    return Times.of(found, steps_per_block=STEPS_PER_BLOCK, warmup_blocks=WARMUP_BLOCKS)
