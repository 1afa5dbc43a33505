"""The kind of a column, found from all of its values, and its values as numbers.

Text that is a number in every row is numbers, and text that is a date in every row is dates; any
other text is the names of categories.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from dray.spec import Missing
from ray_workers.datasets.core.errors import broken, shortened
from ray_workers.datasets.formats.dates import is_date_type, parts_of, times_in
from ray_workers.datasets.formats.table_files import TableFile

MAX_CATEGORIES = 100_000
MAX_CLASSES = 10_000
MAX_FRACTIONAL_CLASSES = 100
"""More classes whose names are fractions are probably measurements."""
FEW_ROWS = 50
"""So many names may well be all different without being identifiers."""
MISSING = (
    *("", "na", "n/a", "<na>", "#na", "#n/a", "#n/a n/a", "nan", "-nan", "null", "none", "?", "-"),
    *("1.#ind", "-1.#ind", "1.#qnan", "-1.#qnan"),
)
"""How a missing value is written, in lower case: as pandas reads it, and `?` and `-`."""
EMPTY = ("",)
"""How a missing value is written among names, of which one may well be `none`."""
NO_CODE = -1
"""The code of a missing category."""
_DECIMAL_COMMA = re.compile(r"[+-]?\d+,\d+")
_TRUTH = ("true", "false")

Numbers = npt.NDArray[np.float64]


@dataclass
class Gaps:
    """Rows without a value."""

    count: int = 0
    first: int | None = None

    def note(self, mask: Any, first_row: int) -> None:
        """mask: of the next rows, an Arrow array that is true where a value is missing."""
        rows = np.flatnonzero(mask.to_numpy(zero_copy_only=False))
        self.count += len(rows)
        if self.first is None and len(rows):
            self.first = first_row + int(rows[0])


@dataclass(eq=False)
class Column:
    """One column of a file, whose kind is found from every batch of it."""

    name: str
    is_named: bool = False
    """Whether values are taken as names, even if they are numbers."""
    missing: Missing = "error"
    """The treatment of missing values."""
    is_target: bool = False
    """Whether texts are taken as names, even `none` and dates."""
    decimal: str = "."
    """The decimal sign of numbers that are written as text."""
    num_rows: int = 0
    has_values: bool = False
    could_be_numbers: bool = True
    could_be_truth: bool = True
    could_be_dates: bool = True
    written: Gaps = field(default_factory=Gaps)
    """Missing if `none` and the like count as that."""
    empty: Gaps = field(default_factory=Gaps)
    first_text: tuple[int, str] | None = None
    """(row, value) of the first that is no number."""
    values: set[str] = field(default_factory=set)

    @property
    def holds_numbers(self) -> bool:
        return self.has_values and (self.could_be_numbers or self.could_be_truth)

    @property
    def is_category(self) -> bool:
        return self.is_named or not (self.holds_numbers or self.is_date)

    @property
    def is_date(self) -> bool:
        return self.has_values and self.could_be_dates and not (self.is_named or self.is_target)

    @property
    def gaps(self) -> Gaps:
        """The rows without a value, once all rows were seen."""
        return self.empty if self._missing_words == EMPTY else self.written

    @property
    def _missing_words(self) -> tuple[str, ...]:
        if self.is_category and (self.is_target or self.missing == "error"):
            return EMPTY
        return MISSING

    def see(self, batch: Any) -> None:
        """See the next rows: an Arrow array of text or numbers."""
        import pyarrow.compute as pc

        if not _is_text(batch):
            missing = pc.is_null(batch, nan_is_null=True)
            self.has_values |= not pc.all(missing).as_py()
            self.written.note(missing, self.num_rows)
            self.empty = self.written
            if is_date_type(batch.type):
                self.could_be_numbers = self.could_be_truth = False
            else:
                self.could_be_dates = False
        else:
            trimmed = pc.fill_null(pc.utf8_trim_whitespace(batch), "")
            missing = _is_one_of(pc.utf8_lower(trimmed), MISSING)
            self.written.note(missing, self.num_rows)
            self.empty.note(pc.equal(trimmed, ""), self.num_rows)
            self._look_at_values(trimmed, pc.invert(missing))
        self.num_rows += len(batch)

    def known(self, batch: Any) -> Any:
        """The values, with null for each that is missing."""
        import pyarrow as pa
        import pyarrow.compute as pc

        if not self.gaps.count:
            return batch
        if not _is_text(batch):
            missing = pc.is_null(batch, nan_is_null=True)
        else:
            trimmed = pc.fill_null(pc.utf8_trim_whitespace(batch), "")
            missing = _is_one_of(pc.utf8_lower(trimmed), self._missing_words)
        return pc.if_else(missing, pa.scalar(None, batch.type), batch)

    def _look_at_values(self, text: Any, there: Any) -> None:
        import pyarrow.compute as pc

        values = pc.filter(text, there)
        if len(values) == 0:
            return
        self.has_values = True
        if self.could_be_truth and not pc.all(_is_one_of(pc.utf8_lower(values), _TRUTH)).as_py():
            self.could_be_truth = False
        if self.could_be_dates and times_in(values) is None:
            self.could_be_dates = False
        if self.could_be_numbers and self._parsed(values) is None:
            self.could_be_numbers = False
            rows = np.flatnonzero(there.to_numpy(zero_copy_only=False))
            at = next(i for i in range(len(values)) if self._parsed(values.slice(i, 1)) is None)
            self.first_text = (self.num_rows + int(rows[at]), values[at].as_py())

    def _parsed(self, texts: Any) -> Any | None:
        """The texts as float64, or None if not all are numbers."""
        import pyarrow as pa
        import pyarrow.compute as pc

        if self.decimal != ".":
            if pc.any(pc.match_substring(texts, ".")).as_py():
                return None
            texts = pc.replace_substring(texts, self.decimal, ".")
        try:
            return texts.cast(pa.float64())
        except pa.ArrowInvalid:
            return None

    @property
    def hint(self) -> str:
        """Advice on options, if the column's text is probably meant for numbers."""
        if self.first_text is not None and _DECIMAL_COMMA.fullmatch(self.first_text[1]):
            return '; data.decimal: "," reads it as a number'
        return ""

    def refuse_missing(self, file: TableFile, what: str) -> None:
        """Raises DataError if a row has no value and nothing is done about it, or none has one."""
        gaps = self.gaps
        if self.num_rows and gaps.count == self.num_rows:
            advice = "" if what == "target" else "; leave it out of data.features"
            fault = f"the {what} {shortened(self.name)} has no value in any row{advice}"
            raise broken(file.place, fault)
        if gaps.first is not None and self.missing == "error":
            does = "drop leaves such rows out"
            if what != "target":
                does = "drop, mean, median, most_frequent or indicator"
            raise broken(
                file.where(gaps.first),
                f"the {what} {shortened(self.name)} has no value; data.missing says what is done "
                f"about it: {does}",
            )

    def names_of(self, batch: Any) -> Any:
        """The values as names: an Arrow array of text."""
        import pyarrow as pa

        if _is_text(batch):
            return batch
        if pa.types.is_floating(batch.type):
            names = [None if value is None else number_name(value) for value in batch.to_pylist()]
            return pa.array(names, pa.string())
        return batch.cast(pa.string())

    def numbers_of(self, batch: Any) -> Numbers:
        """The values as numbers: float64 (n,); true is 1, false is 0, and null is NaN."""
        import pyarrow as pa
        import pyarrow.compute as pc

        if not _is_text(batch):
            numbers = batch.cast(pa.float64(), safe=False)
        elif self.could_be_numbers:
            numbers = self._parsed(pc.utf8_trim_whitespace(batch))
        else:
            truth = pc.equal(pc.utf8_lower(pc.utf8_trim_whitespace(batch)), "true")
            numbers = truth.cast(pa.float64())
        found: Numbers = numbers.to_numpy(zero_copy_only=False)
        return found

    def dates_of(self, batch: Any) -> npt.NDArray[np.float32]:
        """The parts of the dates: (n, parts), NaN for null."""
        import pyarrow as pa
        import pyarrow.compute as pc

        texts = pc.utf8_trim_whitespace(batch) if _is_text(batch) else batch
        times = times_in(texts)
        assert times is not None, "every value was looked at"
        microseconds = times.cast(pa.int64())
        found = parts_of(microseconds.fill_null(0).to_numpy(zero_copy_only=False))
        found[microseconds.is_null().to_numpy(zero_copy_only=False)] = np.nan
        return found

    def collect(self, batch: Any, limit: int, file: TableFile, advice: str) -> None:
        """Gather the names that occur. DataError, with the advice, for more than `limit`."""
        import pyarrow.compute as pc

        self.values.update(pc.unique(pc.drop_null(self.names_of(batch))).to_pylist())
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
    """The place of each name in the vocabulary; NO_CODE for null."""
    import pyarrow as pa
    import pyarrow.compute as pc

    places = pc.index_in(names, value_set=pa.array(vocabulary, pa.string())).fill_null(NO_CODE)
    codes: npt.NDArray[np.int64] = places.to_numpy(zero_copy_only=False).astype(np.int64)
    return codes


def number_name(value: float) -> str:
    """A number as the name of a class: `3`, not `3.0`."""
    return str(int(value)) if float(value).is_integer() else repr(float(value))


def _is_one_of(texts: Any, words: tuple[str, ...]) -> Any:
    import pyarrow as pa
    import pyarrow.compute as pc

    return pc.is_in(texts, value_set=pa.array(words))


def _is_text(batch: Any) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_string(batch.type))
