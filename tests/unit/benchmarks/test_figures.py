"""Ratios and intervals follow from the samples."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.figures import Spread, median_of_ratios, ratio_of_medians, ratio_of_percentiles


def lognormal(median: float, count: int, seed: int) -> list[float]:
    drawn = np.random.default_rng(seed).normal(size=count)
    return [float(value) for value in median * np.exp(0.2 * drawn)]


def test_the_ratio_is_that_of_the_medians() -> None:
    ratio = ratio_of_medians([1.0, 2.0, 30.0], [4.0, 8.0, 9.0])
    assert ratio.value == 0.25
    assert ratio.low <= ratio.value <= ratio.high


def test_the_ratio_of_a_percentile_is_that_of_the_slowest() -> None:
    ratio = ratio_of_percentiles([1.0] * 50 + [8.0] * 50, [1.0] * 50 + [2.0] * 50, 99)
    assert ratio.value == 4.0
    assert ratio.low <= ratio.value <= ratio.high


def test_a_pairs_ratio_is_the_median_over_pairs_not_of_the_sides() -> None:
    pairs = [(1.0, 10.0), (2.0, 1.0), (9.0, 3.0)]
    assert median_of_ratios(pairs).value == 2.0


def test_the_interval_covers_the_truth_about_as_often_as_it_says() -> None:
    covered = 0
    for seed in range(100):
        ours, theirs = lognormal(1.0, 20, 2 * seed), lognormal(2.0, 20, 2 * seed + 1)
        ratio = ratio_of_medians(ours, theirs)
        covered += ratio.low <= 0.5 <= ratio.high
    assert covered >= 85


def test_more_samples_give_a_narrower_interval() -> None:
    def width(count: int) -> float:
        ratio = ratio_of_medians(lognormal(1.0, count, 1), lognormal(1.0, count, 2))
        return ratio.high - ratio.low

    assert width(400) < width(10) / 2


def test_the_same_samples_give_the_same_interval() -> None:
    ours, theirs = lognormal(1.0, 10, 3), lognormal(3.0, 10, 4)
    assert ratio_of_medians(ours, theirs) == ratio_of_medians(ours, theirs)


def test_a_spread_without_samples_is_refused() -> None:
    with pytest.raises(ValueError, match="no samples"):
        Spread.of([])
