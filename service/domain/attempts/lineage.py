"""Determines which steps of an attempt still count after a later attempt has resumed.

An attempt that resumed at step r builds on the steps up to r of earlier attempts, and invalidates
their later steps. An attempt therefore counts up to the lowest step at which any later attempt
began.
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
