"""Conversion of table rows in various forms to the inputs of a trained model."""

from __future__ import annotations

import math
import operator
import warnings
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ray_workers.datasets.core.errors import listed, no_such_name, shortened
from ray_workers.datasets.core.types import sources_of
from ray_workers.datasets.formats.columns import EMPTY, MISSING
from ray_workers.datasets.formats.dates import PARTS, microseconds_of, parts_of
from ray_workers.datasets.formats.number_texts import (
    PLAIN,
    Exact,
    NumberStyle,
    number_name,
    relative,
)
from ray_workers.recipes.models.tables import UNKNOWN

Row = Mapping[str, Any]


class UnseenCategoryWarning(UserWarning):
    """A category that did not occur in training is treated as unknown."""


@dataclass(frozen=True)
class TableForm:
    """The columns that a model accepts."""

    numeric: Sequence[str]
    categories: Mapping[str, Mapping[str, int]]
    """For each column, the codes of the values that occurred in training."""
    filled: Set[str] = frozenset()
    """Columns whose missing values (represented by NaN) the model replaces."""
    dates: Sequence[str] = ()
    """Date columns, which follow the numeric columns. Each date is split into its parts."""
    style: NumberStyle = PLAIN
    """The format of numbers that are given as strings."""
    bases: Mapping[str, int] = field(default_factory=dict)
    """For each column whose values float64 can't represent, the number to subtract from the
    values."""
    is_wide: bool = False
    """Whether the model needs float64, since float32 would round the table's numbers."""

    @property
    def width(self) -> int:
        """Number of the model's inputs, which are numbers, parts of dates, and codes of
        categories."""
        return len(sources_of(self.numeric, self.dates)) + len(self.categories)

    def tensor(self, rows: Any) -> Tensor:
        """Convert rows to float32 (N, columns), or to float64 if `is_wide`.

        `rows` can be a mapping of columns to values, or to lists of values of the same length; a
        sequence of such rows; a pandas, polars or Arrow table; or, if all columns are numeric, an
        array (N, columns). Raises ValueError for a missing column, for a value that is not a
        number, and for a missing value unless missing values in the column are replaced. A category
        that did not occur in training causes a warning, and is treated as unknown.
        """
        if _is_array(rows):
            return self._of_array(rows)
        unseen: dict[str, set[str]] = {}
        encoded = [self._encoded(row, at, unseen) for at, row in enumerate(_rows_of(rows))]
        for name, values in unseen.items():
            warnings.warn(
                f"the column {shortened(name)} contains {listed(sorted(values))}, which did not "
                "occur in training and will be treated as unknown; known categories: "
                f"{listed(self.categories[name])}",
                UnseenCategoryWarning,
                stacklevel=3,
            )
        return torch.tensor(encoded, dtype=self._dtype).reshape(-1, self.width)

    @property
    def _dtype(self) -> torch.dtype:
        return torch.float64 if self.is_wide else torch.float32

    def _of_array(self, rows: Any) -> Tensor:
        if self.categories or self.dates:
            raise ValueError(
                f"{listed([*self.dates, *self.categories])}: an array can't contain dates or "
                "categories; pass a mapping, a data frame or a list of mappings"
            )
        given = rows.detach().cpu().numpy() if isinstance(rows, Tensor) else rows
        if given.ndim != 2 or given.shape[1] != len(self.numeric):
            raise ValueError(
                f"an array of shape {tuple(given.shape)} does not match (N, "
                f"{len(self.numeric)}) for "
                f"the columns {listed(self.numeric)}"
            )
        if self.bases:
            columns = zip(self.numeric, given.T.tolist(), strict=True)
            numbers = [
                [relative(value, self.bases.get(name, 0)) for value in values]
                for name, values in columns
            ]
            given = np.array(numbers, dtype=np.float64).T
        array = torch.from_numpy(given.astype(np.float64)).to(self._dtype)
        for at, column in array.isnan().nonzero().tolist():
            self._missing(self.numeric[column], at)
        return array

    def _encoded(self, row: Row, at: int, unseen: dict[str, set[str]]) -> list[float]:
        for name in (*self.numeric, *self.dates, *self.categories):
            if name not in row:
                raise ValueError(f"row {at}: {no_such_name('column', name, map(str, row))}")
        numbers = [self._number(row[name], name, at) for name in self.numeric]
        for name in self.dates:
            numbers += self._date(row[name], name, at)
        return numbers + [
            self._code(row[name], name, at, unseen.setdefault) for name in self.categories
        ]

    def _number(self, value: Any, name: str, at: int) -> float:
        if _is_missing(value, MISSING):
            return self._missing(name, at)
        if isinstance(value, str) and value.strip().lower() in ("true", "false"):
            return float(value.strip().lower() == "true")
        try:
            return relative(exact_number(value, self.style), self.bases.get(name, 0))
        except (TypeError, ValueError):
            raise ValueError(
                f"row {at}: the column {shortened(name)} has the value {shortened(value)}, "
                "which is not a number"
            ) from None

    def _date(self, value: Any, name: str, at: int) -> list[float]:
        if _is_missing(value, MISSING):
            return [self._missing(name, at)] * len(PARTS)
        try:
            microseconds = microseconds_of(value)
        except ValueError:
            raise ValueError(
                f"row {at}: the column {shortened(name)} has the value {shortened(value)}, "
                "which is not an ISO 8601 date such as 2026-01-31 or 2026-01-31T12:00"
            ) from None
        parts: list[float] = parts_of(np.array([microseconds]))[0].tolist()
        return parts

    def _code(self, value: Any, name: str, at: int, unseen: Any) -> float:
        if _is_missing(value, MISSING if name in self.filled else EMPTY):
            return self._missing(name, at)
        known = self.categories[name]
        found = next((known[each] for each in _names(value) if each in known), None)
        if found is None:
            unseen(name, set()).add(str(value))
            return UNKNOWN
        return found

    def _missing(self, name: str, at: int) -> float:
        if name not in self.filled:
            raise ValueError(f"row {at}: the column {shortened(name)} has no value")
        return math.nan


