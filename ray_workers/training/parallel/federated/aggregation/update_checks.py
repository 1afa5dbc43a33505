"""Checks that prevent malicious or faulty clients from corrupting the mean update of a round, and
functions that average the figures that clients report about themselves.

The aggregator can't verify the loss that a client reports. Instead, the aggregator applies two
limits: an absolute limit, so that sums remain finite, and a limit relative to the figures of the
other clients in the round.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from enum import IntEnum
from typing import NamedTuple

import torch
from torch import Tensor


class Verdict(IntEnum):
    """Whether an update counts and, if not, why."""

    ACCEPTED = 0
    WRONG_SHAPE = 1
    NOT_FINITE = 2
    TOO_LARGE = 3


def judged(update: Tensor, num_elements: int, max_norm: float) -> tuple[Verdict, float]:
    """Return the verdict on a client's update, and the update's 2-norm (NaN if it has none)."""
    if update.shape != (num_elements,):
        return Verdict.WRONG_SHAPE, math.nan
    norm = float(torch.linalg.vector_norm(update, dtype=torch.float64))
    if not math.isfinite(norm):
        return Verdict.NOT_FINITE, math.nan
    return (Verdict.TOO_LARGE if norm > max_norm else Verdict.ACCEPTED), norm


def reason(verdict: Verdict, norm: float, max_norm: float) -> str:
    """Return the reason why an update was refused, for the log."""
    match verdict:
        case Verdict.WRONG_SHAPE:
            return "the update's shape differs from the model's shape"
        case Verdict.NOT_FINITE:
            return "the update contains values that are not finite"
        case Verdict.TOO_LARGE:
            return (
                f"the update's norm of {norm:.4g} exceeds federated.max_update_norm, which is "
                f"{max_norm:g}"
            )
        case Verdict.ACCEPTED:
            return "the update was accepted"


MAX_VALUE = 1e6
"""Larger or nonfinite figures count as this value."""
MAX_RATIO = 10.0
"""A figure is ignored if its magnitude exceeds MAX_RATIO * max(1, m), where m is the lower median
of the magnitudes in the round."""


class Reported(NamedTuple):
    """A figure reported by a client, and the number of samples on which it is based."""

    value: float
    num_samples: int


def trusted(reported: Iterable[Reported]) -> list[Reported]:
    """Limit the figures to MAX_VALUE, and leave out figures without samples and figures beyond
    MAX_RATIO.

    Each client counts once in the median, so a minority of the clients can't move the limit beyond
    the figures of the other clients, regardless of how many samples the minority reports.
    """
    figures = [Reported(_bounded(one.value), one.num_samples) for one in reported]
    figures = [one for one in figures if one.num_samples > 0]
    if not figures:
        return []
    median = sorted(abs(one.value) for one in figures)[(len(figures) - 1) // 2]
    limit = MAX_RATIO * max(1.0, median)
    return [one for one in figures if abs(one.value) <= limit]


def mean(figures: Sequence[Reported]) -> float | None:
    """Return the mean of the figures, weighted by samples; None if there are no figures."""
    total = sum(one.num_samples for one in figures)
    return sum(one.value * (one.num_samples / total) for one in figures) if figures else None


def _bounded(value: float) -> float:
    return min(max(value, -MAX_VALUE), MAX_VALUE) if math.isfinite(value) else MAX_VALUE
