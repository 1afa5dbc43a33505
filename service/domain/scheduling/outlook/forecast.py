"""The time that a job has left, from its progress and from the runs of earlier jobs like it."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

NEWEST = 9
"""Number of earlier runs that count. Jobs change, so the newest runs predict best."""
LONGEST_S = 10 * 365 * 86400.0
"""Upper bound in seconds, for jobs whose total number of steps stands for "without end"."""


def seconds_left(
    share_done: float | None, ran_s: float, earlier_s: Sequence[float] = ()
) -> float | None:
    """Return the seconds that a job of its full size has left to run; None if nothing is known.

    share_done: part of all steps that the job reports as done, from 0 to 1; None if it reports no
        steps. The longer such a job has run, the longer it is likely to go on.
    ran_s: seconds that the job has run.
    earlier_s: running times in seconds of finished jobs like it, newest last. The weight of their
        median is the share of the job that is not done.
    """
    if share_done is None:
        usual_s = statistics.median(earlier_s[-NEWEST:]) if earlier_s else 0.0
        return usual_s - ran_s if ran_s < usual_s else ran_s or None
    own = min(ran_s * (1 - share_done) / share_done, LONGEST_S) if share_done > 0 else None
    if not earlier_s:
        return own
    like_them = statistics.median(earlier_s[-NEWEST:]) * (1 - share_done)
    return like_them if own is None else share_done * own + (1 - share_done) * like_them
