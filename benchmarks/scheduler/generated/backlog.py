"""Measures how well users who always have waiting jobs get their shares, and how busy the cluster
is meanwhile."""

from __future__ import annotations

import math
import multiprocessing
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import mean

from benchmarks.report import Result, Table
from benchmarks.scheduler.generated import baselines
from benchmarks.scheduler.generated.dray_policy import DrayPolicy
from benchmarks.scheduler.generated.measure import PROCESSES
from benchmarks.scheduler.generated.simulator import SimulatedJob, SimulatedPolicy, simulate
from benchmarks.scheduler.generated.workloads import DAY_S, LIMITS_S, GeneratedJob

NUM_GPUS = 32
MONTH_S = 30 * DAY_S
WAITING = 10
"""Number of jobs that each user always has waiting."""
SIZES = {1: 60, 2: 12, 4: 11, 8: 12, 16: 5}
MEDIAN_S = 1500.0
KINDS = 4
LARGEST = 0.02
"""GPU time of the largest job, relative to the smallest share of a user in a month. A policy that
doesn't preempt can't keep the shares more precisely than by a job."""
USERS = (2, 10, 50)

METHOD = (
    f"Each user always has {WAITING} waiting jobs for 30 days on {NUM_GPUS} GPUs. Every user has "
    f"{KINDS} kinds of jobs, with 1 to 16 GPUs and lognormal running times. The largest job "
    f"takes {LARGEST:.0%} of the smallest share of a user in this time. The users have the "
    "weights 1, 2, 3, 4, 1, 2, and so on. Scripts have limits up to four times their running "
    "time and can't be preempted; recipes have no limits and can be preempted.",
    "Fair share is EASY backfill in the order of Slurm's multifactor priority, with the same "
    "weights. The share of a user is compared with the one that follows from the weights; the "
    "table has the smallest and the largest over all users and rounds.",
)


@dataclass(frozen=True)
class Backlog:
    """Users who submit a job whenever one of their jobs starts."""

    num_users: int
    are_recipes: bool
    seed: int = 0

    @property
    def weights(self) -> dict[str, float]:
        return {f"user{number}": 1.0 + number % 4 for number in range(self.num_users)}

    def submit(self) -> Callable[[Sequence[SimulatedJob], float], Iterator[GeneratedJob]]:
        """Return the function that submits the jobs, as `simulate` calls it."""
        users = {user: random.Random(f"{user} {self}") for user in self.weights}
        kinds = {user: [_kind(chance) for _ in range(KINDS)] for user, chance in users.items()}
        smallest = min(self.weights.values()) / sum(self.weights.values())
        largest_s = LARGEST * smallest * MONTH_S * NUM_GPUS
        submitted: Counter[str] = Counter()

        def submitting(waiting: Sequence[SimulatedJob], now: float) -> Iterator[GeneratedJob]:
            there = Counter(one.job.user for one in waiting)
            for user, chance in users.items():
                for _ in range(WAITING - there[user]):
                    kind = chance.randrange(KINDS)
                    size, usual_s = kinds[user][kind]
                    ran_s = usual_s * chance.lognormvariate(0, 0.6)
                    runs_s = max(60.0, min(ran_s, largest_s / size))
                    limit_s = None if self.are_recipes else _limit_s(runs_s, chance)
                    submitted[user] += 1
                    yield GeneratedJob(
                        f"{user}-{submitted[user]}",
                        user,
                        f"{user}-{kind}",
                        now,
                        size,
                        runs_s,
                        limit_s,
                        saves=self.are_recipes,
                        restart_s=30.0,
                    )

        return submitting


def _kind(chance: random.Random) -> tuple[int, float]:
    """Return the number of GPUs and the usual running time of a kind of jobs."""
    size = chance.choices([*SIZES], [*SIZES.values()])[0]
    return size, chance.lognormvariate(math.log(MEDIAN_S), 1.2)


def _limit_s(runs_s: float, chance: random.Random) -> float:
    needed_s = runs_s * chance.uniform(1.1, 4) + 60
    return next(each for each in LIMITS_S if each >= needed_s)


@dataclass(frozen=True)
class Shares:
    """The results of one policy."""

    utilization: float
    least: float
    """Usage of the user who got the least, relative to their share."""
    most: float


def measure(num_rounds: int, progress: Callable[[str], None]) -> Result:
    """Simulate each number of users with the seeds 0 to `num_rounds` - 1."""
    backlogs = [Backlog(users, recipes) for recipes in (False, True) for users in USERS]
    tasks = [
        (replace(each, seed=seed), name)
        for each in backlogs
        for seed in range(num_rounds)
        for name in ("fair share", "dray")
    ]
    found: dict[Backlog, dict[str, list[Shares]]] = {each: {} for each in backlogs}
    with multiprocessing.Pool(PROCESSES) as pool:
        for (backlog, name), shares in zip(tasks, pool.imap(_of_task, tasks), strict=True):
            found[replace(backlog, seed=0)].setdefault(name, []).append(shares)
            progress(f"{backlog.num_users} users, {name}: {shares.utilization:.1%} busy")
    return Result(
        name="scheduler_backlog",
        title="Shares of users who always have waiting jobs",
        method=METHOD,
        rows=[],
        comparisons=[],
        tables=[
            Table(
                "Usage in a month",
                (
                    *("jobs", "users", "busy, fair share", "busy, dray", "dray / fair share"),
                    *("shares, fair share", "shares, dray"),
                ),
                [_row(backlog, of) for backlog, of in found.items()],
            )
        ],
        raw={
            f"{'recipes' if backlog.are_recipes else 'scripts'}, {backlog.num_users} users": [
                {name: asdict(each[seed]) for name, each in of.items()}
                for seed in range(num_rounds)
            ]
            for backlog, of in found.items()
        },
    )


def _of_task(task: tuple[Backlog, str]) -> Shares:
    backlog, name = task
    weights = backlog.weights
    policy: SimulatedPolicy = (
        DrayPolicy(NUM_GPUS, weights) if name == "dray" else baselines.FairEasy(NUM_GPUS, weights)
    )
    played = simulate([], NUM_GPUS, policy, refill=backlog.submit(), until_s=MONTH_S)
    used, whole = played.busy_s, sum(played.busy_s.values())
    of_share = [
        used[user] / whole / (weight / sum(weights.values())) for user, weight in weights.items()
    ]
    return Shares(whole / (NUM_GPUS * MONTH_S), min(of_share), max(of_share))


def _row(backlog: Backlog, found: Mapping[str, Sequence[Shares]]) -> list[str]:
    fair, dray = (mean(each.utilization for each in found[name]) for name in ("fair share", "dray"))

    def off(name: str) -> str:
        least = min(each.least for each in found[name]) - 1
        most = max(each.most for each in found[name]) - 1
        return f"{least:+.1%} to {most:+.1%}"

    return [
        "recipes" if backlog.are_recipes else "scripts",
        str(backlog.num_users),
        f"{fair:.1%}",
        f"{dray:.1%}",
        f"{dray / fair:.3f}",
        off("fair share"),
        off("dray"),
    ]
