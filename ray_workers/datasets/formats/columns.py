"""Determine the kind of a column from all of its values, and convert the values to numbers.

A column whose text is a number in every row is numeric, and a column whose text is a date in every
row is a date column. Any other text is the name of a category. A column whose text is a number in
nearly every row is rejected, with an error that names a row whose text is not a number.

Numbers are float64. Integers that float64 would round are read exactly, and the column's `base` is
subtracted before they are converted to float64.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

import numpy as np
import numpy.typing as npt

from dray.spec import Missing
from ray_workers.datasets.core.errors import broken, shortened
from ray_workers.datasets.formats.dates import is_date_type, parts_of, times_in
from ray_workers.datasets.formats.number_texts import (
    PLAIN,
    Exact,
    NumberStyle,
    exact_values,
    number_name,
    relative,
)
from ray_workers.datasets.formats.table_files import TableFile

MAX_CATEGORIES = 100_000
MAX_CLASSES = 10_000
MAX_FRACTIONAL_CLASSES = 100
"""Maximum number of classes whose names are fractions. If there are more, the names are probably
measurements."""
FEW_ROWS = 50
"""In a table with at most this many rows, names can all be different without being identifiers."""
MISSING = (
    *("", "na", "n/a", "<na>", "#na", "#n/a", "#n/a n/a", "nan", "-nan", "null", "none", "?", "-"),
    *("1.#ind", "-1.#ind", "1.#qnan", "-1.#qnan"),
)
"""Notations for missing values, in lower case: pandas' notations, `?` and `-`."""
EMPTY = ("",)
"""Strings that represent missing values in a column of names. Words are not included, because
`none`, for example, can be a name."""
NO_CODE = -1
"""Code of a missing category."""
MAX_FLOAT32 = float(np.finfo(np.float32).max)
EXACT_WHOLE = 1 << 53
"""The largest integer up to which float64 represents all integers exactly."""
LARGE = 1e15
"""A number well below the limit up to which float64 represents all integers."""
BASE_BITS = 32
"""Bases are multiples of 2**BASE_BITS, so that files with similar numbers have the same base."""
MAX_BAD_SHARE = 0.1
"""Maximum fraction of the values in a numeric column that may be text. A column with a larger
fraction is a category column."""
LEAST_NUMBERS = 3
MAX_NUMBERED_CATEGORIES = 20
"""Maximum number of distinct numbers that can be categories. A column with more distinct numbers
probably contains measurements."""
_TRUTH = ("true", "false")

Numbers = npt.NDArray[np.float64]


@dataclass
class Gaps:
    """Rows in which a value is missing."""

    count: int = 0
    first: int | None = None

    def note(self, mask: Any, first_row: int) -> None:
        """Record missing values. mask: an Arrow array for the next rows, true where a value is
        missing."""
        rows = np.flatnonzero(mask.to_numpy(zero_copy_only=False))
        self.count += len(rows)
        if self.first is None and len(rows):
            self.first = first_row + int(rows[0])


