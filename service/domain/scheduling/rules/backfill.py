"""Backfill: jobs with a known end use slots that other jobs have reserved but can't use yet.

A job with a limit on its running time may overtake a blocked job if it is certain to end and free
its slots before the blocked job can start. The blocked job waits for running jobs to leave. Each
running job is assumed to leave as early as possible: immediately if its remaining time is unknown,
otherwise after half of the forecast time. A job that the blocked job may be entitled to evict is
assumed to leave even earlier if it can be evicted earlier.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from ray_workers.shared.contracts import Slice
from service.domain.scheduling.placement.gangs import Gangs, WorkerKind
from service.domain.scheduling.placement.pools import Pool
from service.domain.scheduling.rules.eviction import Ask, RunningJob, SlotCheck, has_right
from service.domain.scheduling.rules.order import SETTLING_S, Rank

SURE = 0.5
"""Fraction of its forecast remaining time for which a job is assumed to be certain to keep
running."""
MAX_BLOCKED = 100
"""Maximum number of blocked jobs that a job may overtake."""


class Backfill:
    """Tracks how long the slots reserved by a plan's blocked jobs are certain to remain unused."""

    def __init__(
        self,
        running: Sequence[RunningJob],
        ranks: Mapping[str, Rank],
        pool: Pool,
        gangs: Gangs,
        min_run_s: float,
    ) -> None:
        """`pool` contains the slots that are free once all jobs that were asked to leave have left,
        whether or not they are reserved."""
        self._running = running
        self._ranks = ranks
        self._pool = pool
        self._gangs = gangs
        self._min_run_s = min_run_s
        self._kept = {job.job_id: list(job.slices) for job in running}
        """For each job, the slots that the job was not asked to release."""
        self._num_blocked = 0
        self._free_s = math.inf

    def may_pass(self, ends_within_s: float | None) -> bool:
        """Whether a job that ends within this time ends before any blocked job could start."""
        return ends_within_s is not None and ends_within_s + SETTLING_S <= self._free_s

    def block(self, kind: WorkerKind, least: int, rank: Rank) -> None:
        """Record a job with `least` workers that has reserved slots but can't start yet."""
        self._num_blocked += 1
        if self._num_blocked > MAX_BLOCKED:
            self.close()
        elif self._free_s > SETTLING_S:
            self._free_s = min(self._free_s, self._starts_in_s(kind, least, rank))

    def leaves(self, job_id: str, slices: Sequence[Slice]) -> None:
        """Record that the job was asked for these slots, which the pool therefore already
        contains."""
        kept = self._kept[job_id]
        for part in slices:
            if part in kept:  # a group may have lost slots since it was asked for them
                kept.remove(part)

    def close(self) -> None:
        """Prevent more jobs from overtaking the blocked jobs."""
        self._free_s = 0.0

    def _starts_in_s(self, kind: WorkerKind, least: int, rank: Rank) -> float:
        """Return the minimum number of seconds until enough slots can be free."""
        trial = SlotCheck(kind, self._pool, self._gangs)
        if trial.capacity >= least:
            return 0.0  # jobs ahead of this job may give up their reserved slots
        leaving = [
            (leaves_in_s(rank, job, self._ranks[job.job_id], self._min_run_s), job)
            for job in self._running
            if self._kept[job.job_id]
        ]
        leaving.sort(key=lambda each: each[0])
        for seconds, job in leaving:
            trial.release(Ask(job, tuple(self._kept[job.job_id]), True))
            if trial.capacity >= least:
                return seconds
        return 0.0  # the job waits for slots that no job of dray holds


def leaves_in_s(coming: Rank, running: RunningJob, rank: Rank, min_run_s: float) -> float:
    """Return the seconds for which a running job of this rank is certain to keep its slots."""
    if running.is_leaving or running.recalled or running.left_s is None:
        return 0.0
    goes_on_s = SURE * running.left_s
    if running.yields or running.spare or has_right(coming, running, rank):
        return min(goes_on_s, max(0.0, min_run_s - running.held_s))
    return goes_on_s
