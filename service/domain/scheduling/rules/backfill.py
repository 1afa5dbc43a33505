"""Jobs whose end is known pass on slots that others have reserved and can't use before.

A job with a limit on its running time surely ends, and its slots are free again, before a blocked
job can start that waits for others to leave. How soon these may leave is taken as early as may be:
at once where nobody knows how long they have left, after half of what a forecast says, and as soon
as they may be asked where the blocked job has, or may come to have, the right to.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from service.domain.scheduling.placement.gangs import Gangs, WorkerKind
from service.domain.scheduling.placement.pools import Pool
from service.domain.scheduling.rules.eviction import Ask, RunningJob, SlotCheck, has_right
from service.domain.scheduling.rules.order import SETTLING_S, Rank

SURE = 0.5
"""The share of a forecast for which a job surely goes on."""
MAX_BLOCKED = 100
"""Blocked jobs behind which nobody passes by its known end."""


class Backfill:
    """How long nobody can use what the blocked jobs of a plan have reserved."""

    def __init__(
        self,
        running: Sequence[RunningJob],
        ranks: Mapping[str, Rank],
        pool: Pool,
        gangs: Gangs,
        min_run_s: float,
    ) -> None:
        """pool: what will be free once those have left that were asked to, reserved or not."""
        self._running = running
        self._ranks = ranks
        self._pool = pool
        self._gangs = gangs
        self._min_run_s = min_run_s
        self._gone: set[str] = {job.job_id for job in running if job.is_leaving}
        self._num_blocked = 0
        self._free_s = math.inf

    def may_pass(self, ends_within_s: float | None) -> bool:
        """Whether a job that runs for no longer ends before any job ahead could start."""
        return ends_within_s is not None and ends_within_s + SETTLING_S <= self._free_s

    def block(self, kind: WorkerKind, least: int, rank: Rank) -> None:
        """A job of so many workers has reserved slots, and does not start yet."""
        self._num_blocked += 1
        if self._num_blocked > MAX_BLOCKED:
            self.close()
        elif self._free_s > SETTLING_S:
            self._free_s = min(self._free_s, self._starts_in_s(kind, least, rank))

    def leaves(self, job_id: str) -> None:
        """The job was asked for all its slots, so that the pool has them."""
        self._gone.add(job_id)

    def close(self) -> None:
        """From now on nobody passes."""
        self._free_s = 0.0

    def _starts_in_s(self, kind: WorkerKind, least: int, rank: Rank) -> float:
        """Seconds before which too few will have left."""
        trial = SlotCheck(kind, self._pool, self._gangs)
        if trial.room >= least:
            return 0.0  # others that are ahead of it may give up what they have reserved
        leaving = [
            (leaves_in_s(rank, job, self._ranks[job.job_id], self._min_run_s), job)
            for job in self._running
            if job.job_id not in self._gone
        ]
        leaving.sort(key=lambda each: each[0])
        for seconds, job in leaving:
            trial.give_back(Ask(job, job.slices, True))
            if trial.room >= least:
                return seconds
        return 0.0  # it waits for slots that nobody of ours holds


def leaves_in_s(coming: Rank, running: RunningJob, rank: Rank, min_run_s: float) -> float:
    """Seconds for which a running job of this rank surely keeps its slots."""
    if running.is_leaving or running.recalled or running.left_s is None:
        return 0.0
    goes_on_s = SURE * running.left_s
    if running.yields or running.spare or has_right(coming, running, rank):
        return min(goes_on_s, max(0.0, min_run_s - running.held_s))
    return goes_on_s
