"""Optuna as the sampler of a sweep, through its ask-and-tell interface.

Each call rebuilds the study from the trials in the database. Therefore no state is lost when a
process ends, and any service that runs the loops can continue the sweep. The sampler's seed is
derived from the sweep's seed and the trial's index, so the same earlier trials result in the same
values.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from dray.spec import Parameter, Sweep

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution
    from optuna.trial import FrozenTrial


MAX_EARLIER = 1000
"""Maximum number of trials in the study."""
NUM_BEST = 200
"""Number of best trials to include in the study. The remaining trials are the newest ones."""


class TrialOutcome(StrEnum):
    """The state of a trial, in Optuna's categories."""

    ENDED = "ended"
    STOPPED_EARLY = "stopped_early"
    RUNNING = "running"
    FAILED = "failed"


@dataclass(frozen=True)
class EarlierTrial:
    """A trial whose parameters have been chosen."""

    parameters: Mapping[str, Any]
    outcome: TrialOutcome
    value: float | None
    last_step: int | None


def is_installed() -> bool:
    return importlib.util.find_spec("optuna") is not None


def ask(sweep: Sweep, index: int, earlier: Sequence[EarlierTrial]) -> dict[str, Any]:
    """Choose the parameters of a trial. Raises ImportError if Optuna is not installed."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    with warnings.catch_warnings():
        # Optuna warns that `constant_liar`, which makes concurrent trials differ, is experimental.
        warnings.simplefilter("ignore")
        sampler = optuna.samplers.TPESampler(seed=_seed(sweep, index), constant_liar=True)
        directions = optuna.study.StudyDirection
        study = optuna.create_study(
            direction=directions.MAXIMIZE if sweep.maximises else directions.MINIMIZE,
            sampler=sampler,
        )
        space = {name: _distribution(one) for name, one in sweep.parameters.items()}
        chosen = _most_informative(sweep, earlier)
        study.add_trials([_frozen(sweep, space, trial) for trial in chosen])
        drawn = study.ask(space).params
    return {name: _value(one, drawn[name]) for name, one in sweep.parameters.items()}


def _most_informative(sweep: Sweep, earlier: Sequence[EarlierTrial]) -> list[EarlierTrial]:
    """Return all trials, or only the best and the newest trials if there are many, so that a call
    takes less than 1 s."""
    if len(earlier) <= MAX_EARLIER:
        return list(earlier)

    def rank(number: int) -> float:
        value = earlier[number].value
        return math.inf if value is None else -value if sweep.maximises else value

    by_value = sorted(range(len(earlier)), key=rank)
    newest = range(len(earlier) - MAX_EARLIER + NUM_BEST, len(earlier))
    return [earlier[number] for number in sorted({*by_value[:NUM_BEST], *newest})]


def _seed(sweep: Sweep, index: int) -> int:
    digest = hashlib.sha256(f"{sweep.seed} {index}".encode()).digest()
    return int.from_bytes(digest[:4])


def _distribution(parameter: Parameter) -> BaseDistribution:
    from optuna.distributions import (
        CategoricalDistribution,
        FloatDistribution,
        IntDistribution,
    )

    if parameter.choices is not None:  # by index, because a value can be a list
        return CategoricalDistribution(range(len(parameter.choices)))
    assert parameter.min is not None
    assert parameter.max is not None
    if parameter.is_whole:
        low, step = round(parameter.min), round(parameter.step or 1)
        high = low + step * ((parameter.num_values or 1) - 1)
        return IntDistribution(low, high, log=parameter.log, step=step)
    if parameter.step is None:
        return FloatDistribution(parameter.min, parameter.max, log=parameter.log)
    return IntDistribution(0, (parameter.num_values or 1) - 1)


def _value(parameter: Parameter, drawn: Any) -> Any:
    """Return the parameter's value for a number drawn from the distribution."""
    if parameter.choices is not None or (parameter.step is not None and not parameter.is_whole):
        return parameter.value(drawn)
    return drawn


def _drawn(parameter: Parameter, value: Any) -> Any:
    """Return the number by which the distribution represents a value of the parameter. The inverse
    of `_value`."""
    if parameter.choices is not None:
        texts = [json.dumps(choice) for choice in parameter.choices]  # true is not 1
        return texts.index(json.dumps(value))
    if parameter.step is not None and not parameter.is_whole:
        assert parameter.min is not None
        return round((value - parameter.min) / parameter.step)
    return value


def _frozen(
    sweep: Sweep, space: Mapping[str, BaseDistribution], trial: EarlierTrial
) -> FrozenTrial:
    from optuna.trial import TrialState, create_trial

    state = {
        TrialOutcome.ENDED: TrialState.COMPLETE,
        TrialOutcome.STOPPED_EARLY: TrialState.PRUNED,
        TrialOutcome.RUNNING: TrialState.RUNNING,
        TrialOutcome.FAILED: TrialState.FAIL,
    }[trial.outcome]
    if trial.value is None and state is TrialState.COMPLETE:
        state = TrialState.FAIL  # NaN, or no report: Optuna does not accept it
    reported = {}
    if trial.value is not None and trial.last_step is not None:
        reported[trial.last_step] = trial.value
    params = {name: _drawn(one, trial.parameters[name]) for name, one in sweep.parameters.items()}
    return create_trial(
        state=state,
        params=params,
        distributions=dict(space),
        value=trial.value if state is TrialState.COMPLETE else None,
        intermediate_values=reported,
    )