def exact_number(value: Any, style: NumberStyle) -> Exact:
    """Convert a value to a number without loss. Raises TypeError or ValueError if the value is not
    a number."""
    if isinstance(value, str):
        return style.value_of(value)
    if isinstance(value, int | float | Decimal) and not isinstance(value, bool):
        return value
    return operator.index(value) if isinstance(value, np.integer) else float(value)


def _is_array(rows: Any) -> bool:
    return isinstance(rows, np.ndarray | Tensor)


def _rows_of(rows: Any) -> Iterable[Row]:
    """Return the rows of a data frame or a sequence. Data frames are recognised by their methods,
    without importing their packages."""
    found: Iterable[Row]
    if hasattr(rows, "to_pylist"):  # Arrow
        found = rows.to_pylist()
    elif hasattr(rows, "iter_rows"):  # polars
        found = rows.iter_rows(named=True)
    elif hasattr(rows, "to_dict") and hasattr(rows, "columns"):  # pandas
        found = rows.to_dict("records")
    else:
        found = _rows_of_columns(rows) if isinstance(rows, Mapping) else list(rows)
    return found


def _rows_of_columns(rows: Mapping[str, Any]) -> list[Row]:
    """Return the rows of a mapping: a single row if it maps names to values, or several rows if it
    maps names to columns."""
    columns = {name: values for name, values in rows.items() if _is_column(values)}
    if not columns:
        return [rows]
    if len(columns) < len(rows) or len({len(values) for values in columns.values()}) > 1:
        raise ValueError("the columns of a mapping must have the same number of values")
    return [dict(zip(rows, values, strict=True)) for values in zip(*rows.values(), strict=True)]


def _is_column(values: Any) -> bool:
    return not isinstance(values, str | bytes) and hasattr(values, "__len__")


def _is_missing(value: Any, words: tuple[str, ...]) -> bool:
    if value is None or (isinstance(value, str) and value.strip().lower() in words):
        return True
    try:
        return bool(value != value)  # NaN, pandas' NaT
    except TypeError:  # pandas' NA, which can't be compared
        return True


def _names(value: Any) -> list[str]:
    """Return the names that the data set could use for a category, such as `1` for 1.0, and `true`
    for True."""
    names = [str(value)]
    if isinstance(value, bool | np.bool_):
        names.append(str(value).lower())
    elif isinstance(value, float | np.floating):
        names.append(number_name(float(value)))
    return names
