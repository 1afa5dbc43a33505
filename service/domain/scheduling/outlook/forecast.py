"""Estimates the time that a job has left from its progress and from similar earlier jobs."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

NEWEST = 9
"""Number of earlier runs to use. Jobs change over time, so the latest runs predict best."""
LONGEST_S = 10 * 365 * 86400.0
"""Upper bound in seconds, for jobs whose total number of steps is practically infinite."""


def guessed_s(ran_s: float, others_s: Sequence[float], limit_s: float | None) -> float | None:
    """Return a rough estimate of a job's remaining seconds, based only on its owner's other jobs
    and its limit; None if neither is available. The estimate is good enough for ordering jobs, but
    is not shown to users.

    ran_s: seconds that the job has run. others_s: running times of the owner's finished jobs in
    seconds. limit_s: maximum running time in seconds.
    """
    longer = [each - ran_s for each in others_s if each > ran_s]
    if not longer:
        return None if limit_s is None else max(0.0, limit_s - ran_s) / 2
    mean_s = statistics.fmean(longer)
    return mean_s if limit_s is None else min(mean_s, max(0.0, limit_s - ran_s))


def seconds_left(
    share_done: float | None, ran_s: float, earlier_s: Sequence[float] = ()
) -> float | None:
    """Return the remaining seconds of a job at its full size; None if nothing is known.

    share_done: reported share of completed steps, from 0 to 1; None if the job reports no steps.
    Once such a job has run for longer than similar jobs, its remaining time is expected to equal
    the time that it has already run. ran_s: seconds that the job has run. earlier_s: running times
    in seconds of similar finished jobs, newest last. The median of these times is weighted by the
    share of the job that is not done.
    """
    if share_done is None:
        usual_s = statistics.median(earlier_s[-NEWEST:]) if earlier_s else 0.0
        return usual_s - ran_s if ran_s < usual_s else ran_s or None
    own = min(ran_s * (1 - share_done) / share_done, LONGEST_S) if share_done > 0 else None
    if not earlier_s:
        return own
    like_them = statistics.median(earlier_s[-NEWEST:]) * (1 - share_done)
    return like_them if own is None else share_done * own + (1 - share_done) * like_them
