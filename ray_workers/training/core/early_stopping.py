"""Ending a training that no longer gets better: a pure rule."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Self

from dray.spec import EarlyStopping
from dray.spec.program.recipes import MINIMISED


def sign_of(metric: str) -> float:
    """Of any metric times this number, less is better."""
    return 1.0 if metric in MINIMISED else -1.0


@dataclass(frozen=True)
class EarlyStoppingState:
    """The state of early stopping; part of every checkpoint."""

    best: float = math.inf
    """The best value of the metric times its sign."""
    evaluations_since: int = 0

    def after(self, rule: EarlyStopping, metrics: Mapping[str, float]) -> Self:
        """The state after an evaluation. A NaN is no improvement."""
        value = sign_of(rule.metric) * metrics[rule.metric]
        if value < self.best - rule.min_delta or (math.isinf(self.best) and value < self.best):
            return replace(self, best=value, evaluations_since=0)
        return replace(self, evaluations_since=self.evaluations_since + 1)

    def is_over(self, rule: EarlyStopping) -> bool:
        return self.evaluations_since >= rule.patience
