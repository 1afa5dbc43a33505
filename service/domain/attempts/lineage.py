"""Which steps of earlier attempts still count once a later one has resumed from a checkpoint.

An attempt that resumed at step r took everything up to r from the attempts before it, and made
their later steps void. So attempt k counts up to the least step at which an attempt after it began.
"""

from __future__ import annotations

from collections.abc import Mapping

NO_END = 2**63 - 1


def last_steps(starts: Mapping[int, int | None]) -> dict[int, int]:
    """The last step that counts of each attempt, `NO_END` if none is void.

    `starts`: for each attempt the steps already done when it began; None if it never trained.
    """
    ends: dict[int, int] = {}
    end = NO_END
    for attempt in sorted(starts, reverse=True):
        ends[attempt] = end
        start = starts[attempt]
        if start is not None:
            end = min(end, start)
    return ends
