"""Replacements for missing values in a table, computed from the table's training rows.

The possible replacements are defined as in scikit-learn's SimpleImputer: the mean, the median (for
an even number of values, the mean of the middle two) or the most frequent value (in a tie, the
smallest).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from dray.spec import Data, Missing
from ray_workers.datasets import Table
from ray_workers.datasets.core.errors import shortened
from ray_workers.datasets.formats.columns import NO_CODE
from ray_workers.recipes.models.tables import UNKNOWN
from ray_workers.training.core.errors import DataError
from ray_workers.training.data.device_dataset import Rows

BLOCK_ROWS = 65_536
SAMPLE_VALUES = 1 << 26
"""Maximum number of values from which medians and most frequent values are computed (a quarter of a
GiB). In larger tables, evenly spaced rows with about this many values are used."""
_FILLED: frozenset[Missing] = frozenset({"mean", "median", "most_frequent", "indicator"})


@dataclass(frozen=True)
class Imputation:
    """How missing values are treated in each column."""

    filled: Mapping[str, Missing] = field(default_factory=dict)
    """The replacement for missing values in each column."""
    indicated: Sequence[str] = ()
    """Columns of numbers and dates that get an additional 0/1 column, which marks missing
    values."""
    own_category: Sequence[str] = ()
    """Categorical columns in which missing values form a separate category."""


def chosen(table: Table, data: Data) -> Imputation:
    """Return the treatment of missing values that the document specifies. Only columns with missing
    values get a 0/1 column or a separate category."""
    numeric = dict.fromkeys(table.numeric_sources)
    names = (*numeric, *table.category_names)
    ways = {name: data.missing_in(name) for name in names}
    marked = {name for name in table.num_missing if ways.get(name) == "indicator"}
    return Imputation(
        filled={name: way for name, way in ways.items() if way in _FILLED},
        indicated=tuple(name for name in numeric if name in marked),
        own_category=tuple(name for name in table.category_names if name in marked),
    )


def learn(table: Table, training: Rows, imputation: Imputation) -> npt.NDArray[np.float64]:
    """Return the replacement for each column, (F + C,), or NaN if nothing is replaced. Categories
    are given as model codes. Raises DataError for a column without values in the training rows."""
    numbers, codes = _numbers(table, training, imputation), _codes(table, training, imputation)
    return np.concatenate([numbers, codes])


def means(numeric: npt.NDArray[np.floating], rows: Rows) -> npt.NDArray[np.float64]:
    """Return the means of the known values, (F,). The mean is NaN for a column without known
    values."""
    total, count = np.zeros(numeric.shape[1]), np.zeros(numeric.shape[1])
    for block in _blocks(numeric, rows):
        is_known = ~np.isnan(block)
        total += block.sum(axis=0, dtype=np.float64, where=is_known)
        count += is_known.sum(axis=0)
    with np.errstate(invalid="ignore"):
        found: npt.NDArray[np.float64] = total / count
    return found


def _numbers(table: Table, training: Rows, imputation: Imputation) -> npt.NDArray[np.float64]:
    ways = [imputation.filled.get(name) for name in table.numeric_sources]
    filled = np.full(len(ways), np.nan)
    if {"mean", "indicator"} & {*ways}:
        mean = means(table.numeric, training)
        filled = np.where([way in ("mean", "indicator") for way in ways], mean, filled)
    if {"median", "most_frequent"} & {*ways}:
        sample = _sample(table.numeric, training)
        for at, way in enumerate(ways):
            if way in ("median", "most_frequent"):
                known = _known(sample[:, at])
                if not len(known):
                    known = _known(np.concatenate([*_blocks(table.numeric[:, at], training)]))
                _refuse_empty(len(known), table.numeric_sources[at])
                filled[at] = np.median(known) if way == "median" else _most_frequent(known)
    for at, way in enumerate(ways):
        _refuse_empty(way is None or not np.isnan(filled[at]), table.numeric_sources[at])
    return filled


def _codes(table: Table, training: Rows, imputation: Imputation) -> npt.NDArray[np.float64]:
    """Return the most frequent code of each column or, for a separate category, the code after the
    last one."""
    names = table.category_names
    filled = np.full(len(names), np.nan)
    counts = [np.zeros(len(vocabulary), dtype=np.int64) for vocabulary in table.vocabularies]
    for block in _blocks(table.categories, training) if imputation.filled else ():
        for at, column in enumerate(block.T):
            known = column[column != NO_CODE]
            counts[at] += np.bincount(known, minlength=len(counts[at]))
    for at, name in enumerate(names):
        if name in imputation.own_category:
            filled[at] = UNKNOWN + 1 + len(table.vocabularies[at])
        elif name in imputation.filled:
            _refuse_empty(counts[at].any(), name)
            filled[at] = UNKNOWN + 1 + counts[at].argmax()
    return filled


def _blocks(columns: npt.NDArray[np.generic], rows: Rows) -> Iterator[npt.NDArray[np.generic]]:
    for start in range(0, len(rows), BLOCK_ROWS):
        yield columns[rows[start : start + BLOCK_ROWS]]


def _sample(numeric: npt.NDArray[np.floating], rows: Rows) -> npt.NDArray[np.floating]:
    stride = -(-len(rows) * numeric.shape[1] // SAMPLE_VALUES)
    return numeric[rows[:: max(1, stride)]]


def _known(column: npt.NDArray[np.generic]) -> npt.NDArray[np.float64]:
    values = column.astype(np.float64)
    return values[~np.isnan(values)]


def _most_frequent(values: npt.NDArray[np.float64]) -> float:
    different, counts = np.unique(values, return_counts=True)
    return float(different[counts.argmax()])


def _refuse_empty(has_values: object, name: str) -> None:
    if not has_values:
        raise DataError(
            f"the column {shortened(name)} has no value in any row of the training split, so "
            "there is no replacement for missing values; remove it from data.features"
        )
