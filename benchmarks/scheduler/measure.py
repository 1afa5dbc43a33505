"""The replay of the published workloads, and of others like them, under two policies."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

from benchmarks.machine import BenchmarkError
from benchmarks.report import Result, Table
from benchmarks.scheduler import traces, workloads
from benchmarks.scheduler.default_policy import DefaultPolicy
from benchmarks.scheduler.replay import ReplayedJob, ReplayedPolicy, replay
from benchmarks.scheduler.tiresias import Tiresias

DATA = "POLLUX_DATA"
"""The variable that names the folder with `traces/` and `workloads/`, which are in the folder
`simulator/` of https://github.com/petuum/adaptdl, branch `osdi21-artifact`."""
PUBLISHED_S = {1: 2473.7, 2: 5145.0, 3: 3876.3, 4: 3280.3}
"""Average completion time under Tiresias, by workload."""
FAITHFUL = 0.02
NUM_DRAWN = 10
WORST = 0.01
"""The share of the jobs that took longest."""

METHOD = (
    "Four workloads with 160 jobs of six measured applications run on 16 nodes with 4 GPUs. The "
    "policy is called every 60 s, and each allocation holds its GPUs for 30 s before the job "
    "trains. A job has the number of GPUs and the batch size that its workload specifies. Its "
    "progress is the gain of the batch, according to its gradient noise scale, over the duration "
    "of a step with these GPUs.",
    "Published: Pollux (OSDI 2021), the Tiresias of its artifact with tuned jobs. A replay "
    "within 2% of it counts as faithful. Nothing is random: another run gives the same figures.",
    "Ten more workloads are drawn with fixed seeds: the arrivals of a published workload, each "
    "shifted by up to a minute, with jobs drawn from all four. Each job belongs to one of eight "
    "users, drawn with a fixed seed; user k has weight 1 / k.",
    "dray is `service.domain.scheduling.policy.plan`, called in the same way as by the service. "
    "It knows what jobs report: the share of completed epochs and the elapsed time, and the run "
    "times of previous jobs with the same application, size and batch size. A slowdown is a "
    "job's completion time relative to its completion time alone on the cluster. The worst user "
    "is the one with the highest mean slowdown.",
    "The tables and plots are created with `POLLUX_DATA=FOLDER python -m benchmarks scheduler`, "
    "which takes a minute.",
)


def data_folder() -> Path | None:
    """The folder with the traces; None where it is not named."""
    named = os.environ.get(DATA)
    return None if named is None else Path(named)


@dataclass(frozen=True)
class Figures:
    """The completion times of one workload under one policy."""

    completion_s: Sequence[float]
    slowdown: Mapping[str, float]
    """Mean slowdown of the jobs of each user."""
    held: Sequence[int]
    """GPUs in each round."""

    @property
    def average_s(self) -> float:
        return mean(self.completion_s)

    @property
    def worst_user(self) -> float:
        """Mean slowdown of the user that has the highest."""
        return max(self.slowdown.values())


class Pair(NamedTuple):
    """One workload under both policies."""

    dray: Figures
    tiresias: Figures

    def as_raw(self) -> dict[str, Any]:
        return {
            name: {
                "completion_s": [round(seconds, 1) for seconds in figures.completion_s],
                "slowdown": {user: round(mean, 3) for user, mean in figures.slowdown.items()},
            }
            for name, figures in self._asdict().items()
        }


class Bench:
    """Plays workloads, and knows how long each kind of job takes alone."""

    def __init__(self, folder: Path) -> None:
        self.applications = traces.load(folder / "traces")
        self._alone_s: dict[tuple[str, int, int], float] = {}

    def play(self, rows: Sequence[workloads.Row], policy: ReplayedPolicy, seed: int) -> Figures:
        jobs = workloads.jobs_of(rows, self.applications, seed)
        held = replay(jobs, policy)
        slowdowns: dict[str, list[float]] = {}
        for job in jobs:
            slowdown = job.completion_s / self._alone(job)
            slowdowns.setdefault(job.user, []).append(slowdown)
        return Figures(
            completion_s=[job.completion_s for job in jobs],
            slowdown={user: mean(slowdowns[user]) for user in sorted(slowdowns)},
            held=held,
        )

    def _alone(self, job: ReplayedJob) -> float:
        kind = (job.application.name, job.num_gpus, job.batch_size)
        if kind not in self._alone_s:
            self._alone_s[kind] = job.alone_s
        return self._alone_s[kind]


