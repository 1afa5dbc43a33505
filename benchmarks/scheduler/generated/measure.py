"""Compares dray's policy with backfill and with preemptive policies on generated workloads."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import mean, median

from benchmarks.report import Result, Table
from benchmarks.scheduler.generated import baselines
from benchmarks.scheduler.generated.dray_policy import DrayPolicy
from benchmarks.scheduler.generated.simulator import SimulatedPolicy, simulate
from benchmarks.scheduler.generated.workloads import (
    CLASSES,
    GeneratedJob,
    WorkloadClass,
    generate,
)

PROCESSES = 2
POSSIBLE = ("fifo", "fair share", "LAS")
"""Baselines that know only what a scheduler can know."""

METHOD = (
    "Each class of workloads is generated with as many seeds as there are rounds. Running times "
    "are lognormal, with rough medians and means in the manner of four published clusters; they "
    "are not fitted to traces. Jobs of one kind are alike, users and kinds follow Zipf's law, and "
    "more jobs are submitted by day. A cluster has equal GPUs, and a gang can use any of them. "
    "Only jobs that save their state can be preempted: they keep their GPUs for 15 s, and pay for "
    "another start.",
    "Baselines: fifo and fair share are EASY backfill, in the order of submission and in the order "
    "of Slurm's multifactor priority. LAS runs the jobs with less than a GPU-hour of service "
    "first, and preempts others. Jobs without a limit count as jobs of seven days. SJF and SRPT "
    "know the running times: EASY backfill in the order of running times, and preemption by "
    "remaining GPU time.",
    "dray is `service.domain.scheduling.policy.plan`, on nodes of 8 GPUs. It knows the limits, the "
    "progress of jobs that save their state, and the running times of earlier jobs of the same "
    "kind. Nothing depends on the machine: another run gives the same figures.",
    "A completion time includes the time of waiting. The worst user is the one with the highest "
    "mean slowdown: completion time over running time. Lost time is the GPU time of saves and of "
    "starts after the first, relative to the GPU time that all jobs held.",
)


@dataclass(frozen=True)
class Figures:
    """The results of one policy for one workload."""

    mean_s: float
    median_s: float
    p99_s: float
    worst_user: float
    """Mean slowdown of the jobs of the user for whom it is highest."""
    lost: float
    most_preemptions: int


def measure(num_rounds: int, progress: Callable[[str], None]) -> Result:
    """Simulate each class with the seeds 0 to `num_rounds` - 1."""
    tasks = [(number, seed) for number in range(len(CLASSES)) for seed in range(num_rounds)]
    found: dict[int, list[Mapping[str, Figures]]] = {}
    with multiprocessing.Pool(PROCESSES) as pool:
        for number, figures in pool.imap(_of_task, tasks):
            found.setdefault(number, []).append(figures)
            progress(f"{CLASSES[number].name}: {figures['dray'].mean_s / 60:.0f} min")
    rows = [_row(CLASSES[number], found[number]) for number in sorted(found)]
    ratios = [float(row[3]) for row in rows]
    return Result(
        name="scheduler_generated",
        title="Completion times on generated workloads",
        method=METHOD,
        rows=[],
        comparisons=[],
        tables=[
            Table(
                f"dray over the best baseline: {mean(ratios):.2f} on average",
                (
                    *("workload", "best baseline", "its mean, min", "mean", "median"),
                    *("p99 / fair share", "worst user / fair share", "mean / SJF", "mean / SRPT"),
                    *("lost time", "preemptions of a job"),
                ),
                rows,
            )
        ],
        raw={
            CLASSES[number].name: [
                {name: asdict(each) for name, each in of_seed.items()} for of_seed in found[number]
            ]
            for number in sorted(found)
        },
    )


def _of_task(task: tuple[int, int]) -> tuple[int, Mapping[str, Figures]]:
    number, seed = task
    of = CLASSES[number]
    jobs = generate(of, seed)
    return number, {name: _play(jobs, of, policy) for name, policy in _policies(of, jobs).items()}


def _policies(of: WorkloadClass, jobs: Sequence[GeneratedJob]) -> dict[str, SimulatedPolicy]:
    size = of.num_gpus
    return {
        "fifo": baselines.Easy(size),
        "fair share": baselines.FairEasy(size, dict.fromkeys((job.user for job in jobs), 1.0)),
        "LAS": baselines.Preemptive(size, baselines.attained),
        "SJF": baselines.ShortestEasy(size),
        "SRPT": baselines.Preemptive(size, baselines.remaining),
        "dray": DrayPolicy(size),
    }


def _play(jobs: Sequence[GeneratedJob], of: WorkloadClass, policy: SimulatedPolicy) -> Figures:
    played = simulate(jobs, of.num_gpus, policy)
    times = sorted(one.completion_s for one in played.jobs)
    slowdowns: dict[str, list[float]] = {}
    for one in played.jobs:
        slowdown = one.completion_s / (one.job.runs_s + one.job.restart_s)
        slowdowns.setdefault(one.job.user, []).append(slowdown)
    return Figures(
        mean_s=round(mean(times), 1),
        median_s=round(median(times), 1),
        p99_s=round(times[int(0.99 * len(times))], 1),
        worst_user=round(max(map(mean, slowdowns.values())), 3),
        lost=round(sum(one.lost_s for one in played.jobs) / sum(played.busy_s.values()), 5),
        most_preemptions=max(one.num_left for one in played.jobs),
    )


def _row(of: WorkloadClass, found: Sequence[Mapping[str, Figures]]) -> list[str]:
    def average(policy: str, name: str) -> float:
        return mean(float(getattr(each[policy], name)) for each in found)

    def ratio(name: str, peer: str) -> str:
        return f"{average('dray', name) / average(peer, name):.2f}"

    best = min(POSSIBLE, key=lambda policy: average(policy, "mean_s"))
    return [
        f"{of.name}, {of.num_gpus} GPUs, load {of.load:g}",
        best,
        f"{average(best, 'mean_s') / 60:.0f}",
        ratio("mean_s", best),
        ratio("median_s", best),
        ratio("p99_s", "fair share"),
        ratio("worst_user", "fair share"),
        ratio("mean_s", "SJF"),
        ratio("mean_s", "SRPT"),
        f"{average('dray', 'lost'):.1%}",
        str(max(each["dray"].most_preemptions for each in found)),
    ]
