"""Optuna as a sampler: values are in the search space, depend on earlier trials, and are
reproducible."""

from __future__ import annotations

from typing import Any

import pytest

from dray.spec import Sweep
from service.sweeps.optuna_sampler import (
    MAX_EARLIER,
    NUM_BEST,
    EarlierTrial,
    TrialOutcome,
    _most_informative,
    ask,
)

SPACE: dict[str, Any] = {
    "lr": {"min": 1e-4, "max": 1e-1, "log": True},
    "depth": {"min": 2, "max": 9, "step": 2},
    "width": {"min": 8, "max": 512, "log": True},
    "dropout": {"min": 0.0, "max": 0.5, "step": 0.1},
    "layers": [[64], [64, 32], True, 1, "1"],
}


def sweep(**fields: Any) -> Sweep:
    given = {"metric": "loss", "mode": "min", "sampler": "optuna", "trials": 100}
    return Sweep.model_validate({**given, "parameters": SPACE, **fields})


def ended(
    value: float | None, outcome: TrialOutcome = TrialOutcome.ENDED, **parameters: Any
) -> EarlierTrial:
    return EarlierTrial(parameters, outcome, value, 10)


def test_values_are_within_the_space_and_may_be_told_again() -> None:
    found, earlier = sweep(), list[EarlierTrial]()
    for index in range(20):
        values = ask(found, index, earlier)
        assert values.keys() == SPACE.keys()
        assert 1e-4 <= values["lr"] <= 1e-1
        assert values["depth"] in (2, 4, 6, 8)
        assert 8 <= values["width"] <= 512
        assert values["dropout"] in (0.0, 0.1, 0.2, 0.3, 0.4, 0.5)
        assert any(
            values["layers"] is choice or values["layers"] == choice for choice in SPACE["layers"]
        )
        outcome = list(TrialOutcome)[index % 4]
        earlier.append(
            ended(None if outcome is TrialOutcome.RUNNING else index / 10, outcome, **values)
        )


def test_the_same_trials_before_give_the_same_values_in_any_process() -> None:
    found, earlier = sweep(seed=3), list[EarlierTrial]()
    for index in range(15):
        values = ask(found, index, earlier)
        assert values == ask(found, index, earlier)
        earlier.append(ended(values["lr"], **values))
    assert ask(sweep(seed=4), 15, earlier) != ask(found, 15, earlier)


@pytest.mark.parametrize(("mode", "best"), [("min", 0.1), ("max", 0.9)])
def test_it_learns_from_the_values(mode: str, best: float) -> None:
    """Later trials approach `best`, the optimum of a parabola."""
    found = sweep(mode=mode, parameters={"x": {"min": 0.0, "max": 1.0}})
    sign, earlier = (1 if mode == "min" else -1), list[EarlierTrial]()
    for index in range(40):
        x = ask(found, index, earlier)["x"]
        earlier.append(ended(sign * (x - best) ** 2, x=x))
    late = [abs(trial.parameters["x"] - best) for trial in earlier[-10:]]
    assert sorted(late)[5] < 0.15


def test_of_very_many_trials_the_best_and_the_newest_are_told() -> None:
    found = sweep(mode="max", parameters={"x": {"min": 0.0, "max": 1.0}})
    earlier = [ended(float(-number), x=0.5) for number in range(MAX_EARLIER)]
    assert _most_informative(found, earlier) == earlier
    earlier += [ended(None, x=0.5), *(ended(-1e6, x=0.5) for _ in range(MAX_EARLIER))]
    told = _most_informative(found, earlier)
    assert len(told) == MAX_EARLIER
    assert told == [*earlier[:NUM_BEST], *earlier[-(MAX_EARLIER - NUM_BEST) :]]


def test_trials_without_a_number_are_as_failed() -> None:
    earlier = [
        ended(None, lr=0.1),
        ended(None, TrialOutcome.STOPPED_EARLY, lr=0.01),
        ended(0.5, TrialOutcome.FAILED, lr=0.001),
    ]
    found = sweep(parameters={"lr": SPACE["lr"]})
    assert 1e-4 <= ask(found, 3, earlier)["lr"] <= 1e-1
