"""Generates workloads like those of GPU clusters: most jobs use one GPU and are short, most GPU
time is used by a few long jobs and gangs, and users repeat similar jobs.

Most shapes are named after the cluster that they are modelled on: Philly (Jeon et al., ATC 2019),
Helios (Hu et al., SC 2021), Alibaba PAI (Weng et al., NSDI 2022) and Acme (Hu et al., NSDI 2024).
Their medians, means and sizes are rough numbers, which are not fitted to the traces.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

DAY_S = 86400.0
LONGEST_S = 7 * DAY_S
"""Maximum running time of a generated job. Baselines assume it for jobs without a limit."""
SHORTEST_S = 20.0
WITHIN = 0.6
"""Standard deviation of the logarithm of the running times of one user's similar jobs."""
LIMITS_S = [each * 3600.0 for each in (0.5, 1, 2, 4, 8, 12, 24, 48, 96, 168)]
"""Limits that users choose: they round up."""


@dataclass(frozen=True)
class Shape:
    """Distributions of running times and sizes."""

    median_s: float
    mean_s: float
    sizes: dict[int, float]
    """Relative number of jobs by number of GPUs."""


_MANY_SMALL = {1: 70, 2: 8, 4: 8, 8: 9, 16: 3, 32: 1.5, 64: 0.5}
SHAPES = {
    "philly": Shape(780, 28_000, _MANY_SMALL),
    "helios": Shape(206, 6_650, {1: 55, 2: 12, 4: 11, 8: 16, 16: 4, 32: 1.5, 64: 0.5}),
    "pai": Shape(1_400, 12_000, {1: 80, 2: 8, 4: 5, 8: 4, 16: 2, 32: 1}),
    "acme": Shape(120, 4_000, {1: 60, 2: 5, 4: 5, 8: 22, 16: 3, 32: 2, 64: 2, 128: 1}),
    "pretraining": Shape(
        600, 5_000, {1: 20, 8: 40, 16: 12, 32: 10, 64: 8, 128: 5, 256: 3, 512: 1.5, 1024: 0.5}
    ),
}


@dataclass(frozen=True)
class WorkloadClass:
    """A kind of workload, of which any number can be generated."""

    name: str
    shape: str
    num_gpus: int
    load: float
    """GPU time of all jobs relative to the cluster's GPU time during the submissions."""
    savers: float = 0.0
    """Fraction of the users whose jobs save their state when asked to leave, and report their
    progress. The jobs of other users do neither."""
    limited: float = 1.0
    """Fraction of the jobs with a limit on their running time."""
    excess: float = 1.0
    """How many times too long the limits are at most."""
    restart_s: tuple[float, float] = (30.0, 30.0)
    """Range of the time that each start of a job takes."""
    num_users: int = 20
    num_jobs: int = 1200


@dataclass(frozen=True)
class GeneratedJob:
    name: str
    user: str
    kind: str
    """Similar jobs of the same user have the same kind."""
    submitted_s: float
    num_gpus: int
    runs_s: float
    """Time that the job trains, without the time of its starts."""
    limit_s: float | None
    """Bound on the time of a start and of the training."""
    saves: bool
    restart_s: float


CLASSES = [
    WorkloadClass("scripts, exact limits", "philly", 32, 0.9, excess=1.5),
    WorkloadClass("scripts, limits up to 10 times", "philly", 32, 0.9, excess=10.0),
    WorkloadClass("scripts, 30% limited", "philly", 64, 0.9, limited=0.3, excess=4.0),
    WorkloadClass("scripts, no limits", "helios", 64, 0.9, limited=0.0),
    WorkloadClass("scripts, light load", "helios", 64, 0.6, limited=0.5, excess=4.0),
    WorkloadClass("scripts, overload", "helios", 64, 1.2, limited=0.5, excess=4.0),
    WorkloadClass("recipes", "philly", 64, 0.9, savers=1.0, limited=0.0),
    WorkloadClass("recipes, overload", "philly", 32, 1.1, savers=1.0, limited=0.0),
    WorkloadClass("recipes, slow starts", "helios", 64, 0.9, 1.0, 0.0, restart_s=(30.0, 300.0)),
    WorkloadClass("recipes, with limits", "pai", 64, 0.95, 1.0, 1.0, 10.0),
    WorkloadClass("half recipes", "philly", 64, 0.9, 0.5, 0.5, 4.0),
    WorkloadClass("half recipes, overload", "pai", 64, 1.15, 0.5, 0.5, 4.0),
    WorkloadClass("half recipes, few users", "helios", 64, 1.0, 0.5, 0.5, 4.0, num_users=3),
    WorkloadClass("half recipes, slow starts", "acme", 128, 0.95, 0.5, 0.5, 4.0, (30.0, 300.0)),
    WorkloadClass("one node, scripts", "helios", 8, 0.8, limited=0.7, excess=4.0, num_jobs=600),
    WorkloadClass("one node, recipes", "helios", 8, 0.95, 1.0, 0.0, num_jobs=600),
    WorkloadClass("large, scripts", "pretraining", 512, 0.9, limited=0.5, excess=10.0),
    WorkloadClass("large, half recipes", "pretraining", 1024, 0.95, 0.5, 0.5, 4.0),
    WorkloadClass("largest, half recipes", "pretraining", 2048, 0.9, 0.5, 0.3, 10.0, num_users=50),
    WorkloadClass("moderate, mixed", "pai", 64, 0.75, 0.3, 0.6, 10.0, (30.0, 300.0)),
]


