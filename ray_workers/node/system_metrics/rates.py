"""Rates from counters that only grow, unless they are reset or wrap."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

Values = dict[str, float]
"""Values of one sample by the name of their series."""

DIGITS = 5
"""Significant digits of a value: samples of many ranks travel and are kept as text and rows."""


def growth(before: Mapping[str, Sequence[int]], now: Mapping[str, Sequence[int]]) -> list[int]:
    """By how much the counters of all devices together grew, in the order in which each has them.

    A device that comes or goes, or whose counters were reset or wrapped, counts from then on.
    """
    grown = [
        [max(0, after - earlier) for earlier, after in zip(before[name], counters, strict=True)]
        for name, counters in now.items()
        if name in before
    ]
    return [sum(of_one) for of_one in zip(*grown, strict=True)]


def rounded(values: Mapping[str, float]) -> Values:
    return {name: float(f"{value:.{DIGITS}g}") for name, value in values.items()}
