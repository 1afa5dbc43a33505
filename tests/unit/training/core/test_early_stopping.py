from __future__ import annotations

import math

import pytest

from dray.spec import EarlyStopping
from ray_workers.training.core.schedule import EarlyStoppingState


def stops_at(rule: EarlyStopping, values: list[float]) -> int | None:
    """Return the number of the evaluation after which training ends."""
    patience = EarlyStoppingState()
    for number, value in enumerate(values, start=1):
        patience = patience.after(rule, {rule.metric: value})
        if patience.is_over(rule):
            return number
    return None


@pytest.mark.parametrize(
    ("metric", "values", "expected"),
    [
        ("val/loss", [3.0, 2.0, 1.0], None),
        ("val/loss", [3.0, 3.0, 4.0], 3),
        ("val/perplexity", [3.0, 3.5, 2.0, 2.0, 2.0], 5),
        ("val/accuracy", [0.5, 0.6, 0.6, 0.5], 4),
        ("val/accuracy", [0.5, 0.4, 0.6, 0.5], None),
        ("val/loss", [math.nan, math.nan], 2),
        ("val/loss", [2.0, math.nan, math.nan], 3),
        ("val/accuracy", [math.nan, 0.0, 0.1], None),
    ],
)
def test_training_ends_after_so_many_evaluations_without_an_improvement(
    metric: str, values: list[float], expected: int | None
) -> None:
    assert stops_at(EarlyStopping(metric=metric, patience=2), values) == expected


def test_a_change_below_min_delta_is_no_improvement() -> None:
    rule = EarlyStopping(metric="val/loss", patience=2, min_delta=0.1)
    assert stops_at(rule, [1.0, 0.95, 0.92]) == 3
    assert stops_at(rule, [1.0, 0.95, 0.85]) is None
