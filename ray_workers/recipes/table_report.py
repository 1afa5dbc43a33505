"""Creates log lines that describe the job's table and how each column is treated."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice

from ray_workers.datasets import Table
from ray_workers.datasets.core.errors import listed, shortened
from ray_workers.datasets.formats.dates import PARTS
from ray_workers.recipes.imputation import Imputation
from ray_workers.recipes.merging import Merged
from ray_workers.recipes.models.tables import UNKNOWN

MAX_COLUMNS = 100
"""Maximum number of columns that get a separate line."""


def lines(
    table: Table,
    imputation: Imputation,
    fill: Sequence[float] | None,
    merged: Mapping[str, Merged],
) -> tuple[str, ...]:
    """Return one sentence about the table, and one about each of the first MAX_COLUMNS columns.

    `fill` contains the replacements for missing values, and is None if nothing is replaced.
    `merged` contains the columns in which different values are equal for the model.
    """
    columns = _columns(table, imputation, fill, merged)
    shown = [f"  {line}" for line in islice(columns, MAX_COLUMNS)]
    left_out = sum(1 for _ in columns)
    more = [f"  and {left_out:,} more columns"] if left_out else []
    return (_whole(table), *shown, *more)


def _whole(table: Table) -> str:
    kinds = [
        (len(table.numeric_names), "of numbers"),
        (len(table.date_names), "of dates"),
        (len(table.category_names), "of categories"),
        (len(table.ignored), "ignored"),
    ]
    columns = ", ".join(f"{count:,} {kind}" for count, kind in kinds if count)
    dropped = f" ({table.num_dropped:,} with missing values were dropped)"
    rows = f"{len(table.target):,} rows{dropped if table.num_dropped else ''}"
    return f"the table has {rows} and, in addition to the target, these columns: {columns}"


def _columns(
    table: Table,
    imputation: Imputation,
    fill: Sequence[float] | None,
    merged: Mapping[str, Merged],
) -> Iterator[str]:
    yield f"{shortened(table.target_name)}: target, {_target(table)}"
    filled = fill or ()
    for at, name in enumerate(table.numeric_names):
        value = f"{_filled(table, name, filled[at])}" if filled else ""
        missing = _missing(table, imputation, name, value)
        yield f"{shortened(name)}: number{missing}{_lost(table, name, merged)}"
    for name in table.date_names:
        missing = _missing(table, imputation, name, "that of each number")
        parts = ", ".join(PARTS)
        yield f"{shortened(name)}: date, as {parts}{missing}{_lost(table, name, merged)}"
    first = len(table.numeric_sources)
    for at, name in enumerate(table.category_names):
        names = table.vocabularies[at]
        value = _category(names, filled[first + at]) if name in imputation.filled else ""
        missing = _missing(table, imputation, name, value)
        hint = table.hints.get(name, "")
        yield f"{shortened(name)}: category with {_values(len(names))}{missing}{hint}"
    for name in table.ignored:
        yield f"{shortened(name)}: ignored, because data.features does not list it"


def _values(count: int) -> str:
    return f"{count:,} value{'' if count == 1 else 's'}"


def _target(table: Table) -> str:
    if table.classes is None:
        return f"a number{_lost(table, table.target_name, {})}"
    return f"{len(table.classes):,} classes: {listed(table.classes)}"


def _filled(table: Table, name: str, value: float) -> str:
    base = table.bases.get(name, 0)
    return f"{round(value) + base:,}" if base else f"{value:g}"


def _lost(table: Table, name: str, merged: Mapping[str, Merged]) -> str:
    """Describe which values were rounded, and which different values became equal for the model."""
    lost = ""
    if count := table.num_rounded.get(name, 0):
        lost = f", {_values(count)} rounded because float64 can't represent all their digits"
    if found := merged.get(name):
        lost += (
            f", of {found.num_different:,} distinct values in {found.num_rows:,} training rows, "
            f"{found.num_left:,} remain distinct in float32"
        )
    return lost


def _missing(table: Table, imputation: Imputation, name: str, value: str) -> str:
    """Describe how many values are missing, and how missing values are treated. `value` is the
    replacement."""
    count = table.num_missing.get(name, 0)
    if not count:
        return ""
    way = imputation.filled.get(name)
    if way is None:
        return f", missing in {count:,} rows, which were dropped"
    statistic = "mean" if way == "indicator" else way
    if name in table.category_names:
        statistic = "most_frequent"
    instead = f"replaced by {value} ({statistic})"
    if name in imputation.own_category:
        instead = "treated as a separate category"
    elif name in imputation.indicated:
        instead += ", with an additional input that marks missing values"
    return f", missing in {count:,} rows, {instead}"


def _category(names: tuple[str, ...], code: float) -> str:
    at = int(code) - UNKNOWN - 1
    return shortened(names[at]) if at < len(names) else ""
