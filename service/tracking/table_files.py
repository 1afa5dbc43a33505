"""Files with a row for each job of a list: CSV, and Parquet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO, Protocol

from dray import views
from dray.csv_rows import as_text, csv_row, heads
from service.domain.tracking.columns import Fact, Field, ParameterField, TableColumn
from service.domain.tracking.search_tree import DocumentField, JobColumn, MetricField

ROWS_OF_GROUP = 10_000
_INT64 = 2**63
"""This integer and larger ones don't fit into a column of integers."""
_TIMES = ("created_at", "started_at", "finished_at")
_WHOLE = ("priority", "world_size", "attempt")


class TableWriter(Protocol):
    """Writes a file. The jobs are added page by page."""

    def add(self, items: Sequence[views.Job]) -> int:
        """Add rows. Returns the number of bytes that the rows take until the file is written."""
        ...

    def finish(self) -> None:
        """Write the rest of the file."""
        ...


class CsvWriter:
    """Writes CSV (RFC 4180). Lists and objects are written as JSON."""

    def __init__(self, columns: Sequence[TableColumn], file: BinaryIO) -> None:
        self._names = [column.text for column in columns]
        self._file = file
        self._write(heads(self._names))

    def add(self, items: Sequence[views.Job]) -> int:
        return sum(
            self._write((one.id, *(one.values[name] for name in self._names), one.values_as_of))
            for one in items
        )

    def _write(self, cells: Sequence[object]) -> int:
        return self._file.write(f"{csv_row(cells)}\r\n".encode("utf-8", "replace"))

    def finish(self) -> None:
        pass


class ParquetWriter:
    """Writes Parquet. Fields of documents and parameters have the type of their values. If these
    have different types, or integers of more than 64 bits, the column contains strings.

    The type of a column is known only after the last job, so the columns are collected in
    memory, as arrays with a type for each page.
    """

    def __init__(self, columns: Sequence[TableColumn], file: BinaryIO) -> None:
        self._file = file
        self._columns = {column.text: _type(column.field) for column in columns}
        self._ids: list[Any] = []
        self._times: list[Any] = []
        self._chunks: dict[str, list[_Chunk]] = {name: [] for name in self._columns}

    def add(self, items: Sequence[views.Job]) -> int:
        self._ids.append(_array([one.id for one in items], _type(JobColumn("id"))))
        times = [one.values_as_of for one in items]
        self._times.append(_array(times, _type(JobColumn("created_at"))))
        for name, kind in self._columns.items():
            self._chunks[name].append(_chunk([one.values[name] for one in items], kind))
        added = [self._ids[-1], self._times[-1]]
        added += [chunks[-1].array for chunks in self._chunks.values()]
        return sum(array.nbytes for array in added)

    def finish(self) -> None:
        import pyarrow as pa
        from pyarrow import parquet

        columns = [pa.chunked_array(self._ids, _type(JobColumn("id")))]
        for name, kind in self._columns.items():
            chunks = self._chunks.pop(name)
            common = kind or _common_type(chunks)
            columns.append(
                pa.chunked_array([_converted(one.array, common) for one in chunks], common)
            )
        columns.append(pa.chunked_array(self._times, _type(JobColumn("created_at"))))
        table = pa.table(columns, names=heads(list(self._columns)))
        parquet.write_table(table, self._file, row_group_size=ROWS_OF_GROUP)


def _type(field: Field) -> Any:
    """Return the type of a column; None if it depends on the values."""
    import pyarrow as pa

    match field:
        case DocumentField() | ParameterField():
            return None
        case MetricField() | Fact("duration" | "cost" | "progress" | "goodput"):
            return pa.float64()
        case JobColumn(name) | Fact(name) if name in _TIMES:
            return pa.timestamp("us", tz="UTC")
        case JobColumn(name) | Fact(name) if name in _WHOLE:
            return pa.int64()
        case _:
            return pa.string()


@dataclass(frozen=True)
class _Chunk:
    """The values of a column in one page."""

    kind: Any
    """The type that can hold all of these values."""
    array: Any
    """The values with this type. If some numbers are integers and others are not, JSON, so that
    integers can still be written as such if the column contains strings."""


def _chunk(values: list[Any], kind: Any) -> _Chunk:
    import pyarrow as pa

    if kind is not None:
        return _Chunk(kind, _array(values, kind))
    kind = _type_of(values)
    is_mixed = kind == pa.float64() and any(isinstance(value, int) for value in values)
    return _Chunk(kind, _array(values, pa.string() if is_mixed else kind))


def _array(values: list[Any], kind: Any) -> Any:
    import pyarrow as pa

    if kind == pa.string():
        values = [None if value is None else as_text(value) for value in values]
    elif kind == pa.float64():
        values = [None if value is None else float(value) for value in values]
    return pa.array(values, kind)


def _type_of(values: Sequence[Any]) -> Any:
    """Return the type that can hold all of these values of documents."""
    import pyarrow as pa

    kinds = {type(value) for value in values if value is not None}
    if not kinds:
        return pa.null()
    if kinds == {bool}:
        return pa.bool_()
    if not kinds <= {int, float} or any(_is_large(value) for value in values):
        return pa.string()
    return pa.float64() if float in kinds else pa.int64()


def _is_large(value: object) -> bool:
    return isinstance(value, int) and not -_INT64 <= value < _INT64


def _common_type(chunks: Sequence[_Chunk]) -> Any:
    """Return the type to which all of these values can be converted."""
    import pyarrow as pa

    kinds = {chunk.kind for chunk in chunks} - {pa.null()}
    if len(kinds) == 1:
        return kinds.pop()
    return pa.float64() if kinds == {pa.int64(), pa.float64()} else pa.string()


def _converted(array: Any, kind: Any) -> Any:
    import pyarrow as pa

    if array.type == kind:
        return array
    return _array(array.to_pylist(), kind) if kind == pa.string() else array.cast(kind, safe=False)
