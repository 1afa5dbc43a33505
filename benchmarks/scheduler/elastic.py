"""The replay with jobs that may have any number of GPUs, and a range for their batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, quantiles

from benchmarks.machine import BenchmarkError
from benchmarks.report import Result, Table
from benchmarks.scheduler import traces, workloads
from benchmarks.scheduler.elastic_policy import ElasticPolicy
from benchmarks.scheduler.measure import DATA, NUM_DRAWN, data_folder
from benchmarks.scheduler.replay import ReplayedJob, replay
from benchmarks.scheduler.tiresias import Tiresias

PUBLISHED_S = {1: 2088.8, 2: 3322.9, 3: 2188.5, 4: 2721.0}
"""Average completion time under Pollux, by workload."""
FIXED_BATCH = "ncf"
"""The application that was measured with one batch only."""

METHOD = (
    "The replay of `scheduler`, with jobs that can have 1 to 64 GPUs. The policy is "
    "`service.domain.scheduling.policy.plan`, called in the same way as by the service. A job "
    "that is resized releases its GPUs and holds the new ones for 30 s before it trains. In "
    "every round, the policy is called until no more jobs leave.",
    "For each job, the policy knows its size, its batch size, the times of its previous steps by "
    "GPUs, nodes and batch size, and an estimate of the remaining steps from the share of "
    "completed epochs and the gain of its steps. 'own reports': nothing else. 'and earlier "
    "jobs': also step times reported earlier by jobs of the same application. The policy never "
    "sees a trace, a duration or a noise scale that a job has not measured.",
    "'fixed batch': the batch size that the workload specifies for the job. 'range': the batch "
    "size begins at the smallest measured size and is at most the largest; ncf has only one "
    "batch size. The policy chooses it as for real jobs (`sizing.best_batch`), from the step "
    "times and the noise scale that the job has reported, for its GPUs. It is at most twice the "
    "previous size, and changes at most every 60 s. In the replay, changing only the batch size "
    "has no cost; in real jobs, it requires a rendezvous round.",
    "Published: Pollux (OSDI 2021), the policy of its artifact, which chooses GPUs and batch "
    "sizes. Only the duration of a call is random, because other processes use the machine. The "
    "CPU time of a call includes only the policy.",
)


@dataclass(frozen=True)
class Setting:
    """The choice that jobs have, and the knowledge that the policy has."""

    name: str
    has_range: bool
    knows_earlier: bool


SETTINGS = (
    Setting("fixed batch, own reports", has_range=False, knows_earlier=False),
    Setting("fixed batch, and earlier jobs", has_range=False, knows_earlier=True),
    Setting("range, own reports", has_range=True, knows_earlier=False),
    Setting("range, and earlier jobs", has_range=True, knows_earlier=True),
)


@dataclass
class ElasticBench:
    """Plays workloads, and notes how long the policy's calls take."""

    folder: Path
    calls_s: list[tuple[float, float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.applications = traces.load(self.folder / "traces")

    def average_s(self, rows: Sequence[workloads.Row], setting: Setting) -> float:
        jobs = workloads.jobs_of(rows, self.applications)
        if setting.has_range:
            for job in jobs:
                with_range(job)
        policy = ElasticPolicy(knows_earlier=setting.knows_earlier)
        replay(jobs, policy)
        self.calls_s += policy.calls_s
        return mean(job.completion_s for job in jobs)

    def tiresias_s(self, rows: Sequence[workloads.Row]) -> float:
        jobs = workloads.jobs_of(rows, self.applications)
        replay(jobs, Tiresias())
        return mean(job.completion_s for job in jobs)


def with_range(job: ReplayedJob) -> None:
    """Let the policy choose the job's batch."""
    if job.application.name != FIXED_BATCH:
        sizes = job.application.batch_sizes
        job.batch_size, job.batch_range = sizes[0], (sizes[0], sizes[-1])


def measure(_num_rounds: int, progress: Callable[[str], None]) -> Result:
    """Nothing is random but the time of a call, so one round is enough."""
    folder = data_folder()
    if folder is None:
        raise BenchmarkError(f"{DATA} names no folder with the traces")
    bench = ElasticBench(folder)
    published = workloads.published(folder)
    drawn = {seed: workloads.drawn(published, seed) for seed in range(NUM_DRAWN)}
    columns = ["workload", *(setting.name for setting in SETTINGS)]
    of_published = _rows(bench, published, PUBLISHED_S, progress)
    peers = {seed: bench.tiresias_s(rows) for seed, rows in drawn.items()}
    of_drawn = _rows(bench, drawn, peers, progress)
    return Result(
        name="scheduler_elastic",
        title="Average completion time of replayed elastic jobs",
        method=METHOD,
        rows=[],
        comparisons=[],
        tables=[
            Table("Published workloads, s", [*columns, "Pollux, published"], of_published),
            Table("Drawn workloads, s", [*columns, "Tiresias, tuned jobs"], of_drawn),
            Table("A call of the policy", ["", "calls", "median", "p99", "longest"], _calls(bench)),
        ],
    )


def _rows(
    bench: ElasticBench,
    sets: Mapping[int, Sequence[workloads.Row]],
    peers: Mapping[int, float],
    progress: Callable[[str], None],
) -> list[list[str]]:
    """A row for each workload, one of their means, and the ratio of these to the peer's."""
    figures = []
    rows = []
    for number, of_set in sets.items():
        taken = [*(bench.average_s(of_set, setting) for setting in SETTINGS), peers[number]]
        figures.append(taken)
        rows.append([str(number), *(f"{each:.0f}" for each in taken)])
        progress(", ".join(rows[-1]))
    means = [mean(column) for column in zip(*figures, strict=True)]
    rows.append(["mean", *(f"{each:.0f}" for each in means)])
    rows.append(["over the last column", *(f"{each / means[-1]:.3f}" for each in means)])
    return rows


def _calls(bench: ElasticBench) -> list[list[str]]:
    rows = []
    for name, times in zip(("wall", "processor"), zip(*bench.calls_s, strict=True), strict=True):
        parts = quantiles(times, n=100)
        figures = (parts[49], parts[98], max(times))
        rows.append([f"{name} time", f"{len(times):,}", *(f"{s * 1e3:.1f} ms" for s in figures)])
    return rows
