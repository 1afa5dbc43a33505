"""How long a job has left, from its own progress and from the runs of earlier jobs like it."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

NEWEST = 9
"""Earlier runs that count: jobs change, and the newest tell most."""


def seconds_left(share_done: float, ran_s: float, earlier_s: Sequence[float] = ()) -> float | None:
    """Seconds of running that a job of its full size has left; None where nothing tells.

    share_done: of all its steps, from 0 to 1, as the job reports it.
    ran_s: how long it has run for that.
    earlier_s: running times of finished jobs like it, newest last. Their median counts as much as
    the job has left to show by itself.
    """
    own = ran_s * (1 - share_done) / share_done if share_done > 0 else None
    if not earlier_s:
        return own
    like_them = statistics.median(earlier_s[-NEWEST:]) * (1 - share_done)
    return like_them if own is None else share_done * own + (1 - share_done) * like_them