def generate(of: WorkloadClass, seed: int) -> list[GeneratedJob]:
    """Return the jobs of a workload in the order of submission."""
    chance = random.Random(f"{of.name} {seed}")
    shape = SHAPES[of.shape]
    kinds = _kinds(of, shape, chance)
    activity = [1 / (1 + number) for number in range(of.num_users)]
    bodies = []
    for number in range(of.num_jobs):
        user = chance.choices(range(of.num_users), activity)[0]
        of_user = kinds[user]
        at = chance.choices(range(len(of_user)), [1 / (1 + one) for one in range(len(of_user))])[0]
        median_s, size, saves, restart_s = of_user[at]
        runs_s = median_s * math.exp(chance.gauss(0, WITHIN))
        runs_s = min(max(runs_s, SHORTEST_S), LONGEST_S / 3.5)
        limit_s = None
        if chance.random() < of.limited:
            enough_s = (runs_s + restart_s) * math.exp(chance.uniform(0, math.log(of.excess)))
            limit_s = next((each for each in LIMITS_S if each >= enough_s), LIMITS_S[-1])
        kind = f"{user}-{at}"
        bodies.append(
            (f"job-{number}", f"user-{user}", kind, size, runs_s, limit_s, saves, restart_s)
        )
    work = sum(body[3] * body[4] for body in bodies)
    times = _submissions(len(bodies), work / (of.num_gpus * of.load), chance)
    return [
        GeneratedJob(name, user, kind, at, size, runs_s, limit_s, saves, restart_s)
        for at, (name, user, kind, size, runs_s, limit_s, saves, restart_s) in zip(
            times, bodies, strict=True
        )
    ]


def _kinds(
    of: WorkloadClass, shape: Shape, chance: random.Random
) -> list[list[tuple[float, int, bool, float]]]:
    """Return (median running time, size, whether it saves, time of a start) of each user's kinds of
    jobs."""
    deviation = math.sqrt(2 * math.log(shape.mean_s / shape.median_s))
    between = math.sqrt(max(0.0, deviation**2 - WITHIN**2))
    sizes = {size: each for size, each in shape.sizes.items() if size <= max(1, of.num_gpus // 2)}
    num_saving = round(of.savers * of.num_users)
    saving = set(chance.sample(range(of.num_users), num_saving))
    return [
        [
            (
                shape.median_s * math.exp(chance.gauss(0, between)),
                chance.choices(list(sizes), list(sizes.values()))[0],
                user in saving,
                chance.uniform(*of.restart_s),
            )
            for _ in range(chance.randint(3, 15))
        ]
        for user in range(of.num_users)
    ]


def _submissions(number: int, over_s: float, chance: random.Random) -> Sequence[float]:
    """Return times of submissions with more of them by day than by night, and bursts."""
    times: list[float] = []
    while len(times) < number:
        at = chance.uniform(0, over_s)
        by_day = 0.5 + 0.5 * math.sin(2 * math.pi * at / DAY_S)
        if chance.random() < 0.2 + 0.8 * by_day:
            burst = chance.choices([1, 5, 20], [90, 8, 2])[0]
            times += itertools.repeat(at, burst)
    return sorted(times[:number])
