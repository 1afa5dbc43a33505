"""Workloads of the replay: the published workloads, workloads drawn from them, and their users."""

from __future__ import annotations

import csv
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.scheduler.replay import ReplayedJob
from benchmarks.scheduler.traces import Application

NUMBERS = (1, 2, 3, 4)
NUM_USERS = 8
JITTER_S = 60.0

Row = Mapping[str, Any]


def published(folder: Path) -> dict[int, list[Row]]:
    """Return the rows of the published workloads, by number."""
    found: dict[int, list[Row]] = {}
    for number in NUMBERS:
        with (folder / "workloads" / f"workload-{number}.csv").open() as file:
            found[number] = list(csv.DictReader(file))
    return found


def drawn(of: Mapping[int, Sequence[Row]], seed: int) -> list[Row]:
    """Draw another workload, with the slightly shifted arrivals of one workload, and jobs from all
    of them."""
    chance = random.Random(seed)
    pool = [row for rows in of.values() for row in rows]
    arrivals = [float(row["time"]) for row in of[chance.choice(NUMBERS)]]
    times = sorted(max(0.0, at + chance.uniform(-JITTER_S, JITTER_S)) for at in arrivals)
    return [
        {**chance.choice(pool), "time": at, "name": f"drawn-{index}"}
        for index, at in enumerate(times)
    ]


def jobs_of(
    rows: Sequence[Row], applications: Mapping[str, Application], seed: int = 0
) -> list[ReplayedJob]:
    """Return the jobs of a workload. Users with lower numbers have more jobs."""
    chance = random.Random(seed)
    shares = [1 / (1 + user) for user in range(NUM_USERS)]
    return [
        ReplayedJob(
            name=row["name"],
            application=applications[row["application"]],
            submitted_s=float(row["time"]),
            user=f"user-{chance.choices(range(NUM_USERS), shares)[0]}",
            num_gpus=int(row["num_replicas"]),
            batch_size=int(row["batch_size"]),
        )
        for row in rows
    ]
