"""A CSV file and its contents, as `csv_drawing` generates it."""

from __future__ import annotations

import csv
import io
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from dray.spec import Data
from ray_workers.datasets import open_table
from ray_workers.datasets.formats.number_texts import NumberStyle
from ray_workers.shared.node_needs import DataPolicy
from tests.generated.files import columns as drawn
from tests.generated.files import tables
from tests.generated.files.cases import Refusal, outcome, without
from tests.generated.files.columns import Cell, Column, Style
from tests.generated.files.tables import Truth, Value

SPOILED = "n.d."
PLAIN = Style()
LINE_END = re.compile(r"\r\n|\r|\n")


@dataclass(frozen=True)
class Dialect:
    delimiter: str = ","
    line_end: str = "\n"
    quotes_all: bool = False
    has_bom: bool = False
    encoding: str = "utf-8"
    ends_with_line_end: bool = True
    blank_lines: tuple[int, ...] = ()
    """An empty line before each of these records; the header is 0."""
    ragged: tuple[int, int] | None = None
    """(record, number of additional fields)."""
    has_trailing_delimiter: bool = False


@dataclass(frozen=True)
class CsvCase:
    columns: tuple[Column, ...]
    target: int
    classifies: bool
    style: Style = PLAIN
    dialect: Dialect = Dialect()
    features: tuple[int, ...] | None = None
    missing: str = "error"
    times: int = 1
    """How many times the rows are repeated."""
    spoiled: int | None = None
    """Name of a column of fractions that has text in its second row."""

    # The file.

    @property
    def num_rows(self) -> int:
        return len(self.columns[0].cells)

    def records(self) -> list[list[str]]:
        texts = [[cell.text for cell in self.cells(column)] for column in self.columns]
        rows = [[*row] for row in zip(*texts, strict=True)]
        found = [[column.name for column in self.columns], *rows * self.times]
        if self.dialect.has_trailing_delimiter:
            found = [[*row, ""] for row in found]
        if self.dialect.ragged:
            at, more = self.dialect.ragged
            found[at] = found[at] + ["9"] * more if more > 0 else found[at][:more]
        return found

    def cells(self, column: Column) -> tuple[Cell, ...]:
        if self.spoiled is None or column is not self.columns[self.spoiled]:
            return column.cells
        return (column.cells[0], Cell(SPOILED, SPOILED), *column.cells[2:])

    def text(self) -> tuple[str, list[int]]:
        """(the text, the line on which each record begins)."""
        parts, lines, line = [], [], 1
        for at, record in enumerate(self.records()):
            if at in self.dialect.blank_lines:
                parts.append(self.dialect.line_end)
                line += 1
            lines.append(line)
            written = self.dialect.delimiter.join(map(self._quoted, record))
            parts.append(written + self.dialect.line_end)
            line += 1 + len(LINE_END.findall(written))
        text = "".join(parts)
        return text if self.dialect.ends_with_line_end else text[
            : -len(self.dialect.line_end)
        ], lines

    def _quoted(self, text: str) -> str:
        special = {self.dialect.delimiter, '"', "\n", "\r"}
        if self.dialect.quotes_all or special & {*text}:
            return '"' + text.replace('"', '""') + '"'
        return text

    def content(self) -> bytes:
        text = self.text()[0]
        mark = "\ufeff" if self.dialect.has_bom else ""
        return (mark + text).encode(self.dialect.encoding)

    # The contents.

    @property
    def chosen(self) -> list[int]:
        if self.features is not None:
            return [*self.features]
        return [at for at in range(len(self.columns)) if at != self.target]

    def missing_in(self, at: int) -> str:
        found = self.columns[at].missing
        found = self.missing if found == "" else found
        return found if at != self.target or found == "drop" else "error"

    def values(self, at: int) -> list[Value]:
        column = self.columns[at]
        if column.kind != "name" and not column.is_categorical:
            values: list[Value] = [cell.value for cell in column.cells]
        else:
            values = [self._name(cell.text, at) for cell in column.cells]
        return values * self.times

    def _name(self, text: str, at: int) -> str | None:
        plain = text.strip().lower()
        counts = at != self.target and self.missing_in(at) != "error"
        words = {"", *(map(str.lower, drawn.MISSING) if counts else ())}
        return None if plain in words else text

    def truths(self) -> dict[int, Truth]:
        every = {at: self.values(at) for at in (self.target, *self.chosen)}
        kept = self.kept_rows()
        return {
            at: Truth(
                "name" if self.columns[at].is_categorical else self.columns[at].kind,
                tuple(values[row] for row in kept),
            )
            for at, values in every.items()
        }

    def kept_rows(self) -> list[int]:
        dropping = [at for at in (self.target, *self.chosen) if self.missing_in(at) == "drop"]
        every = [self.values(at) for at in dropping]
        return [
            row
            for row in range(self.num_rows * self.times)
            if not any(values[row] is None for values in every)
        ]

    def refusals(self) -> list[Refusal]:
        """Return the possible refusals, if the file must be refused."""
        names = [column.name for column in self.columns]
        double = [_shown(name) for name in names if names.count(name) > 1]
        if double or (self.dialect.has_trailing_delimiter and "" in names):
            return [Refusal("columns with the name", *double[:1])]
        lines = self.text()[1]
        if self.dialect.ragged:
            at, more = self.dialect.ragged
            width = len(names) + self.dialect.has_trailing_delimiter
            if at == 0:
                return [Refusal("fields, but the header has")]
            return [Refusal(f"line {lines[at]}:", f"has {width + more} fields")]
        unnamed = self.dialect.has_trailing_delimiter and self.features is None
        found = [Refusal("has no name")] * unnamed
        if any(not names[at] for at in self.chosen):
            found.append(Refusal("has no name"))
        for at in (self.target, *self.chosen):
            found += self._refusals_of(at, lines)
        truths = self.truths()
        if not truths[self.target].values:
            found.append(Refusal("has missing values in every row"))
        if self.classifies and len({*truths[self.target].values}) == 1:
            found.append(Refusal("only one class"))
        return found

    def _refusals_of(self, at: int, lines: list[int]) -> Iterator[Refusal]:
        name, values = _shown(self.columns[at].name), self.values(at)
        if self.spoiled == at:
            yield Refusal(f"line {lines[2]}:", SPOILED, name)
        if all(value is None for value in values):
            yield Refusal("has no values", name)
        if None in values and self.missing_in(at) == "error":
            yield Refusal(f"line {lines[1 + values.index(None)]}:", "has no value", name)
        if self.columns[at].kind == "number" and not self.columns[at].is_categorical:
            is_class = self.classifies and at == self.target
            largest = sys.float_info.max if is_class else tables.LARGEST
            row = tables.refused_row(values, self.kept_rows(), largest)
            if row is not None:
                yield Refusal("values that are not finite")
                yield Refusal(f"line {lines[1 + row]}:", "not a finite 32-bit number", name)

    # What dray reads.

    def options(self) -> dict[str, Any]:
        dialect, style = self.dialect, self.style
        named = {c.name: c.missing for c in self.columns if c.missing}
        used = {self.columns[at].name for at in (self.target, *self.chosen)}
        return {
            "target": self.columns[self.target].name,
            "features": [self.columns[at].name for at in self.features] if self.features else None,
            "categorical": [
                self.columns[at].name for at in self.chosen if self.columns[at].is_categorical
            ],
            "delimiter": dialect.delimiter,
            "encoding": dialect.encoding,
            "decimal": style.decimal,
            "numbers": {"thousands": style.thousands, "units": list(style.units)},
            "missing": self.missing,
            "missing_columns": {name: how for name, how in named.items() if name in used},
        }

    def fault(self, folder: Path, policy: DataPolicy) -> str | None:
        path = folder / "table.csv"
        path.write_bytes(self.content())
        data = Data(source=path.as_uri(), **self.options())
        table, fault = outcome(
            lambda: open_table(data, policy, classifies=self.classifies), self.refusals()
        )
        if table is None:
            return fault
        truths = self.truths()
        target = (self.columns[self.target].name, truths[self.target])
        features = {self.columns[at].name: truths[at] for at in self.chosen}
        return (
            self._others_differ()
            or tables.difference(table, features, target)
            or self._prediction_differs(table, data)
        )

    def _others_differ(self) -> str | None:
        """Return how Python's reader sees a file that differs from the generated one."""
        text = self.content().decode(self.dialect.encoding).removeprefix("\ufeff")
        read = [
            row
            for row in csv.reader(io.StringIO(text, newline=""), delimiter=self.dialect.delimiter)
            if row
        ]
        return None if read == self.records() else f"the file is {read}"

    def _prediction_differs(self, table: Any, data: Data) -> str | None:
        names, records = [column.name for column in self.columns], self.records()[1:]
        kept = [row for row in self.kept_rows() if row < self.num_rows]
        rows = [dict(zip(names, records[row], strict=False)) for row in kept]
        some = replace_rows(table, len(rows))
        return tables.prediction_differs(some, rows, style=NumberStyle.of(data))

    # Reductions.

    def smaller(self) -> Iterator[Self]:
        plain = Dialect(delimiter=self.dialect.delimiter)
        for less in (
            replace(self, times=1),
            replace(self, dialect=plain),
            replace(self, dialect=replace(self.dialect, blank_lines=(), has_bom=False)),
            replace(self, missing="error"),
        ):
            if less != self:
                yield less
        for at in range(self.num_rows if self.num_rows > 2 and not self.dialect.ragged else 0):
            columns = [replace(c, cells=without(c.cells, at)) for c in self.columns]
            yield replace(self, columns=tuple(columns))
        for at in range(len(self.columns)):
            if (
                at != self.target
                and self.features is None
                and self.spoiled is None
                and len(self.columns) > 2
            ):
                yield replace(
                    self, columns=without(self.columns, at), target=self.target - (at < self.target)
                )


def replace_rows(table: Any, count: int) -> Any:
    return replace(table, numeric=table.numeric[:count], categories=table.categories[:count])


def _shown(name: str) -> str:
    """Return the part of a name that a sentence shows."""
    return name[:50] if name.isprintable() and not {"'", "\\"} & {*name} else ""
