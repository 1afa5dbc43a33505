"""The staleness of updates, as metrics of the same names for every kind of `sync` that has it."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

from ray_workers.shared.contracts import STALENESS_MAX, STALENESS_MEAN

PERCENTILES = (50, 95, 99)


def staleness_metrics(counts: Mapping[int, int]) -> dict[str, float]:
    """Mean, percentiles and maximum. counts: of each staleness, the number of updates that were so
    stale; without any there are no metrics."""
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
    return metrics
