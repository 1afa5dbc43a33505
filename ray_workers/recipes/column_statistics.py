"""Statistics for standardising a table's numbers, computed in float64 from the training rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from ray_workers.datasets import Table
from ray_workers.datasets.core.errors import shortened
from ray_workers.recipes import imputation
from ray_workers.recipes.imputation import Imputation
from ray_workers.recipes.models.tables import TableModel
from ray_workers.training.core.errors import DataError
from ray_workers.training.data.device_dataset import Rows

BLOCK = 65_536
"""Number of rows that are summed at a time."""
MAX_RATIO = 64.0
"""Maximum ratio of a column's mean to its standard deviation for which the mean is subtracted in
float32. At this ratio, 18 of float32's 24 bits are left for the differences from the mean. Above
this ratio, the mean is subtracted in float64."""

Numbers = npt.NDArray[np.float64]


@dataclass(frozen=True)
class ColumnStatistics:
    """Statistics of the numeric columns. Each has shape (F,). For a regression, the last column is
    the target."""

    mean: Numbers
    deviation: Numbers
    """Standard deviations; 1 for a constant column."""
    offsets: Numbers
    """Numbers to subtract in float64: close to the mean, or 0."""
    fill: Numbers | None
    """Replacements for missing numbers and categories, (F + C,); None if nothing is replaced."""

    @property
    def has_offsets(self) -> bool:
        return bool(self.offsets.any())

    def write_to(self, model: TableModel) -> None:
        """Write the statistics to the model's buffers."""
        count = model.num_numeric
        mean, deviation = (
            torch.from_numpy(one).float() for one in (self.mean - self.offsets, self.deviation)
        )
        model.mean.copy_(mean[:count])
        model.deviation.copy_(deviation[:count])
        if len(mean) > count:
            model.target_mean.copy_(mean[count])
            model.target_deviation.copy_(deviation[count])
        if model.offset_bits is not None:
            model.offset_bits[: len(mean)] = torch.from_numpy(self.offsets).view(torch.int64)
        if model.fill is not None:
            assert self.fill is not None
            fill = self.fill.copy()
            fill[:count] -= self.offsets[:count]
            model.fill.copy_(torch.from_numpy(fill))


def learn(table: Table, training: Rows, filling: Imputation) -> ColumnStatistics:
    """Compute the statistics. Raises DataError for a column that has no values in the training
    rows, or whose values differ by less than float32 can represent."""
    fill = imputation.learn(table, training, filling) if filling.filled else None
    numbers = None if fill is None else fill[: table.numeric.shape[1]]
    mean, deviation, is_exact = _of_columns(table.numeric, training, numbers)
    if table.classes is None:
        of_target = _of_columns(table.target[:, None], training, None)
        mean, deviation, is_exact = (
            np.concatenate(pair)
            for pair in zip((mean, deviation, is_exact), of_target, strict=True)
        )
    names = (*table.numeric_sources, table.target_name)
    for at in np.flatnonzero((deviation > 0) & (deviation < np.finfo(np.float32).tiny)).tolist():
        raise DataError(
            f"the values of the column {shortened(names[at])} differ by {deviation[at]:.3g}, which "
            "is less than float32 can represent; use a smaller unit"
        )
    deviation[deviation == 0] = 1.0
    is_far = np.abs(mean) > MAX_RATIO * deviation
    whole = np.where(deviation > 1, np.rint(mean), mean)
    offsets = np.where(is_far & ~is_exact.astype(bool), whole, 0.0)
    return ColumnStatistics(mean, deviation, offsets, fill)


def _of_columns(
    columns: npt.NDArray[np.floating], rows: Rows, fill: Numbers | None
) -> tuple[Numbers, Numbers, Numbers]:
    """Return (mean, deviation, exact), each (F,), over the given rows, which need not fit into
    memory. `exact` is 1 if float32 represents every value of the column exactly. `fill`
    contains the replacements for NaN, (F,).

    The first row is subtracted from all rows, so that no digits of a large mean are lost.
    """

    def blocks() -> Iterator[Numbers]:
        for start in range(0, len(rows), BLOCK):
            block = columns[rows[start : start + BLOCK]].astype(np.float64)
            yield block if fill is None else np.where(np.isnan(block), fill, block)

    first = next(blocks())[0]
    total, is_exact = np.zeros(len(first)), np.ones(len(first), dtype=bool)
    for block in blocks():
        total += (block - first).sum(axis=0)
        is_exact &= (block == block.astype(np.float32)).all(axis=0)
    mean = total / len(rows)  # relative to the first row
    squares = np.zeros(len(first))
    for block in blocks():
        squares += np.square(block - first - mean).sum(axis=0)
    return first + mean, np.sqrt(squares / len(rows)), is_exact.astype(np.float64)
