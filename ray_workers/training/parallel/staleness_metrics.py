"""Staleness metrics, whose names are the same for every kind of `sync` with stale updates."""

from __future__ import annotations

import bisect
import itertools
from collections import Counter
from collections.abc import Mapping

from ray_workers.shared.contracts import STALENESS_COUNT, STALENESS_MAX, STALENESS_MEAN

PERCENTILES = (50, 95, 99)
TOPS = (0, *(2**power for power in range(8)))
"""Upper bounds of the histogram's buckets, except for the last bucket, which has no upper bound."""


def staleness_metrics(counts: Mapping[int, int]) -> dict[str, float]:
    """Return the mean, percentiles, maximum and histogram of the staleness. Empty if there are no
    updates.

    counts: number of updates by staleness.
    """
    found = sorted(item for item in counts.items() if item[1])
    total = sum(count for _, count in found)
    if not total:
        return {}
    metrics = {
        STALENESS_MEAN: sum(stale * count for stale, count in found) / total,
        STALENESS_MAX: float(found[-1][0]),
    }
    for percent in PERCENTILES:
        seen = itertools.accumulate(count for _, count in found)
        at = next(n for n, number in enumerate(seen) if number >= total * percent / 100)
        metrics[f"sync/staleness_p{percent}"] = float(found[at][0])
    histogram: Counter[str] = Counter()
    for stale, count in found:
        histogram[STALENESS_COUNT + _bucket(stale)] += count
    return metrics | {name: float(count) for name, count in histogram.items()}


def _bucket(staleness: int) -> str:
    """Return the name of the bucket for a staleness. Names have leading zeros, so that they sort
    numerically."""
    at = bisect.bisect_left(TOPS, staleness)
    low = TOPS[at - 1] + 1 if at else 0
    if at == len(TOPS):
        return f"{low:03}_up"
    return f"{low:03}" if low == TOPS[at] else f"{low:03}_{TOPS[at]:03}"
