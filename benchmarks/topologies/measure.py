"""The price of the same job in each topology, with and without a slow rank: time, accuracy, bytes
and staleness, and the loss against each of them."""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
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
from ray_workers.shared import spool_reader
from ray_workers.shared.contracts import (
    ALL_SENT_BYTES,
    CONSENSUS_DISTANCE,
    STALENESS_MAX,
    STALENESS_MEAN,
)
from ray_workers.shared.frames import MetricsReport
from service.ingest.decoding import decode

MOST_SEEDS = 5
NUM_EVALUATIONS = 8
"""Evaluations of the run whose loss is drawn."""
GOAL_TIMES, GOAL_POINTS = 4.0, 0.5
TIMEOUT_S = 900.0
MOST_SPOOL_BYTES = 64 << 20
METHOD = [
    f"{NUM_RANKS} ranks on CPU over gloo train an mlp of width 128 on `sklearn://digits` for "
    f"{EPOCHS} epochs in batches of 64, with sgd without momentum and a learning rate of 0.3 "
    "with warm-up over one epoch and then cosine decay. All topologies use these settings: with "
    "a momentum of 0.9 and a rate of 0.1, asynchronous updates diverge. Each seed also "
    "determines the validation split of 359 images, so that one image is 0.28 points. A "
    "parameter server is one of the ranks, and only the others compute.",
    f"A rank sleeps for {SHARE_S * 1e3:g} ms for each quarter of a batch that it computes, as if "
    "a GPU computed it, because there are fewer cores than ranks. The slow rank, rank "
    f"{SLOW_RANK}, sleeps {SLOWNESS} times as long. The time is measured from the first step to "
    "the last evaluation, in which all ranks take part.",
    "The topologies take turns, seed by seed. Samples per second are the median over the seeds, "
    f"and accuracy is the mean. The goal with a slow rank is at least {GOAL_TIMES:g} times the "
    f"samples per second of {DEFAULT}, and an accuracy within {GOAL_POINTS} points of it.",
    f"Bytes, staleness and the curves come from one additional run each, with {NUM_EVALUATIONS} "
    "evaluations: `sync/sent_bytes`, the bytes that all ranks together send in a step, as "
    "counted by the kernel (for parameter servers, the weights and gradients that they count "
    "themselves), `sync/staleness_mean` and `_max`, and `train/consensus_distance` at the end. "
    "Evaluations make all ranks wait for the slow rank, so these runs are slower than the timed "
    "ones.",
]


@dataclass(frozen=True)
class Run:
    samples_per_s: float
    accuracy: float
    """Percent on the validation split."""


@dataclass(frozen=True)
class Curve:
    """A run at each of its evaluations."""

    steps: Sequence[int]
    seconds: Sequence[float]
    loss: Sequence[float]
    sent_bytes: Sequence[float]
    """Bytes sent by all ranks up to a step."""
    staleness_mean: float | None
    staleness_max: float | None
    distance: float | None


def measure(num_rounds: int, progress: Callable[[str], None]) -> Result:
    """num_rounds: most seeds."""
    from benchmarks.topologies.pictures import draw  # needs the extra `bench`

    seeds = range(min(num_rounds, MOST_SEEDS))
    tables, pictures, raw = [], [], {}
    for title, name, slowness in (
        ("All ranks equally fast", "topologies_even", 1.0),
        (f"Rank {SLOW_RANK} slowed {SLOWNESS} times", "topologies_slow", float(SLOWNESS)),
    ):
        runs: dict[str, list[Run]] = {topology: [] for topology in TOPOLOGIES}
        for seed in seeds:
            wait_until_quiet()
            for topology, found in runs.items():
                found.append(run(topology, seed, slowness))
                progress(f"{title}: {topology}, seed {seed}: {found[-1]}")
        curves = {topology: curve(topology, slowness) for topology in TOPOLOGIES}
        tables.append(_table(title, runs, has_goal=slowness > 1.0))
        tables.append(_costs(f"{title}: the cost of keeping in step", curves))
        pictures.append(draw(name, title, curves))
        raw[title] = {
            topology: {
                "runs": [(each.samples_per_s, each.accuracy) for each in found],
                "curve": asdict(curves[topology]),
            }
            for topology, found in runs.items()
        }
    return Result(
        name="topologies",
        title="Ways to keep copies in step, with a slow rank and without",
        method=METHOD,
        rows=[],
        comparisons=[],
        tables=tables,
        pictures=pictures,
        raw=raw,
    )


def run(topology: str, seed: int, slowness: float) -> Run:
    """Train once. BenchmarkError if it fails."""
    with tempfile.TemporaryDirectory(prefix="dray-bench-") as home:
        folder = Path(home)
        *_, took_s = _train(folder, document(topology, seed), slowness)
        (metrics,) = folder.rglob("metrics.json")
        accuracy = 100 * float(json.loads(metrics.read_text())["val/accuracy"])
    return Run(NUM_SAMPLES * EPOCHS / took_s, accuracy)


def curve(topology: str, slowness: float) -> Curve:
    """Train once, with some evaluations on the way. BenchmarkError if it fails."""
    with tempfile.TemporaryDirectory(prefix="dray-bench-") as home:
        folder = Path(home)
        job = document(topology, seed=0, num_evaluations=NUM_EVALUATIONS)
        seconds = _train(folder, job, slowness)
        content = spool_reader.read(folder / "spool-0", 0, MOST_SPOOL_BYTES)
        reports = [
            report
            for report in map(decode, spool_reader.decode("r0.0.metrics", content))
            if isinstance(report, MetricsReport) and "val/loss" in report.values
        ]
    steps = [report.step for report in reports]
    lengths = [end - start for start, end in pairwise([0, *steps])]
    sent, total = [], 0.0
    for report, length in zip(reports, lengths, strict=True):
        total += report.values[ALL_SENT_BYTES] * length
        sent.append(total)
    last = reports[-1].values
    return Curve(
        steps,
        seconds,
        [report.values["val/loss"] for report in reports],
        sent,
        last.get(STALENESS_MEAN),
        last.get(STALENESS_MAX),
        last.get(CONSENSUS_DISTANCE),
    )


def _train(folder: Path, job: Mapping[str, object], slowness: float) -> list[float]:
    """The time of each evaluation, since the first step."""
    path = folder / "job.json"
    path.write_text(json.dumps(job))
    torchrun(
        "benchmarks.topologies.rank",
        [str(path), str(folder), str(slowness)],
        num_ranks=NUM_RANKS,
        timeout_s=TIMEOUT_S,
    )
    seconds: list[float] = json.loads((folder / "seconds.json").read_text())
    return seconds


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


def _costs(title: str, curves: Mapping[str, Curve]) -> Table:
    rows = []
    for name, found in curves.items():
        sent, steps = found.sent_bytes[-1], found.steps[-1]
        of_default = sent / curves[DEFAULT].sent_bytes[-1]
        rows.append(
            [
                name,
                str(steps),
                f"{found.seconds[-1]:.1f}",
                f"{sent / steps / 1e3:,.0f}",
                f"{of_default:.2f}",
                *(
                    "" if value is None else f"{value:.3g}"
                    for value in (found.staleness_mean, found.staleness_max, found.distance)
                ),
                f"{found.loss[-1]:.4f}",
            ]
        )
    columns = ["", "steps", "seconds", "kB a step", f"of {DEFAULT}"]
    columns += ["staleness, mean", "most", "distance", "val/loss"]
    return Table(title, columns, rows)
