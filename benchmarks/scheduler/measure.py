"""The replay of the four published workloads."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from statistics import mean

from benchmarks.machine import BenchmarkError
from benchmarks.report import Result, Table
from benchmarks.scheduler import replay, traces
from benchmarks.scheduler.tiresias import Tiresias

DATA = "POLLUX_DATA"
"""The variable that names the folder with `traces/` and `workloads/`: those of the folder
`simulator/` of https://github.com/petuum/adaptdl, branch `osdi21-artifact`."""
PUBLISHED_S = {1: 2473.7, 2: 5145.0, 3: 3876.3, 4: 3280.3}
"""Average completion time under Tiresias, by workload."""
FAITHFUL = 0.02

METHOD = (
    "Four workloads of 160 jobs of six measured applications, on 16 nodes with 4 GPUs. The policy "
    "is asked every 60 s; each allocation holds its GPUs for 30 s before it trains. A job gets "
    "the GPUs and the batch size that its workload names. Progress is the gain of the batch, by "
    "its gradient noise scale, over the time of a step with those GPUs.",
    "Published: Pollux (OSDI 2021), its artifact's Tiresias with tuned jobs. A replay is faithful "
    "within 2% of it. Nothing is random: another run gives the same figures.",
)


def data_folder() -> Path | None:
    """The folder with the traces; None where it is not named."""
    named = os.environ.get(DATA)
    return None if named is None else Path(named)


def averages_s(folder: Path) -> dict[int, float]:
    """Average completion time under Tiresias, by workload."""
    applications = traces.load(folder / "traces")
    found = {}
    for number in PUBLISHED_S:
        path = folder / "workloads" / f"workload-{number}.csv"
        jobs = replay.workload(path, applications)
        replay.replay(jobs, Tiresias())
        found[number] = mean(job.completion_s for job in jobs)
    return found


def measure(_num_rounds: int, progress: Callable[[str], None]) -> Result:
    """Nothing is random, so one round is enough."""
    folder = data_folder()
    if folder is None:
        raise BenchmarkError(f"{DATA} names no folder with the traces")
    rows = []
    for number, average_s in averages_s(folder).items():
        away = average_s / PUBLISHED_S[number] - 1
        progress(f"workload {number}: {average_s:.1f} s")
        figures = [f"{average_s:.1f}", f"{PUBLISHED_S[number]:.1f}", f"{away:+.2%}"]
        rows.append([str(number), *figures, "yes" if abs(away) <= FAITHFUL else "no"])
    columns = ["workload", "replayed, s", "published, s", "away", "within 2%"]
    return Result(
        name="scheduler",
        title="Average completion time of replayed jobs",
        method=METHOD,
        rows=[],
        comparisons=[],
        tables=[Table("Tiresias", columns, rows)],
    )
