"""CSV and Parquet files as batches of columns, which can be read repeatedly from the start."""

from __future__ import annotations

import contextlib
import csv
import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from ray_workers.datasets.core.errors import broken, reading, shortened
from ray_workers.datasets.formats.dates import is_date_type
from ray_workers.datasets.formats.number_texts import MAX_WHOLE_DIGITS
from ray_workers.datasets.formats.utf8 import first_bad_byte, likely_encoding
from ray_workers.training.core.errors import DataError

BLOCK_BYTES = 1 << 20
"""Block size for parsing CSV files, and therefore the maximum length of a row. Arrow reads a few
dozen blocks ahead."""
DELIMITERS = (",", ";", "\t", "|")
"""Common delimiters, which are suggested if a header contains many of them."""
BUFFER_BYTES = 1 << 20
"""Bytes of a Parquet column that are read at a time."""
BATCH_ROWS = 16_384
RECORDS = 256
"""Number of rows of a Parquet file that are converted to Python objects at a time."""
NO_ROW = "has column names but no rows"
_END = "\0end\0"
"""Text that is appended after the last line. If a quotation mark is unclosed, this text becomes
part of a value."""


class TableFile(Protocol):
    location: str
    names: tuple[str, ...]

    def refuse(self, names: Sequence[str], *, dates: bool = True) -> None:
        """Raise DataError if a column can't be used, or has dates although `dates` is false."""

    def batches(self, names: Sequence[str]) -> Iterator[list[Any]]:
        """Yield batches of rows, each as a list of Arrow arrays, one per column. Raises
        DataError."""

    def where(self, row: int) -> str:
        """Return the location of a row (counted from 0), as a text editor would show it."""

    @property
    def hint(self) -> str:
        """Advice on options, if the columns were probably meant to be read differently."""


