"""Tables from CSV and Parquet files: columns, their kinds, and the prepared form."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dray import spec
from ray_workers.datasets.core.errors import broken, listed, no_such_name, shortened
from ray_workers.datasets.core.types import Table, sources_of
from ray_workers.datasets.formats import columns as column_kinds
from ray_workers.datasets.formats import npz
from ray_workers.datasets.formats.archives import plain_file
from ray_workers.datasets.formats.columns import MAX_FLOAT32, Column
from ray_workers.datasets.formats.dates import PARTS
from ray_workers.datasets.formats.folder_splits import is_division, is_named
from ray_workers.datasets.formats.number_texts import NumberStyle, number_name
from ray_workers.datasets.formats.prepared import ArrayWriter, Prepared, Workshop, prepare
from ray_workers.datasets.formats.table_files import NO_ROW, CsvFile, ParquetFile, TableFile
from ray_workers.datasets.formats.utf8 import converted
from ray_workers.shared.node_needs import DataPolicy

TABLE_VERSION = 5
"""Part of the cache key of every table. Change this version whenever the files of a table
change."""
Rows = npt.NDArray[np.int64]

_NO_IDENTIFIERS = "if the column identifies rows, leave it out of data.features"
_NO_MEASUREMENTS = "to predict a number, use the recipe tabular_regression"


def open_table(data: spec.Data, policy: DataPolicy, *, classifies: bool) -> Table:
    """Open a table. Raises DataError."""
    form = data.known_format
    how = {
        "kind": "table",
        "version": TABLE_VERSION,
        "format": form,
        "target": data.target,
        "features": data.features,
        "categorical": sorted(data.categorical),
        "delimiter": data.known_delimiter,
        "encoding": data.encoding,
        "decimal": data.decimal,
        "numbers": data.numbers.model_dump(),
        "missing": data.missing,
        "missing_columns": data.missing_columns,
        "classifies": classifies,
    }

    def build(shop: Workshop) -> Mapping[str, Any]:
        if form == "npz":
            return npz.build_table(shop, data, classifies=classifies)
        path, location = plain_file(shop)
        file = (
            ParquetFile(path, location) if form == "parquet" else _csv(path, location, shop, data)
        )
        return _Building(file, shop, data, classifies=classifies).build()

    return _opened(prepare(data, policy, how, build))


def _csv(path: Path, location: str, shop: Workshop, data: spec.Data) -> CsvFile:
    text = converted(path, data.encoding, location, shop.scratch / "utf8", shop.budget)
    return CsvFile(text, location, data.known_delimiter)


def _opened(prepared: Prepared) -> Table:
    meta = prepared.meta
    return Table(
        numeric=prepared.array("numeric"),
        categories=prepared.array("categories"),
        target=prepared.array("target"),
        numeric_names=tuple(meta["numeric_names"]),
        category_names=tuple(meta["category_names"]),
        vocabularies=tuple(tuple(names) for names in meta["vocabularies"]),
        classes=None if meta["classes"] is None else tuple(meta["classes"]),
        target_name=meta["target_name"],
        fingerprint=prepared.fingerprint,
        date_names=tuple(meta.get("date_names", ())),
        num_missing=meta.get("num_missing", {}),
        num_dropped=meta.get("num_dropped", 0),
        ignored=meta.get("ignored", ()),
        bases=meta["bases"],
        num_rounded=meta["num_rounded"],
        hints=meta.get("hints", {}),
    )


class _Building:
    """Converts a file to its prepared form in two to four passes."""

    def __init__(
        self, file: TableFile, shop: Workshop, data: spec.Data, *, classifies: bool
    ) -> None:
        self.file, self.shop, self.data, self.classifies = file, shop, data, classifies
        target, features = self._chosen()
        file.refuse([target, *data.categorical], dates=False)
        file.refuse(features)
        self.target = self._column(target)
        self.features = [self._column(name) for name in features]

    def _column(self, name: str) -> Column:
        data = self.data
        return Column(
            name,
            is_named=name in data.categorical,
            missing=data.missing_in(name),
            is_target=name == data.target,
            style=NumberStyle.of(data),
        )

    def build(self) -> Mapping[str, Any]:
        every = self._every
        for batch in self.file.batches([column.name for column in every]):
            for column, values in zip(every, batch, strict=True):
                column.see(values)
        self._check_kinds()
        categories = [column for column in self.features if column.is_category]
        self._collect_names(categories)
        dates = [column for column in self.features if column.is_date]
        numbers = [c for c in self.features if not (c.is_category or c.is_date)]
        self._find_bases_again(self._measured(numbers))
        classes = self.target.vocabulary() if self.classifies else None
        vocabularies = [column.vocabulary() for column in categories]
        chosen = {column.name for column in every}
        num_kept = self._write(numbers, dates, categories, vocabularies, classes)
        return {
            "numeric_names": [column.name for column in numbers],
            "date_names": [column.name for column in dates],
            "category_names": [column.name for column in categories],
            "vocabularies": vocabularies,
            "classes": classes,
            "target_name": self.target.name,
            "num_missing": {c.name: c.gaps.count for c in every if c.gaps.count},
            "num_dropped": self.target.num_rows - num_kept,
            "ignored": [name for name in self.file.names if name not in chosen],
            "bases": {c.name: c.base for c in self._measured(numbers) if c.base},
            "num_rounded": {c.name: c.num_rounded for c in every if c.num_rounded},
            "hints": {column.name: column.hint for column in categories if column.hint},
        }

    def _measured(self, numbers: Sequence[Column]) -> list[Column]:
        """Return the columns with numbers."""
        return [*numbers] if self.classifies else [self.target, *numbers]

    @property
    def _every(self) -> list[Column]:
        return [self.target, *self.features]

    def _chosen(self) -> tuple[str, list[str]]:
        """Return the names of (target, features). Raises DataError if one of these columns doesn't
        exist."""
        names, location, target = self.file.names, self.file.location, self.data.target
        assert target is not None, "the job document requires it"
        if target not in names:
            fault = no_such_name("column", target, names)
            raise broken(location, f"data.target: {fault}{self.file.hint}")
        features = self.data.features or [name for name in names if name != target]
        for name in features:
            if name not in names:
                raise broken(location, f"data.features: {no_such_name('column', name, names)}")
            if name == target or features.count(name) > 1:
                fault = "is the target" if name == target else "is listed more than once"
                raise broken(location, f"data.features: {shortened(name)} {fault}")
        if not features:
            raise broken(location, "has no columns other than the target")
        for option, chosen, known in (
            ("categorical", self.data.categorical, features),
            ("missing_columns", self.data.missing_columns, [*features, target]),
        ):
            for name in chosen:
                if name not in known:
                    fault = no_such_name("feature", name, features)
                    raise broken(location, f"data.{option}: {fault}")
        return target, features

    def _check_kinds(self) -> None:
        if self.target.num_rows == 0:
            raise broken(self.file.location, NO_ROW)
        for column in self.features:
            column.refuse_missing(self.file, "column")
        self.target.refuse_missing(self.file, "target")
        if not self.classifies and not self.target.holds_numbers:
            row, value = self.target.first_text or (0, "")
            raise broken(
                self.file.where(row),
                f"the target {shortened(self.target.name)} has the value {shortened(value)}, "
                "which is not a number; regression predicts numbers, so to predict class names, "
                f"use tabular_classification{self.target.hint}",
            )

    def _find_bases_again(self, columns: Sequence[Column]) -> None:
        """Determine the bases again without the values of dropped rows. A base that is far from the
        remaining values would cause float64 to round these values."""
        wide = [column for column in columns if column.is_wide]
        if not wide or not self._dropping:
            return
        for column in wide:
            column.forget_range()
        for _, batch in self._kept_rows(wide):
            for column, values in zip(wide, batch, strict=True):
                column.see_range(values)

    def _collect_names(self, categories: Sequence[Column]) -> None:
        """Collect all names of categories and classes."""
        named = [*categories, self.target] if self.classifies else [*categories]
        if not named:
            return
        fractions: set[Any] = set()
        for _, batch in self._kept_rows(named):
            for column, values in zip(named, batch, strict=True):
                if column is not self.target:
                    column.collect(values, column_kinds.MAX_CATEGORIES, self.file, _NO_IDENTIFIERS)
                    continue
                if column.holds_numbers:
                    self._refuse_measurements(column.numbers_of(values)[0], fractions)
                names = self._class_names(values)
                column.collect(names, column_kinds.MAX_CLASSES, self.file, _NO_MEASUREMENTS)
        for column in categories:
            column.refuse_bad_cell(self.file)
            self._refuse_division(column)
            num_values = column.num_rows - column.gaps.count
            is_identifier = len(column.values) == num_values > column_kinds.FEW_ROWS
            if is_identifier and not column.is_named:
                raise broken(
                    self.file.location,
                    f"the column {shortened(column.name)} has a different string in every row, so "
                    f"a model can't learn from it; leave it out of data.features{column.hint}",
                )
        if self.classifies:
            self._refuse_one_class()

    def _refuse_division(self, column: Column) -> None:
        """Raise DataError for a column that assigns rows to training or validation, unless the
        column is explicitly requested."""
        is_asked_for = self.data.features is not None or column.is_named
        if is_asked_for or not all(map(is_named, column.values)) or not is_division(column.values):
            return
        raise broken(
            self.file.location,
            f"the column {shortened(column.name)} splits the rows into {listed(column.values)}, "
            "but the split is defined by data.validation_fraction, and a model should not learn "
            "from this column: list the columns to use in data.features, and include this "
            "column only if the model needs it",
        )

    def _refuse_one_class(self) -> None:
        if len(self.target.values) == 1:
            (only,) = self.target.values
            raise broken(
                self.file.location,
                f"the target {shortened(self.target.name)} has only one class, "
                f"{shortened(only)}, but needs two",
            )

    def _class_names(self, values: Any) -> Any:
        """Return the names of classes. Equal numbers have the same name regardless of their
        notation."""
        import pyarrow as pa

        if not self.target.holds_numbers or not self.target.could_be_numbers:
            return self.target.names_of(values)
        if pa.types.is_boolean(values.type):
            return values.cast(pa.string())
        different, where = np.unique(self.target.numbers_of(values)[0], return_inverse=True)
        names = pa.array([number_name(one) for one in different.tolist()], pa.string())
        return names.take(pa.array(where))

    def _refuse_measurements(self, numbers: npt.NDArray[Any], known: set[Any]) -> None:
        different = np.unique(numbers).tolist()
        if not all(map(math.isfinite, different)):
            raise broken(
                self.file.location,
                f"the target {shortened(self.target.name)} has values that are not finite",
            )
        known.update(number for number in different if number != int(number))
        if len(known) > column_kinds.MAX_FRACTIONAL_CLASSES:
            raise broken(
                self.file.location,
                f"the target {shortened(self.target.name)} has more than "
                f"{column_kinds.MAX_FRACTIONAL_CLASSES} different fractional values, so they are "
                "not classes; to predict numbers, use tabular_regression",
            )

    def _write(
        self,
        numbers: Sequence[Column],
        dates: Sequence[Column],
        categories: Sequence[Column],
        vocabularies: Sequence[tuple[str, ...]],
        classes: tuple[str, ...] | None,
    ) -> int:
        """Write the arrays. Returns the number of rows."""
        output, budget = self.shop.output, self.shop.budget
        num_numeric = len(sources_of([c.name for c in numbers], [c.name for c in dates]))
        with ExitStack() as open_files:
            numeric, codes, target = (
                open_files.enter_context(ArrayWriter(output, name, shape, dtype, budget))
                for name, shape, dtype in (
                    ("numeric", (num_numeric,), np.float64),
                    ("categories", (len(categories),), np.int32),
                    ("target", (), np.float64 if classes is None else np.int64),
                )
            )
            for rows, part in self._kept_rows([self.target, *numbers, *dates, *categories]):
                values = iter(part)
                if classes is None:
                    target.append(self._finite(self.target, next(values), rows))
                else:
                    names = self._class_names(next(values))
                    target.append(column_kinds.codes_of(names, classes))
                block = np.empty((len(rows), num_numeric))
                for at, column in enumerate(numbers):
                    block[:, at] = self._finite(column, next(values), rows)
                for at, column in enumerate(dates):
                    first = len(numbers) + at * len(PARTS)
                    block[:, first : first + len(PARTS)] = column.dates_of(next(values))
                numeric.append(block)
                coded = np.empty((len(rows), len(categories)), dtype=np.int32)
                for at, (column, known) in enumerate(zip(categories, vocabularies, strict=True)):
                    coded[:, at] = column_kinds.codes_of(column.names_of(next(values)), known)
                codes.append(coded)
            num_rows = target.num_rows
        if num_rows == 0:
            raise broken(self.file.location, "has missing values in every row")
        return num_rows

    @property
    def _dropping(self) -> list[Column]:
        """Columns whose missing values cause rows to be dropped."""
        return [c for c in self._every if c.missing == "drop" and c.gaps.count]

    def _kept_rows(self, columns: Sequence[Column]) -> Iterator[tuple[Rows, list[Any]]]:
        """Yield (row numbers, known values of the columns) for each batch, without dropped rows."""
        import pyarrow as pa

        dropping = self._dropping
        every = list(dict.fromkeys([*columns, *dropping]))
        first_row = 0
        for batch in self.file.batches([column.name for column in every]):
            known = dict(zip(every, map(Column.known, every, batch), strict=True))
            is_kept = np.ones(len(batch[0]), dtype=bool)
            for column in dropping:
                is_kept &= known[column].is_valid().to_numpy(zero_copy_only=False)
            values = [known[column] for column in columns]
            if not is_kept.all():
                values = [one.filter(pa.array(is_kept)) for one in values]
            yield first_row + np.flatnonzero(is_kept), values
            first_row += len(is_kept)

    def _finite(self, column: Column, values: Any, rows: Rows) -> npt.NDArray[np.float64]:
        """Return the (n,) values minus the column's base, with NaN for nulls. Raises DataError for
        the first value outside the range of float32, because the model computes in float32."""
        found = column.relative_of(values)
        is_known = values.is_valid().to_numpy(zero_copy_only=False)
        bad = np.flatnonzero(~(np.abs(found) <= MAX_FLOAT32) & is_known)
        if len(bad):
            at = int(bad[0])
            raise broken(
                self.file.where(int(rows[at])),
                f"the column {shortened(column.name)} has the value {values[at].as_py()}, which is "
                "not a finite 32-bit number",
            )
        return found
