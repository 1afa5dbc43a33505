"""The values of the trials of a grid and of a random search: by the sweep and the trial's index
alone, so the same document always makes the same trials."""

from __future__ import annotations

import random
from typing import Any

from dray.spec import Parameter, Sweep


def values_of(sweep: Sweep, index: int) -> dict[str, Any]:
    """The values of the trial with this index, by name: at random unless the sampler is grid."""
    return _of_grid(sweep, index) if sweep.sampler == "grid" else _at_random(sweep, index)


def _of_grid(sweep: Sweep, index: int) -> dict[str, Any]:
    """One of all combinations; the last parameter changes first."""
    values = {}
    for name, parameter in reversed(sweep.parameters.items()):
        index, number = divmod(index, parameter.num_values or 1)
        values[name] = parameter.value(number)
    return dict(reversed(values.items()))


def _at_random(sweep: Sweep, index: int) -> dict[str, Any]:
    # Only `random()` promises the same numbers in each version of Python.
    numbers = random.Random(f"{sweep.seed} {index}")
    return {name: drawn(one, numbers.random()) for name, one in sweep.parameters.items()}


def drawn(parameter: Parameter, share: float) -> Any:
    """The value for a number that was drawn evenly, from 0 to below 1."""
    if parameter.num_values is None or parameter.log:
        return parameter.number(share)
    return parameter.value(int(share * parameter.num_values))
