"""What is in a column, found by looking at all of it, and its values as numbers.

Text that is a number in every row is numbers; any other text is the names of categories.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from ray_workers.training.datasets.faults import broken, shortened
from ray_workers.training.datasets.table_files import TableFile

MAX_CATEGORIES = 100_000
MAX_CLASSES = 10_000
MAX_FRACTIONAL_CLASSES = 100
"""More classes whose names are fractions are probably measurements."""
FEW_ROWS = 50
"""So many names may well be all different without being identifiers."""
MISSING = ("", "na", "n/a", "#n/a", "nan", "null", "none", "?", "-")
"""How a missing number is written, in lower case."""
_TRUTH = ("true", "false")

Numbers = npt.NDArray[np.float64]


@dataclass
class Column:
    """One column of a file, which learns what it is from every batch of it."""

    name: str
    is_named: bool = False
    """Its values are names, even if they are numbers."""
    num_rows: int = 0
    has_values: bool = False
    could_be_numbers: bool = True
    could_be_truth: bool = True
    first_missing: int | None = None
    """First row without a value, if these are numbers."""
    first_empty: int | None = None
    first_text: tuple[int, str] | None = None
    """(row, value) of the first that is no number."""
    values: set[str] = field(default_factory=set)

    @property
    def holds_numbers(self) -> bool:
        return self.has_values and (self.could_be_numbers or self.could_be_truth)

    @property
    def is_category(self) -> bool:
        return self.is_named or not self.holds_numbers

    def look(self, batch: Any) -> None:
        """See the next rows: an Arrow array of text or numbers."""
        import pyarrow.compute as pc

        if not _is_text(batch):
            self.has_values |= batch.null_count < len(batch)
            self.first_missing = self._first(self.first_missing, pc.is_null(batch))
            self.first_empty = self.first_missing
        else:
            trimmed = pc.fill_null(pc.utf8_trim_whitespace(batch), "")
            missing = _is_one_of(pc.utf8_lower(trimmed), MISSING)
            self.first_missing = self._first(self.first_missing, missing)
            self.first_empty = self._first(self.first_empty, pc.equal(trimmed, ""))
            self._look_at_values(trimmed, pc.invert(missing))
        self.num_rows += len(batch)

    def _look_at_values(self, text: Any, there: Any) -> None:
        import pyarrow.compute as pc

        values = pc.filter(text, there)
        if len(values) == 0:
            return
        self.has_values = True
        if self.could_be_truth and not pc.all(_is_one_of(pc.utf8_lower(values), _TRUTH)).as_py():
            self.could_be_truth = False
        if self.could_be_numbers and _parsed(values) is None:
            self.could_be_numbers = False
            rows = np.flatnonzero(there.to_numpy(zero_copy_only=False))
            at = next(i for i in range(len(values)) if _parsed(values.slice(i, 1)) is None)
            self.first_text = (self.num_rows + int(rows[at]), values[at].as_py())

    def _first(self, known: int | None, mask: Any) -> int | None:
        if known is not None:
            return known
        found = np.flatnonzero(mask.to_numpy(zero_copy_only=False))
        return self.num_rows + int(found[0]) if len(found) else None

    def refuse_missing(self, file: TableFile, what: str) -> None:
        """Raises DataError if a row has no value."""
        row = self.first_empty if self.is_category else self.first_missing
        if row is not None:
            raise broken(file.where(row), f"the {what} {shortened(self.name)} has no value")

    def names_of(self, batch: Any) -> Any:
        """The values as names: an Arrow array of text."""
        import pyarrow as pa

        if _is_text(batch):
            return batch
        if pa.types.is_floating(batch.type):
            return pa.array([number_name(value) for value in batch.to_pylist()], pa.string())
        return batch.cast(pa.string())

    def numbers_of(self, batch: Any) -> Numbers:
        """The values as numbers: float64 (n,); true is 1 and false is 0."""
        import pyarrow as pa
        import pyarrow.compute as pc

        if not _is_text(batch):
            numbers = batch.cast(pa.float64(), safe=False)
        elif self.could_be_numbers:
            numbers = _parsed(pc.utf8_trim_whitespace(batch))
        else:
            truth = pc.equal(pc.utf8_lower(pc.utf8_trim_whitespace(batch)), "true")
            numbers = truth.cast(pa.float64())
        found: Numbers = numbers.to_numpy(zero_copy_only=False)
        return found

    def collect(self, batch: Any, limit: int, file: TableFile, advice: str) -> None:
        """Gather the names that occur. DataError, with the advice, for more than `limit`."""
        import pyarrow.compute as pc

        self.values.update(pc.unique(self.names_of(batch)).to_pylist())
        if len(self.values) > limit:
            raise broken(
                file.place,
                f"the column {shortened(self.name)} has more than {limit:,} different names; "
                f"{advice}",
            )

    def vocabulary(self) -> tuple[str, ...]:
        return in_order(self.values)


def in_order(names: set[str]) -> tuple[str, ...]:
    """Whole numbers by their size, anything else by its characters."""
    if all(name.removeprefix("-").isdecimal() for name in names):
        return tuple(sorted(names, key=lambda name: (int(name), name)))
    return tuple(sorted(names))


def codes_of(names: Any, vocabulary: tuple[str, ...]) -> npt.NDArray[np.int64]:
    """Where each name stands in the vocabulary."""
    import pyarrow as pa
    import pyarrow.compute as pc

    places = pc.index_in(names, value_set=pa.array(vocabulary, pa.string()))
    codes: npt.NDArray[np.int64] = places.to_numpy(zero_copy_only=False).astype(np.int64)
    return codes


def number_name(value: float) -> str:
    """A number as the name of a class: `3`, not `3.0`."""
    return str(int(value)) if float(value).is_integer() else repr(float(value))


def _is_one_of(texts: Any, words: tuple[str, ...]) -> Any:
    import pyarrow as pa
    import pyarrow.compute as pc

    return pc.is_in(texts, value_set=pa.array(words))


def _parsed(texts: Any) -> Any | None:
    """The texts as float64, or None if not all are numbers."""
    import pyarrow as pa

    try:
        return texts.cast(pa.float64())
    except pa.ArrowInvalid:
        return None


def _is_text(batch: Any) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_string(batch.type))
