"""Detects table values that differ in the file but become equal in float32."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from ray_workers.datasets import Table
from ray_workers.datasets.formats.dates import PARTS
from ray_workers.recipes.models.tables import TableModel
from ray_workers.training.data.device_dataset import Rows

MAX_VALUES = 1 << 22
"""Maximum number of values to compare; sorting this many values takes 0.5 s. In larger tables,
evenly spaced rows are compared."""


@dataclass(frozen=True)
class Merged:
    """Counts of the distinct values in a column: in the file, and in float32."""

    num_different: int
    num_left: int
    num_rows: int
    """Number of compared rows."""


def counted(table: Table, rows: Rows, model: TableModel) -> Mapping[str, Merged]:
    """Return the numeric and date columns in which distinct values become equal in float32, keyed
    by name."""
    width = table.numeric.shape[1]
    stride = max(1, -(-len(rows) * width // MAX_VALUES))
    sample = rows[::stride]
    before = np.asarray(table.numeric[sample], dtype=np.float64)
    with torch.no_grad():
        after = model.standardised(torch.from_numpy(before)).numpy()
    found = {}
    for name, columns in _columns(table).items():
        known = ~np.isnan(before[:, columns[0]])
        merged = Merged(
            len(np.unique(before[known, columns[0]])),
            _num_different(after[known][:, columns]),
            int(known.sum()),
        )
        if merged.num_left < merged.num_different:
            found[name] = merged
    return found


def _columns(table: Table) -> Mapping[str, list[int]]:
    """Map each column's name to the indices in `numeric` that determine its value. For a date,
    these are the indices of its `days` and `hour` parts."""
    numbers = {name: [at] for at, name in enumerate(table.numeric_names)}
    first = len(numbers)
    dates = {
        name: [first + at * len(PARTS), first + (at + 1) * len(PARTS) - 1]
        for at, name in enumerate(table.date_names)
    }
    return numbers | dates


def _num_different(rows: npt.NDArray[np.float32]) -> int:
    return len(np.unique(rows[:, 0]) if rows.shape[1] == 1 else np.unique(rows, axis=0))
