"""No job waits longer than stated, whatever others submit later.

An adversary submits jobs while a gang waits: many small ones, by users who have used nothing, with
limits that they use up or not, and with forecasts that are wrong. The gang belongs to the user who
has used most.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest

from service.domain.scheduling.policy import Preempt, RunningJob, Start, WaitingJob, plan
from service.domain.scheduling.rules import order
from tests.unit.service.domain.scheduling import snapshots
from tests.unit.service.domain.scheduling.snapshots import HOUR, NOW

STEP_S = 1800.0
MOST_S = 12 * HOUR
"""Maximum limit of the adversary's jobs."""
NODES = {"m": 4.0, "n": 4.0}
GANG = 6
USED_S = 40 * 24 * HOUR


def submitted(chance: random.Random, name: str) -> WaitingJob:
    limit_s = chance.choice([0.5, 1.0, 4.0, MOST_S / HOUR]) * HOUR
    return snapshots.waiting(
        name,
        chance.choice([1, 1, 1, 2, 4]),
        owner=chance.choice(["gang", f"new-{name}", f"new-{name}", "often"]),
        yields=chance.random() < 0.3,
        left_s=chance.choice([None, 60.0, 2 * limit_s]),
        guess_s=chance.choice([None, 60.0]),
        ends_within_s=limit_s,
    )


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize(
    ("used_s", "waited_s", "bound_s"),
    [
        ({}, order.LONGEST_WAIT_S - 4 * HOUR, order.LONGEST_WAIT_S),
        ({("default", "gang"): USED_S}, order.FORGIVING_S - 4 * HOUR, order.FORGIVING_S),
    ],
    ids=["even", "ahead"],
)
def test_a_gang_starts_within_the_bound(
    seed: int, used_s: dict[tuple[str, str], float], waited_s: float, bound_s: float
) -> None:
    chance = random.Random(seed)
    gang = snapshots.waiting(
        "gang", GANG, owner="gang", yields=False, ends_within_s=6 * HOUR, waited_s=waited_s
    )
    waiting: list[WaitingJob] = []
    running: list[tuple[RunningJob, float]] = []
    for step in itertools.count():
        waiting += [submitted(chance, f"{step}-{n}") for n in range(chance.randint(1, 8))]
        waiting = waiting[-30:]
        is_there = step >= 48
        queue = [gang, *waiting] if is_there else waiting
        seen = snapshots.snapshot(queue, [job for job, _ in running], NODES, used_s=used_s)
        leaving = set()
        for decision in plan(seen, NOW):
            if isinstance(decision, Preempt):
                leaving.add(decision.job_id)
            if not isinstance(decision, Start):
                continue
            if decision.job_id == "gang":
                assert gang.waited_s > waited_s, "no slots were free at first"
                return
            job = next(one for one in waiting if one.job_id == decision.job_id)
            waiting.remove(job)
            running.append(begun(chance, job, decision))
        running = [
            (after(job), left_s - STEP_S)
            for job, left_s in running
            if left_s > STEP_S and job.job_id not in leaving
        ]
        if is_there:
            gang = replace(gang, waited_s=gang.waited_s + STEP_S)
        waiting = [replace(job, waited_s=job.waited_s + STEP_S) for job in waiting]
        assert gang.waited_s <= bound_s + MOST_S + 2 * STEP_S


def begun(chance: random.Random, job: WaitingJob, decision: Start) -> tuple[RunningJob, float]:
    """Return a running job, and the seconds that it really takes."""
    limit_s = job.ends_within_s or 0.0
    started = RunningJob(
        job.job_id,
        job.priority,
        job.seq,
        job.request,
        decision.slices,
        held_s=0.0,
        left_s=job.left_s,
        guess_s=job.guess_s,
        ends_within_s=limit_s,
        waited_s=job.waited_s,
        owner=job.owner,
        yields=job.yields,
    )
    return started, limit_s * chance.choice([0.1, 0.9, 1.0])


def after(job: RunningJob) -> RunningJob:
    left_s = max(0.0, (job.ends_within_s or 0.0) - STEP_S)
    return replace(job, held_s=job.held_s + STEP_S, ends_within_s=left_s)
