"""The parameter values of trials in a grid or random search. The values depend only on the sweep
and the index of the trial, so the same document always creates the same trials."""

from __future__ import annotations

import random
from typing import Any

from dray.spec import Parameter, Sweep


def values_of(sweep: Sweep, index: int) -> dict[str, Any]:
    """Return a trial's values, keyed by parameter name. The values are random unless the sampler is
    `grid`."""
    return _of_grid(sweep, index) if sweep.sampler == "grid" else _at_random(sweep, index)


def _of_grid(sweep: Sweep, index: int) -> dict[str, Any]:
    """Return the combination with this index. The last parameter varies fastest."""
    values = {}
    for name, parameter in reversed(sweep.parameters.items()):
        index, number = divmod(index, parameter.num_values or 1)
        values[name] = parameter.value(number)
    return dict(reversed(values.items()))


def _at_random(sweep: Sweep, index: int) -> dict[str, Any]:
    # Only `random()` is guaranteed to return the same numbers in every version of Python.
    numbers = random.Random(f"{sweep.seed} {index}")
    return {name: drawn(one, numbers.random()) for name, one in sweep.parameters.items()}


def drawn(parameter: Parameter, share: float) -> Any:
    """Return the parameter value for `share`, a number drawn uniformly from [0, 1)."""
    if parameter.num_values is None or parameter.log:
        return parameter.number(share)
    return parameter.value(int(share * parameter.num_values))
