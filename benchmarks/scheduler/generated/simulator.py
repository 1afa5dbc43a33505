"""Simulates a cluster on which every GPU is equal and a gang can use any free GPUs."""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from benchmarks.scheduler.generated.workloads import GeneratedJob

DECISION_S = 15.0
"""Minimum seconds between two decisions."""
TICK_S = 120.0
"""Seconds between two decisions while jobs are waiting and nothing happens."""
SAVE_S = 15.0
"""Seconds for which a job that is asked to leave keeps its GPUs."""


@dataclass(eq=False)
class SimulatedJob:
    """A job and its progress. A job holds all its GPUs or none."""

    job: GeneratedJob
    seq: int
    left_s: float
    """Remaining training time. Policies without an oracle must not read it."""
    began_s: float | None = None
    """When the job received its GPUs; None while it waits."""
    is_leaving: bool = False
    ran_s: float = 0.0
    """Training time before the current start."""
    num_left: int = 0
    lost_s: float = 0.0
    """GPU-seconds of starts after the first, and of saves."""
    finished_s: float | None = None
    serial: int = 0

    @property
    def completion_s(self) -> float:
        assert self.finished_s is not None
        return self.finished_s - self.job.submitted_s

    def held_s(self, now: float) -> float:
        return 0.0 if self.began_s is None else now - self.began_s

    def trained_s(self, now: float) -> float:
        """Total training time so far. A job that is leaving does not train."""
        if self.is_leaving:
            return self.ran_s
        return self.ran_s + max(0.0, self.held_s(now) - self.job.restart_s)


class SimulatedPolicy(Protocol):
    def decide(
        self, waiting: Sequence[SimulatedJob], running: Sequence[SimulatedJob], now: float
    ) -> tuple[list[SimulatedJob], list[SimulatedJob]]:
        """Return the jobs that start now, and the jobs that are asked to leave. waiting: in the
        order of submission."""

    def ended(self, job: SimulatedJob, now: float) -> None:
        """Called when a job has finished or left its GPUs."""


Refill = Callable[[Sequence[SimulatedJob], float], Iterable[GeneratedJob]]
"""Returns the jobs that are submitted now, in addition to the jobs that wait."""


@dataclass(frozen=True)
class Played:
    jobs: Sequence[SimulatedJob]
    busy_s: Mapping[str, float]
    """GPU-seconds that jobs held, by user."""


def simulate(
    jobs: Sequence[GeneratedJob],
    num_gpus: int,
    policy: SimulatedPolicy,
    *,
    refill: Refill = lambda waiting, now: (),
    until_s: float = math.inf,
) -> Played:
    """Run until every job has finished, or until `until_s`."""
    every = [SimulatedJob(job, seq, job.runs_s) for seq, job in enumerate(jobs)]
    arrivals = iter(every)
    coming = next(arrivals, None)
    waiting: list[SimulatedJob] = []
    running: list[SimulatedJob] = []
    ends: list[tuple[float, int, int, SimulatedJob]] = []
    busy_s: defaultdict[str, float] = defaultdict(float)
    free, now, last, due = num_gpus, 0.0, -DECISION_S, True

    def holds(one: SimulatedJob) -> float:
        return one.job.num_gpus * one.held_s(now)

    while (coming is not None or running or waiting or not every) and now < until_s:
        times = [coming.job.submitted_s] if coming is not None else []
        times += [ends[0][0]] if ends else []
        times += [last + DECISION_S] if due else [last + TICK_S] if waiting else []
        now = max(now, min(times))
        while coming is not None and coming.job.submitted_s <= now:
            waiting.append(coming)
            due, coming = True, next(arrivals, None)
        for job in refill(waiting, now):
            every.append(SimulatedJob(job, len(every), job.runs_s))
            waiting.append(every[-1])
            due = True
        while ends and ends[0][0] <= now:
            _, _, serial, one = heapq.heappop(ends)
            if serial != one.serial:
                continue  # was asked to leave before this end
            busy_s[one.job.user] += holds(one)
            free += one.job.num_gpus
            running.remove(one)
            if one.is_leaving and one.left_s > 0:
                one.began_s, one.is_leaving = None, False
                waiting.append(one)
                waiting.sort(key=lambda each: each.seq)
            else:
                one.finished_s = now
            policy.ended(one, now)
            due = True
        if not (due or waiting) or now < last + (DECISION_S if due else TICK_S):
            continue
        starts, leaves = policy.decide(waiting, running, now)
        last, due = now, False
        for one in leaves:
            assert one.job.saves
            assert not one.is_leaving
            trained_s = max(0.0, one.held_s(now) - one.job.restart_s)
            if trained_s >= one.left_s:
                continue  # has just ended
            one.left_s -= trained_s
            one.ran_s += trained_s
            one.is_leaving, one.serial = True, one.serial + 1
            one.num_left += 1
            one.lost_s += one.job.num_gpus * (SAVE_S + one.job.restart_s)
            heapq.heappush(ends, (now + SAVE_S, one.seq, one.serial, one))
        for one in starts:
            free -= one.job.num_gpus
            assert free >= 0, "a policy started more than is free"
            waiting.remove(one)
            running.append(one)
            one.began_s, one.serial = now, one.serial + 1
            end_s = now + one.job.restart_s + one.left_s
            heapq.heappush(ends, (end_s, one.seq, one.serial, one))
    for one in running:
        busy_s[one.job.user] += holds(one)
    return Played(every, busy_s)