class CsvFile:
    """A UTF-8 CSV file according to RFC 4180, with a header line. Every column is read as text."""

    def __init__(self, path: Path, location: str, delimiter: str = ",") -> None:
        self._path = path
        self.location = location
        self._delimiter = delimiter
        self.names = self._header()
        self._refuse_open_quote()
        _refuse_double_names(self.names, location, self.hint)

    def refuse(self, names: Sequence[str], *, dates: bool = True) -> None:
        if "" in names:
            at = self.names.index("") + 1
            raise broken(
                self.location,
                f"column {at} has no name: add a name to the header, or list only named columns "
                "in data.features",
            )

    def batches(self, names: Sequence[str]) -> Iterator[list[Any]]:
        import pyarrow as pa
        from pyarrow import csv as arrow_csv

        try:
            reader = arrow_csv.open_csv(
                str(self._path),
                read_options=arrow_csv.ReadOptions(use_threads=False, block_size=BLOCK_BYTES),
                parse_options=arrow_csv.ParseOptions(
                    delimiter=self._delimiter, newlines_in_values=True
                ),
                convert_options=arrow_csv.ConvertOptions(
                    column_types=dict.fromkeys(self.names, pa.string()),
                    include_columns=list(dict.fromkeys(names)),
                    strings_can_be_null=False,
                ),
            )
            for batch in reader:
                yield [batch.column(name) for name in names]
        except pa.ArrowInvalid as error:
            raise self._explained(error) from None

    def records(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield each row as (location, {column: text}). Raises DataError."""
        try:
            for line, fields in itertools.islice(self._records(), 1, None):
                if len(fields) != len(self.names):
                    raise self._explained(ValueError(f"line {line} has {len(fields)} fields"))
                yield f"{self.location}, line {line:,}", dict(zip(self.names, fields, strict=True))
        except (UnicodeDecodeError, csv.Error) as error:
            raise self._explained(error) from None

    def where(self, row: int) -> str:
        # Ignore errors, since columns that were not requested might contain unreadable values.
        with contextlib.suppress(UnicodeDecodeError, csv.Error):
            for number, (line, _) in enumerate(self._records()):
                if number == row + 1:  # record 0 is the header
                    return f"{self.location}, line {line}"
        return f"{self.location}, row {row + 1}"

    @property
    def hint(self) -> str:
        header = self._delimiter.join(self.names)
        if "\0" in header:
            return "; if it has another encoding, set data.encoding, for example to utf-16-le"
        if header.startswith(("{", "[")):
            return "; if it is JSON, save the table as CSV or Parquet instead"
        if header.startswith("#"):
            return "; if this is a comment, remove the lines above the header"
        counts = {mark: header.count(mark) for mark in DELIMITERS if mark != self._delimiter}
        likely = max(counts, key=lambda mark: counts[mark])
        if counts[likely] < len(self.names):
            return ""
        mark = "tab" if likely == "\t" else f'"{likely}"'
        return f"; with data.delimiter: {mark}, the header would have {counts[likely] + 1} columns"

    def _header(self) -> tuple[str, ...]:
        try:
            first = next(self._records(), None)
        except (UnicodeDecodeError, csv.Error) as error:
            raise self._explained(error) from None
        if first is None:
            raise broken(self.location, "is empty: it has no header")
        return tuple(first[1])

    def _refuse_open_quote(self) -> None:
        """Raise DataError if the file ends within a quoted value, because Arrow would read all
        following lines as one value."""
        with open(self._path, "rb") as file:
            num_quotes = sum(piece.count(b'"') for piece in iter(lambda: file.read(1 << 20), b""))
        if num_quotes % 2 == 0:
            return
        try:
            for line, fields in self._records(more=(_END,)):
                if fields[-1].endswith(_END) and fields != [_END]:
                    fault = "has a quotation mark that is never closed"
                    raise broken(f"{self.location}, line {line}", fault)
        except csv.Error:
            raise self._row_too_long() from None
        except UnicodeDecodeError as error:
            raise self._explained(error) from None

    def _records(self, more: Iterable[str] = ()) -> Iterator[tuple[int, list[str]]]:
        """Yield a tuple (number of its first line, fields) for the header and for each row. more:
        lines to read after the end of the file."""
        csv.field_size_limit(BLOCK_BYTES)
        with open(self._path, encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(itertools.chain(file, more), delimiter=self._delimiter)
            begins = 1
            for fields in reader:
                if fields:
                    yield begins, fields
                begins = reader.line_num + 1

    def _explained(self, error: Exception) -> DataError:
        """Return the error that made Arrow fail. To find the error, the file is read again with a
        slower method."""
        at = first_bad_byte(self._path)
        if at is not None:
            return broken(
                self.location,
                f"is not UTF-8: the byte at offset {at:,} is invalid; set data.encoding to the "
                f"file's encoding, such as {likely_encoding(self._path)}",
            )
        try:
            for line, fields in self._records():
                if len(fields) != len(self.names):
                    return broken(
                        f"{self.location}, line {line}",
                        f"has {len(fields)} fields, but the header has {len(self.names)}",
                    )
        except csv.Error:
            return self._row_too_long()
        if "straddling" in str(error):
            return self._row_too_long()
        if next(itertools.islice(self._records(), 1, None), None) is None:
            return broken(self.location, NO_ROW)
        fault = f"is not a readable CSV file: {shortened(error, 200)}"
        return broken(self.location, fault)

    def _row_too_long(self) -> DataError:
        fault = (
            f"has a row of more than {BLOCK_BYTES:,} bytes; check for an unclosed quotation mark"
        )
        return broken(self.location, fault)


class ParquetFile:
    """A Parquet file. Columns are read with their types."""

    hint = ""

    def __init__(self, path: Path, location: str) -> None:
        from pyarrow import parquet

        self.location = location
        with reading(location, "is not a Parquet file, or is incomplete"):
            # By default, pyarrow would read columns one row group at a time, and a file may consist
            # of a single row group.
            self._file = parquet.ParquetFile(path, buffer_size=BUFFER_BYTES, pre_buffer=False)
            self._schema = self._file.schema_arrow
            self.names = tuple(self._schema.names)
        _refuse_double_names(self.names, location)

    def refuse(self, names: Sequence[str], *, dates: bool = True) -> None:
        import pyarrow as pa

        for name in names:
            kind = self._schema.field(name).type
            if pa.types.is_null(kind):
                fault = "has no values; leave it out of data.features"
                raise broken(self.location, f"the column {shortened(name)} {fault}")
            if _is_text(kind) or _is_number(kind) or (dates and is_date_type(kind)):
                continue
            readable = "numbers, text and dates can be read"
            if is_date_type(kind):
                readable = "numbers and text can be targets or categories"
            raise broken(
                self.location,
                f"the column {shortened(name)} has the type {kind}, but only {readable}; leave "
                "it out of data.features, or convert it",
            )

    def batches(self, names: Sequence[str]) -> Iterator[list[Any]]:
        columns = list(dict.fromkeys(names))
        with reading(self.location, "can't be read completely"):
            for batch in self._file.iter_batches(BATCH_ROWS, columns=columns, use_threads=False):
                yield [_plain(batch.column(name)) for name in names]

    def records(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield each row as (location, {column: value}). Columns and fields of structs without a
        value are left out, because a file has the same fields in all rows. Raises DataError."""
        rows = itertools.count()
        with reading(self.location, "can't be read completely"):
            for batch in self._file.iter_batches(RECORDS, use_threads=False):
                for record in batch.to_pylist():
                    yield self.where(next(rows)), _without_nulls(record)

    def where(self, row: int) -> str:
        return f"{self.location}, row {row + 1}"


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(one) for key, one in value.items() if one is not None}
    return [_without_nulls(one) for one in value] if isinstance(value, list) else value


def _plain(column: Any) -> Any:
    """Convert text to strings without dictionaries, and decimals to float64 if float64 has enough
    digits."""
    import pyarrow as pa

    if _is_text(column.type):
        return column.cast(pa.string())
    if pa.types.is_decimal(column.type) and column.type.precision <= MAX_WHOLE_DIGITS:
        return column.cast(pa.string()).cast(
            pa.float64()
        )  # with a direct cast, the last bit can differ
    return column


def _is_text(kind: Any) -> bool:
    import pyarrow as pa

    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def _is_number(kind: Any) -> bool:
    from pyarrow import types

    return bool(
        types.is_integer(kind)
        or types.is_floating(kind)
        or types.is_boolean(kind)
        or types.is_decimal(kind)
    )


def _refuse_double_names(names: Sequence[str], location: str, hint: str = "") -> None:
    for name, count in Counter(names).items():
        if count > 1:
            raise broken(location, f"has {count} columns with the name {shortened(name)}{hint}")