@dataclass(eq=False)
class Column:
    """A column of a file, whose kind is determined from all of its batches."""

    name: str
    is_named: bool = False
    """Whether values are treated as names even if they are numbers."""
    missing: Missing = "error"
    """How missing values are handled."""
    is_target: bool = False
    """Whether all strings are treated as names, including dates and words such as `none`."""
    style: NumberStyle = PLAIN
    """Notation of numbers in text."""
    num_rows: int = 0
    num_numbers: int = 0
    """Number of strings that are numbers."""
    num_texts: int = 0
    """Number of strings that are not numbers."""
    has_values: bool = False
    could_be_numbers: bool = True
    could_be_truth: bool = True
    could_be_dates: bool = True
    written: Gaps = field(default_factory=Gaps)
    """Missing values, if words such as `none` count as missing."""
    empty: Gaps = field(default_factory=Gaps)
    first_text: tuple[int, str] | None = None
    """(row, value) of the first text that is not a number."""
    values: set[str] = field(default_factory=set)
    num_rounded: int = 0
    """Number of values that `relative_of` had to round to the nearest float64."""
    is_wide: bool = False
    """Whether an integer exceeds the range that float64 represents exactly."""
    _lowest: int | None = None

    @property
    def base(self) -> int:
        """The offset to subtract from every value; known once all rows have been seen. The
        offset is 0 unless there are integers that float64 can't represent."""
        return base_of(self._lowest) if self.is_wide and self._lowest is not None else 0

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
        """How missing values are represented; only meaningful once all rows have been seen."""
        return self.empty if self._missing_words == EMPTY else self.written

    @property
    def _missing_words(self) -> tuple[str, ...]:
        if self.is_category and (self.is_target or self.missing == "error"):
            return EMPTY
        return MISSING

    def see(self, batch: Any) -> None:
        """Process the next rows. batch: an Arrow array of text or numbers."""
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
                self.see_range(batch)
        else:
            trimmed = pc.fill_null(pc.utf8_trim_whitespace(batch), "")
            missing = _is_one_of(pc.utf8_lower(trimmed), MISSING)
            self.written.note(missing, self.num_rows)
            self.empty.note(pc.equal(trimmed, ""), self.num_rows)
            self._look_at_values(trimmed, pc.invert(missing))
        self.num_rows += len(batch)

    def forget_range(self) -> None:
        """Reset the range of values, before `see_range` is called for each batch of kept rows."""
        self._lowest, self.is_wide = None, False

    def see_range(self, batch: Any) -> None:
        self._note_range(*self.numbers_of(batch))

    def known(self, batch: Any) -> Any:
        """Return the values, with null for missing values."""
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

    def _look_at_values(self, text: Any, is_present: Any) -> None:
        import pyarrow.compute as pc

        values = pc.filter(text, is_present)
        if len(values) == 0:
            return
        self.has_values = True
        if self.could_be_truth and not pc.all(_is_one_of(pc.utf8_lower(values), _TRUTH)).as_py():
            self.could_be_truth = False
        if self.could_be_dates and times_in(values) is None:
            self.could_be_dates = False
        plain, is_number = self.style.plain(values)
        numbers = int(pc.sum(is_number).as_py())
        self.num_numbers += numbers
        self.num_texts += len(values) - numbers
        if numbers < len(values):
            self.could_be_numbers = False
            if self.first_text is None:
                rows = np.flatnonzero(is_present.to_numpy(zero_copy_only=False))
                at = int(np.flatnonzero(~is_number.to_numpy(zero_copy_only=False))[0])
                self.first_text = (self.num_rows + int(rows[at]), values[at].as_py())
        elif self.could_be_numbers:
            self._note_range(*_values_of(plain))

    def _note_range(self, values: npt.NDArray[Any], is_known: npt.NDArray[np.bool_]) -> None:
        """Record the lowest value, and whether any value is too large for float64. Values that are
        rejected later are ignored."""
        values = values[is_known]
        if values.dtype == object:
            whole = [int(one) for one in values if abs(one) <= MAX_FLOAT32]
        else:
            finite = values[np.abs(values) <= MAX_FLOAT32]
            whole = [_floor(one) for one in (finite.min(), finite.max())] if len(finite) else []
        if not whole:
            return
        lowest = min(whole)
        self._lowest = lowest if self._lowest is None else min(lowest, self._lowest)
        if values.dtype.kind in "iuO":
            self.is_wide |= max(-lowest, max(whole)) > EXACT_WHOLE

    @property
    def hint(self) -> str:
        """Advice on options, if the strings in the column were probably meant to be numbers."""
        return "" if self.first_text is None else self.style.advice(self.first_text[1])

    def refuse_bad_cell(self, file: TableFile) -> None:
        """Raise DataError if almost all cells of the column contain measurements. Must be called
        after all names, or more names than the limit, have been collected."""
        total = self.num_numbers + self.num_texts
        if self.is_named or self.first_text is None or self.num_numbers < LEAST_NUMBERS:
            return
        if self.num_texts > max(1, MAX_BAD_SHARE * total) or not self._has_measurements():
            return
        row, value = self.first_text
        others = ""
        if self.num_texts > 1:
            others = f" (one of {self.num_texts:,} such values)"
        raise broken(
            file.where(row),
            f"the column {shortened(self.name)} has the value {shortened(value)}, which is not a "
            f"number{others}, although {self.num_numbers:,} of its {total:,} values are numbers"
            f"{self.hint}; correct the file, or list the column in data.categorical to treat its "
            "values as names",
        )

    def _has_measurements(self) -> bool:
        """Whether the values that are numbers seem to be measurements rather than codes."""
        import pyarrow as pa

        plain, is_number = self.style.plain(pa.array(sorted(self.values), pa.string()))
        numbers = plain.filter(is_number).to_pylist()
        many = min(MAX_NUMBERED_CATEGORIES, self.num_numbers // 2)
        return len(numbers) > many or any("." in text for text in numbers)

    def refuse_missing(self, file: TableFile, what: str) -> None:
        """Raise DataError if a value is missing and `missing` is "error", or if all values are
        missing."""
        gaps = self.gaps
        if self.num_rows and gaps.count == self.num_rows:
            advice = "" if what == "target" else "; leave it out of data.features"
            fault = f"the {what} {shortened(self.name)} has no values{advice}"
            raise broken(file.location, fault)
        if gaps.first is not None and self.missing == "error":
            ways = "drop, which skips such rows"
            if what != "target":
                ways = "drop, mean, median, most_frequent or indicator"
            raise broken(
                file.where(gaps.first),
                f"the {what} {shortened(self.name)} has no value; set data.missing to {ways}",
            )

    def names_of(self, batch: Any) -> Any:
        """Return the values as names, in an Arrow array of strings."""
        import pyarrow as pa

        if _is_text(batch):
            return batch
        if pa.types.is_floating(batch.type) or pa.types.is_decimal(batch.type):
            names = [None if value is None else number_name(value) for value in batch.to_pylist()]
            return pa.array(names, pa.string())
        return batch.cast(pa.string())

    def numbers_of(self, batch: Any) -> tuple[npt.NDArray[Any], npt.NDArray[np.bool_]]:
        """Return (values, whether each value is known), each (n,). The values are exact: int64,
        uint64, float64, or objects of type `Exact`. True is 1 and false is 0."""
        import pyarrow as pa
        import pyarrow.compute as pc

        if not _is_text(batch):
            return _values_of(batch)
        trimmed = pc.utf8_trim_whitespace(batch)
        if self.could_be_numbers:
            return _values_of(self.style.plain(trimmed)[0])
        return _values_of(pc.equal(pc.utf8_lower(trimmed), "true").cast(pa.float64()))

    def relative_of(self, batch: Any) -> Numbers:
        """Return the values minus `base` as float64 (n,), with NaN for null."""
        values, is_known = self.numbers_of(batch)
        found = np.full(len(values), np.nan)
        found[is_known], num_rounded = differences(values[is_known], self.base)
        self.num_rounded += num_rounded
        return found

    def dates_of(self, batch: Any) -> Numbers:
        """Return the parts of the dates as (n, parts), with NaN for null."""
        import pyarrow as pa
        import pyarrow.compute as pc

        texts = pc.utf8_trim_whitespace(batch) if _is_text(batch) else batch
        times = times_in(texts)
        assert times is not None, "every value has been checked"
        microseconds = times.cast(pa.int64())
        found = parts_of(microseconds.fill_null(0).to_numpy(zero_copy_only=False))
        found[microseconds.is_null().to_numpy(zero_copy_only=False)] = np.nan
        return found

    def collect(self, batch: Any, limit: int, file: TableFile, advice: str) -> None:
        """Add the batch's names to `values`. Raises DataError with `advice` if there are more than
        `limit` names."""
        import pyarrow.compute as pc

        self.values.update(pc.unique(pc.drop_null(self.names_of(batch))).to_pylist())
        if len(self.values) > limit:
            self.refuse_bad_cell(file)
            raise broken(
                file.location,
                f"the column {shortened(self.name)} has more than {limit:,} different names; "
                f"{advice}",
            )

    def vocabulary(self) -> tuple[str, ...]:
        return in_order(self.values)


def in_order(names: set[str]) -> tuple[str, ...]:
    """Sort integers by value, and all other names as strings."""
    if all(name.removeprefix("-").isdecimal() for name in names):
        return tuple(sorted(names, key=lambda name: (int(name), name)))
    return tuple(sorted(names))


def codes_of(names: Any, vocabulary: tuple[str, ...]) -> npt.NDArray[np.int64]:
    """Return the index of each name in the vocabulary, or NO_CODE for null."""
    import pyarrow as pa
    import pyarrow.compute as pc

    indices = pc.index_in(names, value_set=pa.array(vocabulary, pa.string())).fill_null(NO_CODE)
    codes: npt.NDArray[np.int64] = indices.to_numpy(zero_copy_only=False).astype(np.int64)
    return codes


def base_of(lowest: int) -> int:
    """Return the offset to subtract from integers that float64 can't represent, given the lowest
    integer."""
    return (lowest >> BASE_BITS) << BASE_BITS


def differences(values: npt.NDArray[Any], base: int) -> tuple[Numbers, int]:
    """Return (values - base as float64, number of integers that had to be rounded). values: as
    returned by `Column.numbers_of`."""
    if values.dtype == object:
        found = np.array([relative(one, base) for one in values], dtype=np.float64)
        exact = [int(one) - base for one in values if _is_whole(one)]
        return found, sum(one != float(one) for one in exact)
    values = values.astype(values.dtype.newbyteorder("="), copy=False)
    rough = values.astype(np.float64) - float(base)
    if values.dtype.kind not in "iu" or len(values) == 0:
        return rough, 0
    if max(-int(values.min()), int(values.max()), abs(base)) <= EXACT_WHOLE:
        return rough, 0
    # The difference is computed modulo 2**64, so it is exact if it fits in int64.
    modulo = values.view(np.uint64) - np.uint64(base % (1 << 64))
    whole = modulo.view(np.int64)
    fits = np.abs(rough) < 2.0**62
    found = np.where(fits, whole.astype(np.float64), rough)
    num_rounded = int(np.count_nonzero(found[fits].astype(np.int64) != whole[fits]))
    far = [value - base for value in values[~fits].tolist()]
    found[~fits] = far
    return found, num_rounded + sum(int(float(one)) != one for one in far)


def _floor(value: np.generic) -> int:
    return int(value) if value.dtype.kind in "iu" else int(np.floor(value))


def _is_whole(value: Exact) -> bool:
    return math.isfinite(value) and value == int(value)


def _values_of(batch: Any) -> tuple[npt.NDArray[Any], npt.NDArray[np.bool_]]:
    """Implement `Column.numbers_of` for an Arrow array of numbers or plain texts."""
    import pyarrow as pa
    from pyarrow import types

    is_known = batch.is_valid().to_numpy(zero_copy_only=False)
    kind = batch.type
    if types.is_string(kind):
        numbers = batch.cast(pa.float64())
        found = numbers.to_numpy(zero_copy_only=False)
        if np.any(np.abs(found) >= LARGE):
            try:
                return _values_of(batch.cast(pa.int64()))
            except pa.ArrowInvalid:  # some values are not integers, or are too large
                exact = exact_values(batch)
            if exact is not None:
                return _objects(exact), is_known
        return found, is_known
    if types.is_decimal(kind):
        return _objects([Decimal(0) if one is None else one for one in batch.to_pylist()]), is_known
    if types.is_integer(kind):
        wide = pa.uint64() if types.is_unsigned_integer(kind) else pa.int64()
        return batch.cast(wide).fill_null(0).to_numpy(zero_copy_only=False), is_known
    numbers = batch.cast(pa.float64(), safe=False)
    return numbers.to_numpy(zero_copy_only=False), is_known


def _objects(values: list[Any]) -> npt.NDArray[Any]:
    found = np.empty(len(values), dtype=object)
    found[:] = values
    return found


def _is_one_of(texts: Any, words: tuple[str, ...]) -> Any:
    import pyarrow as pa
    import pyarrow.compute as pc

    return pc.is_in(texts, value_set=pa.array(words))


def _is_text(batch: Any) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_string(batch.type))
