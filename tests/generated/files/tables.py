"""Compares a table as dray read it with the values that were generated."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from fractions import Fraction
from typing import Any

import numpy as np

from ray_workers.datasets import Table
from ray_workers.recipes.table_inputs import TableForm
from tests.generated.files.columns import Kind

Value = Fraction | float | int | str | None
CLOSE = 2**51
"""float64 holds the differences of integers within this range exactly."""
LARGEST = Fraction(float(np.finfo(np.float32).max))


@dataclass(frozen=True)
class Truth:
    """The values of a column, row by row. None is a missing value."""

    kind: Kind
    values: tuple[Value, ...]


def difference(
    table: Table, features: Mapping[str, Truth], target: tuple[str, Truth]
) -> str | None:
    """Return how a table differs from the expected rows."""
    name, truth = target
    numbers = [name for name, one in features.items() if one.kind in ("number", "truth")]
    dates = [name for name, one in features.items() if one.kind == "date"]
    names = [name for name, one in features.items() if one.kind == "name"]
    for what, found, expected in (
        ("numbers", table.numeric_names, numbers),
        ("dates", table.date_names, dates),
        ("categories", table.category_names, names),
        ("target", table.target_name, name),
    ):
        if (found if isinstance(found, str) else list(found)) != expected:
            return f"{what}: {found}, expected {expected}"
    if len(table.target) != len(truth.values):
        return f"{len(table.target)} rows, expected {len(truth.values)}"
    columns = np.asarray(table.numeric, dtype=np.float64).T
    for at, name_of_column in enumerate(numbers):
        found = columns[at]
        fault = _of_numbers(table, name_of_column, found, features[name_of_column].values)
        if fault:
            return fault
    for at, name_of_column in enumerate(dates):
        first = len(numbers) + 6 * at
        parts = columns[first : first + 6].T.tolist()
        for row, (got, value) in enumerate(
            zip(parts, features[name_of_column].values, strict=True)
        ):
            if str(got) != str(date_parts(value)):
                return f"column {name_of_column!r}, row {row}: {got}, expected {date_parts(value)}"
    for at, name_of_column in enumerate(names):
        words = [*table.vocabularies[at], None]
        read = [words[code] for code in table.categories[:, at].tolist()]
        if read != list(features[name_of_column].values):
            return f"column {name_of_column!r}: {read}, expected {features[name_of_column].values}"
    return _of_target(table, name, truth)


def _of_target(table: Table, name: str, truth: Truth) -> str | None:
    if table.classes is None:
        return _of_numbers(table, name, np.asarray(table.target), truth.values)
    read = [table.classes[code] for code in table.target.tolist()]
    if truth.kind == "name":
        return None if read == list(truth.values) else f"classes {read}, expected {truth.values}"
    distinct, rounded = set(truth.values), set(map(_as_class, truth.values))
    if len(table.classes) not in (len(distinct), len(rounded)):
        return f"{len(table.classes)} classes {table.classes}, expected {distinct}"
    for label, value in zip(read, truth.values, strict=True):
        number = {"true": 1.0, "false": 0.0}.get(label.lower())
        if (float(label) if number is None else number) != float(value or 0):
            return f"the class {label}, expected {value}"
    return None


def _as_class(value: Value) -> Value:
    """Numbers with fractions may be read as 64-bit floats, so that some are the same class."""
    is_fraction = isinstance(value, Fraction) and value.denominator > 1
    return float(value) if is_fraction and value is not None else value


def _of_numbers(
    table: Table, name: str, found: np.ndarray[Any, Any], values: Sequence[Value]
) -> str | None:
    base = table.bases.get(name, 0)
    num_rounded = 0
    known = [one for one in values if isinstance(one, Fraction)]
    is_close = bool(known) and max(known) - min(known) < CLOSE
    for row, (got, value) in enumerate(zip(found.tolist(), values, strict=True)):
        if value is None:
            if not math.isnan(got):
                return f"column {name!r}, row {row}: {got}, expected no value"
            continue
        assert isinstance(value, Fraction)
        exact = value - base
        rounded = float(exact)
        is_whole = value.denominator == 1
        if is_whole and Fraction(rounded) != exact:
            num_rounded += 1
        slack = 0.0 if is_whole or base == 0 else math.ulp(float(value))
        if math.isnan(got) or abs(got - rounded) > slack:
            return f"column {name!r}, row {row}: {got!r} + {base}, expected {value}"
    if is_close and num_rounded:
        return f"column {name!r}: {num_rounded} are rounded, though they are close to each other"
    if table.num_rounded.get(name, 0) != num_rounded:
        return f"column {name!r}: {table.num_rounded} rounded, expected {num_rounded}"
    return None


def date_parts(value: Value) -> list[float]:
    if value is None:
        return [math.nan] * 6
    assert isinstance(value, int)
    when = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=value)
    midnight = when.replace(hour=0, minute=0, second=0, microsecond=0)
    hours = ((when - midnight) // timedelta(microseconds=1)) / 3.6e9
    return [value / 8.64e10, *map(float, (when.year, when.month, when.day, when.weekday())), hours]


def refused_row(
    values: Sequence[Value], kept: Sequence[int], largest: float | Fraction = LARGEST
) -> int | None:
    """Return the first of these rows whose number no float (32 bits by default) comes close to."""
    for row in kept:
        value = values[row]
        if isinstance(value, float) or (isinstance(value, Fraction) and abs(value) > largest):
            return row
    return None


def prediction_differs(table: Table, rows: Sequence[Mapping[str, Any]], **form: Any) -> str | None:
    """Return how rows passed for a prediction differ from the same rows of the table."""
    codes = {
        name: {word: code for code, word in enumerate(words)}
        for name, words in zip(table.category_names, table.vocabularies, strict=True)
    }
    read = TableForm(
        table.numeric_names,
        codes,
        frozenset(table.num_missing),
        dates=table.date_names,
        bases=table.bases,
        is_wide=True,
        **form,
    )
    given = read.tensor(list(rows)).numpy()
    stored = np.concatenate([np.asarray(table.numeric, np.float64), table.categories], axis=1)
    stored[:, table.numeric.shape[1] :][table.categories < 0] = np.nan
    if given.shape != stored.shape:
        return f"a prediction takes the shape {given.shape}, the table {stored.shape}"
    different = ~((given == stored) | (np.isnan(given) & np.isnan(stored)))
    if not different.any():
        return None
    row, column = np.argwhere(different)[0].tolist()
    return (
        f"row {row} of a prediction has {given[row, column]!r} at {column}, "
        f"and the table {stored[row, column]!r}: {rows[row]}"
    )
