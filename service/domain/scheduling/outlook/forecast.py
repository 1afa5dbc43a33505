"""How long a job has left, from its own progress and from the runs of earlier jobs like it."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

NEWEST = 9
"""Earlier runs that count: jobs change, and the newest tell most."""
LONGEST_S = 10 * 365 * 86400.0
"""A job whose total number of steps stands for "without end" has no longer left than this."""


def seconds_left(
    share_done: float | None, ran_s: float, earlier_s: Sequence[float] = ()
) -> float | None:
    """Seconds of running that a job of its full size has left; None where nothing tells.

    share_done: of all its steps, from 0 to 1, as the job reports it; None of one that reports no
        steps. The longer such a job has run, the longer it is likely to go on.
    ran_s: how long it has run for that.
    earlier_s: running times of finished jobs like it, newest last. Their median counts as much as
    the job has left to show by itself.
    """
    if share_done is None:
        usual_s = statistics.median(earlier_s[-NEWEST:]) if earlier_s else 0.0
        return usual_s - ran_s if ran_s < usual_s else ran_s or None
    own = min(ran_s * (1 - share_done) / share_done, LONGEST_S) if share_done > 0 else None
    if not earlier_s:
        return own
    like_them = statistics.median(earlier_s[-NEWEST:]) * (1 - share_done)
    return like_them if own is None else share_done * own + (1 - share_done) * like_them
