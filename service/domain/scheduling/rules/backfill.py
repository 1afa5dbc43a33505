"""Backfill: jobs with a known end use slots that the first blocked job has reserved but can't use
yet (EASY backfill, Lifka 1995).

The blocked job waits for running jobs to end. It reserves the slots of the jobs that are forecast
to end first. A job with a limit may overtake the blocked job if the limit guarantees that the job
ends before enough running jobs have reached their own limits. In simulations, clusters were busier
with this rule than when overtaking jobs had to end before the forecast start of the blocked job.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate, groupby, pairwise
from typing import NamedTuple

from ray_workers.shared.slices import Slice
from service.domain.scheduling.placement.gangs import Gangs, WorkerKind
from service.domain.scheduling.placement.pools import Pool
from service.domain.scheduling.rules.eviction import Ask, RunningJob, SlotCheck
from service.domain.scheduling.rules.order import SETTLING_S

Ending = tuple[str, WorkerKind, tuple[Slice, ...]]
"""A running job that is expected to end, and the slots that it then releases."""


MAX_PASSES = 10
"""Maximum number of times that the start of a blocked job is postponed because of reservations."""

Closed = Callable[[float], frozenset[str]]
"""Returns the nodes that a job could not use if it started after this number of seconds."""


def never_closed(in_s: float) -> frozenset[str]:
    return frozenset()


class Blocked(NamedTuple):
    """When a blocked job is expected to start, and where it can't."""

    ending: list[Ending]
    """The running jobs that are expected to end before."""
    closed: frozenset[str]
    """The nodes that the job can't use then."""
    is_too_late: bool = False
    """Whether slots are free only once reservations prevent the job from using them. The job is not
    recorded."""


class Backfill:
    """Tracks when the first blocked job of a plan is expected to start."""

    def __init__(self, running: Sequence[RunningJob], pool: Pool, gangs: Gangs) -> None:
        """`running` contains every job that holds slots. `pool` contains the slots that are free
        once all jobs that were asked to leave have left, whether or not they are reserved."""
        self._running = running
        self._pool = pool
        self._gangs = gangs
        self._kept = {job.job_id: list(job.slices) for job in running}
        """For each job, the slots that the job was not asked to release."""
        self.is_blocked = False
        """Whether a job that can't start has been recorded."""
        self._is_closed = False
        self._starts_in_s = math.inf

    def may_pass(self, ends_within_s: float | None) -> bool:
        """Whether a job that ends within this time ends before the blocked job starts."""
        if ends_within_s is None or self._is_closed:
            return False
        return ends_within_s + SETTLING_S <= self._starts_in_s

    def block(
        self, kind: WorkerKind, least: int, *, by_limits: bool, but: Closed = never_closed
    ) -> Blocked | None:
        """Record the first job that can't start yet. Returns the running jobs that are expected to
        end before the blocked job starts; the blocked job starts only on nodes that are not closed
        at that time. With `by_limits`, these are the jobs whose time limits expire first, so that
        jobs that run longer than forecast can't delay it again and again.

        Returns None, and records nothing, if there are too few slots for the job even after all
        running jobs have ended."""
        closed = frozenset[str]()
        for _ in range(MAX_PASSES):
            latest = self._waits_for(kind, least, latest_end_in_s, closed)
            if latest is None and not closed:
                return None
            if latest is None:
                break
            expected = latest
            if not by_limits:
                expected = self._waits_for(kind, least, ends_in_s, closed) or latest
            more = but(expected[0])
            if more <= closed:
                self.is_blocked, self._starts_in_s = True, latest[0]
                return Blocked(expected[1], closed)
            closed |= more
        return Blocked([], closed, is_too_late=True)

    def _waits_for(
        self,
        kind: WorkerKind,
        least: int,
        end_in_s: Callable[[RunningJob], float],
        closed: frozenset[str],
    ) -> tuple[float, list[Ending]] | None:
        """Return the number of seconds until enough slots are free, and the jobs that have ended by
        then; None if too few slots are free even after all running jobs have ended. `end_in_s`
        returns the number of seconds until a running job ends."""

        def order(job: RunningJob) -> tuple[bool, float]:
            # A job without a limit may run for any time, so wait for other jobs if that suffices.
            is_unsure = end_in_s is latest_end_in_s and job.ends_within_s is None
            return is_unsure, end_in_s(job)

        holding = [job for job in self._running if self._kept[job.job_id]]
        holding.sort(key=order)
        number = self._num_to_end(kind, least, holding, order, closed)
        if number is None:
            return None
        ending = [
            (job.job_id, self._gangs.of(job.request).kind, tuple(self._kept[job.job_id]))
            for job in holding[:number]
        ]
        return max(map(end_in_s, holding[:number]), default=0.0), ending

    def _num_to_end(
        self,
        kind: WorkerKind,
        least: int,
        holding: Sequence[RunningJob],
        order: Callable[[RunningJob], tuple[bool, float]],
        closed: frozenset[str],
    ) -> int | None:
        """Return how many of these jobs, which are sorted by `order`, must end until enough slots
        are free; None if too few slots are free even after all of them have ended."""
        sizes = (len([*together]) for _, together in groupby(holding, order))
        moments = [*accumulate(sizes, initial=0)]

        def fits(before: int, number: int, trial: SlotCheck) -> bool:
            for job in holding[before:number]:
                trial.release(Ask(job, tuple(self._kept[job.job_id]), True))
            return trial.capacity >= least

        if kind.is_whole:  # each check places the whole gang, which takes long
            new = partial(SlotCheck, kind, self._pool, self._gangs, closed=closed)
            at = bisect_left(moments, True, key=lambda number: fits(0, number, new()))
            return moments[at] if at < len(moments) else None
        trial = SlotCheck(kind, self._pool, self._gangs, closed=closed)
        spans = pairwise([0, *moments])
        return next((number for before, number in spans if fits(before, number, trial)), None)

    def leaves(self, job_id: str, slices: Sequence[Slice]) -> None:
        """Record that the job was asked to release these slots. The pool already contains them."""
        kept = self._kept[job_id]
        for part in slices:
            if part in kept:  # a group may have lost slots since it was asked for them
                kept.remove(part)

    def close(self) -> None:
        """Prevent more jobs from overtaking the blocked job."""
        self._is_closed = True


def latest_end_in_s(running: RunningJob) -> float:
    """Return the maximum time in seconds until a running job releases its slots, according to its
    limit, or the expected time if the job has no limit."""
    return ends_in_s(running) if running.ends_within_s is None else running.ends_within_s


def ends_in_s(running: RunningJob) -> float:
    """Return the expected seconds until a running job releases its slots."""
    left_s = running.guess_s if running.left_s is None else running.left_s
    if left_s is None:
        left_s = running.held_s + SETTLING_S  # as long again
    return min(left_s, math.inf if running.ends_within_s is None else running.ends_within_s)
