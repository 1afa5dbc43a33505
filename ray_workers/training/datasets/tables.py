"""Tables of CSV and Parquet files: which columns count, what they are, and their prepared form."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import numpy.typing as npt

from dray import spec
from ray_workers.contracts import DataPolicy
from ray_workers.training.datasets import columns as column_kinds
from ray_workers.training.datasets import matrices
from ray_workers.training.datasets.columns import Column
from ray_workers.training.datasets.faults import broken, no_such_name, shortened
from ray_workers.training.datasets.kinds import Table
from ray_workers.training.datasets.prepared import ArrayWriter, Prepared, Workshop, prepare
from ray_workers.training.datasets.table_files import CsvFile, ParquetFile, TableFile
from ray_workers.training.datasets.unpacking import plain_file

_NO_IDENTIFIERS = "if it names each row, leave it out of data.features"
_NO_MEASUREMENTS = "if it is a number to predict, take the recipe tabular_regression"


def open_table(data: spec.Data, policy: DataPolicy, *, classifies: bool) -> Table:
    """Raises DataError."""
    form = data.known_format
    how = {
        "kind": "table",
        "format": form,
        "target": data.target,
        "features": data.features,
        "categorical": sorted(data.categorical),
        "classifies": classifies,
    }

    def build(shop: Workshop) -> Mapping[str, Any]:
        if form == "npz":
            return matrices.build_table(shop, data, classifies=classifies)
        path, place = plain_file(shop)
        file = CsvFile(path, place) if form == "csv" else ParquetFile(path, place)
        return _Building(file, shop, data, classifies=classifies).build()

    return _opened(prepare(data, policy, how, build))


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
    )


class _Building:
    """One file on its way to its prepared form, in two or three readings."""

    def __init__(
        self, file: TableFile, shop: Workshop, data: spec.Data, *, classifies: bool
    ) -> None:
        self.file, self.shop, self.data, self.classifies = file, shop, data, classifies
        target, features = self._chosen()
        file.refuse([target, *features])
        self.target = Column(target)
        self.features = [Column(name, is_named=name in data.categorical) for name in features]

    def build(self) -> Mapping[str, Any]:
        every = [self.target, *self.features]
        for batch in self.file.batches([column.name for column in every]):
            for column, values in zip(every, batch, strict=True):
                column.look(values)
        self._check_kinds()
        categories = [column for column in self.features if column.is_category]
        self._collect_names(categories)
        numbers = [column for column in self.features if not column.is_category]
        classes = self.target.vocabulary() if self.classifies else None
        vocabularies = [column.vocabulary() for column in categories]
        self._write(numbers, categories, vocabularies, classes)
        return {
            "numeric_names": [column.name for column in numbers],
            "category_names": [column.name for column in categories],
            "vocabularies": vocabularies,
            "classes": classes,
            "target_name": self.target.name,
        }

    def _chosen(self) -> tuple[str, list[str]]:
        """(target, features) by name. DataError if they are not there."""
        names, place, target = self.file.names, self.file.place, self.data.target
        assert target is not None, "the job document asks for it"
        if target not in names:
            fault = no_such_name("column", target, names)
            if len(names) == 1 and any(mark in names[0] for mark in ";\t|"):
                fault += "; the fields must be separated by commas"
            raise broken(place, f"data.target: {fault}")
        features = self.data.features or [name for name in names if name != target]
        for name in features:
            if name not in names:
                raise broken(place, f"data.features: {no_such_name('column', name, names)}")
            if name == target or features.count(name) > 1:
                fault = "is the target" if name == target else "is there more than once"
                raise broken(place, f"data.features: {shortened(name)} {fault}")
        if not features:
            raise broken(place, "has no column besides the target to predict it from")
        for name in self.data.categorical:
            if name not in features:
                fault = no_such_name("feature", name, features)
                raise broken(place, f"data.categorical: {fault}")
        return target, features

    def _check_kinds(self) -> None:
        if self.target.num_rows == 0:
            raise broken(self.file.place, "has column names but no row")
        for column in self.features:
            column.refuse_missing(self.file, "column")
        self.target.refuse_missing(self.file, "target")
        if not self.classifies and not self.target.holds_numbers:
            row, value = self.target.first_text or (0, "")
            raise broken(
                self.file.where(row),
                f"the target {shortened(self.target.name)} is {shortened(value)}, no number; "
                "regression predicts numbers, tabular_classification predicts names",
            )

    def _collect_names(self, categories: Sequence[Column]) -> None:
        """Every name of the categories and of the classes."""
        named = [*categories, self.target] if self.classifies else [*categories]
        if not named:
            return
        fractions: set[float] = set()
        for batch in self.file.batches([column.name for column in named]):
            for column, values in zip(named, batch, strict=True):
                if column is not self.target:
                    column.collect(values, column_kinds.MAX_CATEGORIES, self.file, _NO_IDENTIFIERS)
                    continue
                if column.holds_numbers:
                    self._refuse_measurements(column.numbers_of(values), fractions)
                names = self._class_names(values)
                column.collect(names, column_kinds.MAX_CLASSES, self.file, _NO_MEASUREMENTS)
        for column in categories:
            is_identifier = len(column.values) == column.num_rows > column_kinds.FEW_ROWS
            if is_identifier and not column.is_named:
                raise broken(
                    self.file.place,
                    f"the column {shortened(column.name)} has another text in every row, so "
                    "nothing can be learned from it; leave it out of data.features",
                )
        if self.classifies:
            self._refuse_one_class()

    def _refuse_one_class(self) -> None:
        if len(self.target.values) == 1:
            (only,) = self.target.values
            raise broken(
                self.file.place,
                f"the target {shortened(self.target.name)} has one class only, "
                f"{shortened(only)}; it takes two",
            )

    def _class_names(self, values: Any) -> Any:
        """Names of classes: of numbers the same however they are written."""
        import pyarrow as pa

        if not self.target.holds_numbers or not self.target.could_be_numbers:
            return self.target.names_of(values)
        if pa.types.is_boolean(values.type):
            return values.cast(pa.string())
        numbers = self.target.numbers_of(values)
        different, where = np.unique(numbers, return_inverse=True)
        names = pa.array([column_kinds.number_name(one) for one in different.tolist()], pa.string())
        return names.take(pa.array(where))

    def _refuse_measurements(self, numbers: npt.NDArray[Any], known: set[float]) -> None:
        if not np.isfinite(numbers).all():
            raise broken(
                self.file.place, f"the target {shortened(self.target.name)} is not always finite"
            )
        known.update(number for number in np.unique(numbers).tolist() if number % 1)
        if len(known) > column_kinds.MAX_FRACTIONAL_CLASSES:
            raise broken(
                self.file.place,
                f"the target {shortened(self.target.name)} has more than "
                f"{column_kinds.MAX_FRACTIONAL_CLASSES} different fractions, which are no "
                "classes; tabular_regression predicts numbers",
            )

    def _write(
        self,
        numbers: Sequence[Column],
        categories: Sequence[Column],
        vocabularies: Sequence[tuple[str, ...]],
        classes: tuple[str, ...] | None,
    ) -> None:
        output, budget = self.shop.output, self.shop.budget
        with ExitStack() as open_files:
            numeric, codes, target = (
                open_files.enter_context(ArrayWriter(output, name, shape, dtype, budget))
                for name, shape, dtype in (
                    ("numeric", (len(numbers),), np.float32),
                    ("categories", (len(categories),), np.int32),
                    ("target", (), np.float32 if classes is None else np.int64),
                )
            )
            for first_row, part in self._parts(numbers, categories):
                values = part[0]
                if classes is None:
                    found = self._finite(self.target, values, first_row)
                    target.append(found.astype(np.float32))
                else:
                    target.append(column_kinds.codes_of(self._class_names(values), classes))
                features = part[1 : 1 + len(numbers)]
                block = np.empty((len(values), len(numbers)), dtype=np.float32)
                for at, (column, one) in enumerate(zip(numbers, features, strict=True)):
                    block[:, at] = self._finite(column, one, first_row)
                numeric.append(block)
                names = part[1 + len(numbers) :]
                coded = np.empty((len(values), len(categories)), dtype=np.int32)
                for at, (column, one) in enumerate(zip(categories, names, strict=True)):
                    coded[:, at] = column_kinds.codes_of(column.names_of(one), vocabularies[at])
                codes.append(coded)

    def _parts(
        self, numbers: Sequence[Column], categories: Sequence[Column]
    ) -> Iterator[tuple[int, list[Any]]]:
        """(its first row, target, numbers and categories) of each batch."""
        first_row = 0
        for batch in self.file.batches([c.name for c in (self.target, *numbers, *categories)]):
            yield first_row, batch
            first_row += len(batch[0])

    def _finite(self, column: Column, values: Any, first_row: int) -> npt.NDArray[np.float32]:
        """float32 (n,). DataError for the first value that is none."""
        with np.errstate(over="ignore"):
            found = column.numbers_of(values).astype(np.float32)
        bad = np.flatnonzero(~np.isfinite(found))
        if len(bad):
            value = values[int(bad[0])].as_py()
            raise broken(
                self.file.where(first_row + int(bad[0])),
                f"the column {shortened(column.name)} is {value}, which is no finite number of "
                "32 bits",
            )
        return found
