"""Statistics of samples: medians, and ratios with an interval.

Intervals are 95% percentile bootstraps (Efron & Tibshirani 1993, chapter 13) with a fixed seed, so
that the same samples result in the same interval.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

RESAMPLES = 10_000
SEED = 0
LEVEL = 0.95

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Spread:
    """The distribution of samples, in the samples' unit."""

    n: int
    lowest: float
    p25: float
    p50: float
    p75: float
    highest: float

    @classmethod
    def of(cls, samples: Sequence[float]) -> Spread:
        """Return the distribution. Raises ValueError if there are no samples."""
        if not samples:
            raise ValueError("there are no samples to describe")
        p0, p25, p50, p75, p100 = np.percentile(_array(samples), [0, 25, 50, 75, 100])
        return cls(len(samples), float(p0), float(p25), float(p50), float(p75), float(p100))


@dataclass(frozen=True)
class Ratio:
    """A ratio and its 95% confidence interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"


def ratio_of_medians(ours: Sequence[float], theirs: Sequence[float]) -> Ratio:
    """Return median(ours) / median(theirs). For the interval, each side is resampled separately."""
    generator = np.random.default_rng(SEED)
    ours_, theirs_ = _array(ours), _array(theirs)
    drawn = _drawn_medians(ours_, generator) / _drawn_medians(theirs_, generator)
    return _ratio(float(np.median(ours_) / np.median(theirs_)), drawn)


def ratio_of_percentiles(
    ours: Sequence[float], theirs: Sequence[float], percentile: float
) -> Ratio:
    """Return the ratio of a percentile other than the median."""
    generator = np.random.default_rng(SEED)
    drawn = []
    for side in (_array(ours), _array(theirs)):
        picked = generator.integers(len(side), size=(RESAMPLES, len(side)))
        drawn.append(np.percentile(side[picked], percentile, axis=1))
    value = np.percentile(_array(ours), percentile) / np.percentile(_array(theirs), percentile)
    return _ratio(float(value), drawn[0] / drawn[1])


def median_of_ratios(pairs: Sequence[tuple[float, float]]) -> Ratio:
    """Return the median of ours / theirs over pairs measured next to each other. For the interval,
    pairs are resampled."""
    ratios = _array([ours / theirs for ours, theirs in pairs])
    drawn = _drawn_medians(ratios, np.random.default_rng(SEED))
    return _ratio(float(np.median(ratios)), drawn)


def ratio_of_sums(pairs: Sequence[tuple[float, float]]) -> Ratio:
    """Return the sum of the first values over the sum of the second values. For the interval, pairs
    are resampled."""
    both = np.asarray(pairs, dtype=np.float64)  # (pairs, 2)
    generator = np.random.default_rng(SEED)
    picked = generator.integers(len(both), size=(RESAMPLES, len(both)))
    drawn = both[picked].sum(axis=1)  # (resamples, 2)
    first, second = both.sum(axis=0)
    return _ratio(float(first / second), drawn[:, 0] / drawn[:, 1])


def _array(samples: Sequence[float]) -> Floats:
    return np.asarray(samples, dtype=np.float64)


def _drawn_medians(samples: Floats, generator: np.random.Generator) -> Floats:
    """Return the medians of `RESAMPLES` samples of the same size, drawn with replacement."""
    picked = generator.integers(len(samples), size=(RESAMPLES, len(samples)))
    medians: Floats = np.median(samples[picked], axis=1)
    return medians


def _ratio(value: float, drawn: Floats) -> Ratio:
    tail = 50 * (1 - LEVEL)
    low, high = np.percentile(drawn, [tail, 100 - tail])
    return Ratio(value, float(low), float(high))
