"""Which steps of an attempt still count after a later attempt has resumed from a checkpoint.

An attempt that resumed at step r uses all earlier steps up to r, and makes later steps of earlier
attempts void. So an attempt counts up to the lowest step at which any later attempt began.
"""

from __future__ import annotations

from collections.abc import Mapping

NO_END = 2**63 - 1


def last_steps(starts: Mapping[int, int | None]) -> dict[int, int]:
    """Return the last step that counts of each attempt; `NO_END` if no step is void.

    starts: number of steps done before each attempt; None if the attempt never trained.
    """
    ends: dict[int, int] = {}
    end = NO_END
    for attempt in sorted(starts, reverse=True):
        ends[attempt] = end
        start = starts[attempt]
        if start is not None:
            end = min(end, start)
    return ends