def worst_s(figures: Sequence[Figures]) -> list[float]:
    """The completion times of the worst 1% of all jobs, the least first."""
    times = sorted(time for each in figures for time in each.completion_s)
    return times[-max(1, round(WORST * len(times))) :]


def measure(_num_rounds: int, progress: Callable[[str], None]) -> Result:
    """Nothing is random, so one round is enough."""
    from benchmarks.scheduler import pictures

    folder = data_folder()
    if folder is None:
        raise BenchmarkError(f"{DATA} names no folder with the traces")
    bench = Bench(folder)
    of_published = workloads.published(folder)
    of_drawn = {seed: workloads.drawn(of_published, seed) for seed in range(NUM_DRAWN)}
    published = _pairs(bench, "published", of_published, progress)
    drawn = _pairs(bench, "drawn", of_drawn, progress)
    columns = ["workload", "Tiresias, s", "dray, s", "average", "p99", "worst 1%", "worst user"]
    return Result(
        name="scheduler",
        title="Average completion time of replayed jobs",
        method=METHOD,
        rows=[],
        comparisons=[],
        tables=[
            Table(
                "Tiresias, replayed",
                ["workload", "replayed, s", "published, s", "away", "within 2%"],
                [_faithful(number, pair.tiresias.average_s) for number, pair in published.items()],
            ),
            Table(
                "dray over Tiresias",
                columns,
                [*_rows("published", published), *_rows("drawn", drawn)],
            ),
        ],
        pictures=pictures.draw(published, drawn),
        raw={f"published {number}": pair.as_raw() for number, pair in published.items()},
    )


def _pairs(
    bench: Bench,
    kind: str,
    sets: Mapping[int, Sequence[workloads.Row]],
    progress: Callable[[str], None],
) -> dict[int, Pair]:
    """Play each workload under both policies."""
    pairs = {}
    for number, of_set in sets.items():
        dray = bench.play(of_set, DefaultPolicy(), number)
        pairs[number] = Pair(dray, bench.play(of_set, Tiresias(), number))
        progress(", ".join(_row(f"{kind} {number}", [pairs[number]])))
    return pairs


def _faithful(number: int, average_s: float) -> list[str]:
    away = average_s / PUBLISHED_S[number] - 1
    within = "yes" if abs(away) <= FAITHFUL else "no"
    return [str(number), f"{average_s:.1f}", f"{PUBLISHED_S[number]:.1f}", f"{away:+.2%}", within]


def _rows(kind: str, pairs: Mapping[int, Pair]) -> list[list[str]]:
    """A row for each workload, and one of all: the mean of the ratios of the averages, the 99th
    percentile of all jobs and the mean of those above it, the highest ratio of the worst users."""
    rows = [_row(f"{kind} {number}", [pair]) for number, pair in pairs.items()]
    return [*rows, _row(f"all {len(pairs)} {kind}", list(pairs.values()))]


def _row(name: str, pairs: Sequence[Pair]) -> list[str]:
    ours, theirs = zip(*pairs, strict=True)
    return [
        name,
        f"{mean(each.average_s for each in theirs):.0f}",
        f"{mean(each.average_s for each in ours):.0f}",
        f"{mean(one.average_s / other.average_s for one, other in pairs):.3f}",
        f"{worst_s(ours)[0] / worst_s(theirs)[0]:.3f}",
        f"{mean(worst_s(ours)) / mean(worst_s(theirs)):.3f}",
        f"{max(one.worst_user / other.worst_user for one, other in pairs):.3f}",
    ]
