"""Means of figures that clients report of themselves, which a client that lies must not spoil.

The aggregator can't compute a client's loss. It bounds it instead: by an absolute limit, which
every sum bears, and by the figures of the other clients in the round.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

MAX_VALUE = 1e6
"""A figure beyond it counts as this. So does one that is not finite."""
MAX_RATIO = 10.0
"""A figure whose magnitude is more than this many times the lower median of the magnitudes in the
round, or than this number where the median is below 1, is left out."""


class Reported(NamedTuple):
    """A figure of a client, and the number of samples behind it."""

    value: float
    num_samples: int


def trusted(reported: Iterable[Reported]) -> list[Reported]:
    """The figures that have samples and are near enough to the others, bounded.

    Each client counts once in the median, so fewer than half of the clients can't move the limit
    beyond the figures of the others, whatever their numbers of samples are.
    """
    figures = [Reported(_bounded(one.value), one.num_samples) for one in reported]
    figures = [one for one in figures if one.num_samples > 0]
    if not figures:
        return []
    median = sorted(abs(one.value) for one in figures)[(len(figures) - 1) // 2]
    limit = MAX_RATIO * max(1.0, median)
    return [one for one in figures if abs(one.value) <= limit]


def mean(figures: Sequence[Reported]) -> float | None:
    """The mean by samples; None without figures."""
    total = sum(one.num_samples for one in figures)
    return sum(one.value * (one.num_samples / total) for one in figures) if figures else None


def _bounded(value: float) -> float:
    return min(max(value, -MAX_VALUE), MAX_VALUE) if math.isfinite(value) else MAX_VALUE
