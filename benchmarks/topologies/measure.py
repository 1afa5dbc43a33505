"""Samples a second and accuracy of the same job in each topology, with and without a slow rank."""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.machine import wait_until_quiet
from benchmarks.report import Result, Table
from benchmarks.topologies.work import (
    CLAIMED,
    DEFAULT,
    EPOCHS,
    NUM_RANKS,
    NUM_SAMPLES,
    SHARE_S,
    SLOW_RANK,
    SLOWNESS,
    TOPOLOGIES,
    document,
)
from benchmarks.torchrun import torchrun

MOST_SEEDS = 5
GOAL_TIMES, GOAL_POINTS = 4.0, 0.5
TIMEOUT_S = 900.0
METHOD = [
    f"{NUM_RANKS} ranks on CPU over gloo teach an mlp of width 128 `sklearn://digits`: {EPOCHS} "
    "epochs of batches of 64, sgd with momentum 0.9, a rate of 0.1 with a warm-up over one epoch "
    "and a cosine after it, the same for all. Each seed also chooses the validation split of 359 "
    "images, so that one image is 0.28 points.",
    f"A rank sleeps for {SHARE_S * 1e3:g} ms for each share that it computes, as while a GPU "
    f"computes it: the ranks share fewer cores than they are. The slow one, rank {SLOW_RANK}, "
    f"sleeps {SLOWNESS} times as long. Timed is from the first step to the last evaluation, for "
    "which all ranks meet.",
    "The topologies take turns, seed by seed. Samples a second are the median over the seeds, "
    f"accuracy is the mean. The goal with a slow rank: at least {GOAL_TIMES:g} times the samples a "
    f"second of {DEFAULT}, and an accuracy within {GOAL_POINTS} points of it.",
]


@dataclass(frozen=True)
class Run:
    samples_per_s: float
    accuracy: float
    """Percent on the validation split."""


def measure(num_rounds: int, progress: Callable[[str], None]) -> Result:
    """num_rounds: at most so many seeds."""
    seeds = range(min(num_rounds, MOST_SEEDS))
    tables, raw = [], {}
    for title, slowness in {
        "All ranks equally fast": 1.0,
        f"Rank {SLOW_RANK} slowed {SLOWNESS} times": float(SLOWNESS),
    }.items():
        runs: dict[str, list[Run]] = {topology: [] for topology in TOPOLOGIES}
        for seed in seeds:
            wait_until_quiet()
            for topology, found in runs.items():
                found.append(run(topology, seed, slowness))
                progress(f"{title}: {topology}, seed {seed}: {found[-1]}")
        tables.append(_table(title, runs, has_goal=slowness > 1.0))
        raw[title] = {
            topology: [(each.samples_per_s, each.accuracy) for each in found]
            for topology, found in runs.items()
        }
    return Result(
        name="topologies",
        title="Ways to keep copies in step, with a slow rank and without",
        method=METHOD,
        rows=[],
        comparisons=[],
        tables=tables,
        raw=raw,
    )


def run(topology: str, seed: int, slowness: float) -> Run:
    """Train once. BenchmarkError if it fails."""
    with tempfile.TemporaryDirectory(prefix="dray-bench-") as home:
        folder = Path(home)
        job = folder / "job.json"
        job.write_text(json.dumps(document(topology, seed)))
        torchrun(
            "benchmarks.topologies.rank",
            [str(job), home, str(slowness)],
            num_ranks=NUM_RANKS,
            timeout_s=TIMEOUT_S,
        )
        took_s = json.loads((folder / "seconds.json").read_text())
        (metrics,) = folder.rglob("metrics.json")
        accuracy = 100 * float(json.loads(metrics.read_text())["val/accuracy"])
    return Run(NUM_SAMPLES * EPOCHS / took_s, accuracy)


def _table(title: str, runs: dict[str, list[Run]], *, has_goal: bool) -> Table:
    speeds = {name: statistics.median(r.samples_per_s for r in of) for name, of in runs.items()}
    means = {name: statistics.mean(r.accuracy for r in of) for name, of in runs.items()}
    rows = []
    for name, found in runs.items():
        times, points = speeds[name] / speeds[DEFAULT], means[name] - means[DEFAULT]
        met = ""
        if has_goal and name in CLAIMED:
            met = "yes" if times >= GOAL_TIMES and points >= -GOAL_POINTS else "no"
        each = ", ".join(f"{one.accuracy:.1f}" for one in found)
        speed = (f"{speeds[name]:,.0f}", f"{times:.2f}")
        rows.append([name, *speed, f"{means[name]:.2f}", each, f"{points:+.2f}", met])
    columns = ["", "samples/s", f"of {DEFAULT}", "accuracy, %", "each seed", "points", "goal met"]
    return Table(title, columns, rows)
