"""Refusing an update that would spoil the mean of a round."""

from __future__ import annotations

import math
from enum import IntEnum

import torch
from torch import Tensor


class Verdict(IntEnum):
    """Whether an update counts, and if not, the reason."""

    ACCEPTED = 0
    WRONG_SHAPE = 1
    NOT_FINITE = 2
    TOO_LARGE = 3


def judged(update: Tensor, num_elements: int, max_norm: float) -> tuple[Verdict, float]:
    """The verdict on a client's update, and its 2-norm: NaN where it has none."""
    if update.shape != (num_elements,):
        return Verdict.WRONG_SHAPE, math.nan
    norm = float(torch.linalg.vector_norm(update, dtype=torch.float64))
    if not math.isfinite(norm):
        return Verdict.NOT_FINITE, math.nan
    return (Verdict.TOO_LARGE if norm > max_norm else Verdict.ACCEPTED), norm


def reason(verdict: Verdict, norm: float, max_norm: float) -> str:
    """Why an update was refused, for the log."""
    match verdict:
        case Verdict.WRONG_SHAPE:
            return "its shape is not that of the model"
        case Verdict.NOT_FINITE:
            return "it has values that are not finite"
        case Verdict.TOO_LARGE:
            return f"its norm is {norm:.4g}, above federated.max_update_norm {max_norm:g}"
        case Verdict.ACCEPTED:
            return "it was accepted"
