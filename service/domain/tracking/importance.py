"""The parameters of runs as numbers, from which the importance of each parameter is estimated."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

MIN_RUNS: Final = 20
"""Minimum number of runs. With fewer runs, a forest describes chance rather than parameters."""
MAX_RUNS: Final = 1_000
MAX_CELLS: Final = 12_000
"""Maximum number of runs times columns, which limits the time of an estimate to a few seconds."""
MAX_CATEGORIES: Final = 16
"""Maximum number of values of a parameter that have their own column. The remaining values, which
are the least frequent, have no column, so they count as equal."""
MISSING: Final = object()
"""The value of a parameter that a run doesn't have."""

Column = list[float]


@dataclass(frozen=True)
class EncodedParameter:
    """A parameter that varies among the runs."""

    name: str
    num_values: int
    """Number of different values. A missing value counts as a value."""
    columns: Sequence[Column] = field(repr=False)
    """Numbers that together have the information of the values, one per run in each column."""
    same_as: Sequence[str] = ()
    """Other parameters that change together with this one, so that their effects can't be
    distinguished."""


def encode(runs: Sequence[Mapping[str, Any]]) -> tuple[list[EncodedParameter], list[str]]:
    """Return the parameters that vary, and the names of the parameters that are constant.

    runs: the parameters of each run, keyed by name. A number is replaced by its rank, because the
    trees of a forest depend only on the order. Each other value becomes a column of zeros and
    ones.
    """
    names = sorted({name for run in runs for name in run})
    constant = []
    found: dict[tuple[int, ...], list[tuple[str, list[Any]]]] = {}
    for name in names:
        values = [run.get(name, MISSING) for run in runs]
        order = _order(values)
        if len(set(order)) < 2:
            constant.append(name)
        else:
            found.setdefault(order, []).append((name, values))
    return [
        EncodedParameter(
            name=same[0][0],
            num_values=len(set(order)),
            columns=_columns(same[0][1]),
            same_as=[name for name, _ in same[1:]],
        )
        for order, same in found.items()
    ], constant


def _order(values: Sequence[Any]) -> tuple[int, ...]:
    """Return a number for each run. Two parameters have the same numbers if a tree can't
    distinguish them: if they divide the runs into the same groups and, with three or more numbers,
    also order the groups in the same or the opposite way."""
    keys = [_key(value) for value in values]
    if all(map(_is_number, values)) and len(set(keys)) > 2:
        known = sorted({float(value) for value in values})
        rank = {number: n for n, number in enumerate(known)}
        order = tuple(rank[float(value)] for value in values)
        return min(order, tuple(len(known) - 1 - each for each in order))
    first: dict[str, int] = {}
    return tuple(-1 - first.setdefault(key, len(first)) for key in keys)


def _key(value: Any) -> str:
    if value is MISSING:
        return ""
    if _is_number(value):
        return f"number {float(value)!r}"
    return json.dumps(value, sort_keys=True)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _columns(values: Sequence[Any]) -> list[Column]:
    columns = []
    numbers = sorted({float(value) for value in values if _is_number(value)})
    if len(numbers) > 1:
        rank = {number: float(n) for n, number in enumerate(numbers)}
        columns.append([rank[float(one)] if _is_number(one) else -1.0 for one in values])
    counts = Counter("number" if _is_number(value) else _key(value) for value in values)
    if len(counts) > 1:
        kept = [key for key, _ in counts.most_common(MAX_CATEGORIES)]
        # The last of two categories would repeat the first.
        for key in kept if len(counts) > 2 else kept[:1]:
            columns.append(
                [float(("number" if _is_number(one) else _key(one)) == key) for one in values]
            )
    return columns


def num_runs_at_most(num_columns: int) -> int:
    """Return the number of runs to which a sample is limited."""
    return max(MIN_RUNS, min(MAX_RUNS, MAX_CELLS // max(1, num_columns)))
