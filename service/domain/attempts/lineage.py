"""Determines which steps of an attempt are still valid after a later attempt has resumed.

An attempt that resumes at step r continues from step r of an earlier attempt, and invalidates the
later steps of all earlier attempts. Therefore, the steps of an attempt are valid up to the lowest
step at which any later attempt began.
"""

from __future__ import annotations

from collections.abc import Mapping

NO_END = 2**63 - 1


def last_steps(starts: Mapping[int, int | None]) -> dict[int, int]:
    """Return the last valid step of each attempt; `NO_END` if all of its steps are valid.

    starts: number of steps completed before each attempt; None if the attempt never trained, or
    this number is unknown.
    """
    ends: dict[int, int] = {}
    end = NO_END
    for attempt in sorted(starts, reverse=True):
        ends[attempt] = end
        start = starts[attempt]
        if start is not None:
            end = min(end, start)
    return ends
