"""Drawn CSV files."""

from __future__ import annotations

import csv
import io
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any, Self

from dray.spec import Data
from ray_workers.datasets import open_table
from ray_workers.datasets.formats.number_texts import NumberStyle
from ray_workers.shared.node_needs import DataPolicy
from tests.generated.files import columns as drawn
from tests.generated.files import tables
from tests.generated.files.cases import Refusal, outcome, without
from tests.generated.files.columns import Cell, Column, Kind, Style
from tests.generated.files.tables import Truth, Value

NAMES = (
    *("x", "size in m", "größe", "a.b", "a", "__proto__", "日付", "NaN", "1", "x,y", 'the "x"'),
    *("🙂", "constructor", "null", "X", "x ", " x", "a/b", "a:b", "n" * 200, "%", "-", "y_"),
)
KINDS: tuple[Kind, ...] = ("number", "number", "number", "name", "date", "truth")
STYLES = (
    *(Style(),) * 4,
    *(Style(","), Style(",", "."), Style(".", ","), Style(".", "'"), Style(",", " ")),
    *(Style(units=("$", "€")), Style(units=("%", "km/h")), Style(",", ".", ("EUR",))),
)
ENCODINGS = ("utf-8",) * 4 + ("utf-16", "utf-16-le", "latin-1", "cp1252", "utf-8-sig", "utf-32")
SPOILED = "n.d."
PLAIN = Style()


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
    """(record, fields more)."""
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
    """How often the rows come, one after the other."""
    spoiled: int | None = None
    """Column of fractions that has a text in its second row."""

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
            line += 1 + written.count("\n")
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

    # What it holds.

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
        """Sentences of which one is to be had, if there are any."""
        names = [column.name for column in self.columns]
        double = [_shown(name) for name in names if names.count(name) > 1]
        if double or (self.dialect.has_trailing_delimiter and "" in names):
            return [Refusal("columns of the name", *double[:1])]
        lines = self.text()[1]
        if self.dialect.ragged:
            at, more = self.dialect.ragged
            width = len(names) + self.dialect.has_trailing_delimiter
            if at == 0:
                return [Refusal("fields, but the header names")]
            return [Refusal(f"line {lines[at]}:", f"has {width + more} fields")]
        unnamed = self.dialect.has_trailing_delimiter and self.features is None
        found = [Refusal("has no name")] * unnamed
        if any(not names[at] for at in self.chosen):
            found.append(Refusal("has no name"))
        for at in (self.target, *self.chosen):
            found += self._refusals_of(at, lines)
        truths = self.truths()
        if not truths[self.target].values:
            found.append(Refusal("has no row in which nothing is missing"))
        if self.classifies and len({*truths[self.target].values}) == 1:
            found.append(Refusal("one class only"))
        return found

    def _refusals_of(self, at: int, lines: list[int]) -> Iterator[Refusal]:
        name, values = _shown(self.columns[at].name), self.values(at)
        if self.spoiled == at:
            yield Refusal(f"line {lines[2]}:", SPOILED, name)
        if all(value is None for value in values):
            yield Refusal("has no value in any row", name)
        if None in values and self.missing_in(at) == "error":
            yield Refusal(f"line {lines[1 + values.index(None)]}:", "has no value", name)
        if self.columns[at].kind == "number" and not self.columns[at].is_categorical:
            row = tables.refused_row(values, self.kept_rows())
            if row is not None:
                yield Refusal("not always finite")
                yield Refusal(f"line {lines[1 + row]}:", "no finite number", name)

    # What dray makes of it.

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
        """How Python's reader sees another file than was drawn."""
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

    # Less of it.

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
    """What a sentence has of a name."""
    return name[:50] if name.isprintable() and not {"'", "\\"} & {*name} else ""


def draw(seed: int) -> CsvCase:
    dice = random.Random(f"csv {seed}")
    num_rows = dice.choice((2, 3, 5, 9, 16, 40))
    style = dice.choice(STYLES)
    missing = dice.choice(("error", "error", "drop", "indicator", "mean"))
    names = dice.sample(NAMES, dice.randint(2, 6))
    target = dice.randrange(len(names))
    classifies = dice.random() < 0.4
    columns = []
    for at, name in enumerate(names):
        kind = dice.choice(KINDS)
        if at == target:
            kind = dice.choice(("number", "name")) if classifies else "number"
        columns.append(_column(dice, name, kind, num_rows, style, is_target=at == target))
    case = CsvCase(tuple(columns), target, classifies, style, missing=missing)
    return _with_faults(dice, replace(case, dialect=_dialect(dice, case)))


def _column(
    dice: random.Random, name: str, kind: Kind, num_rows: int, style: Style, *, is_target: bool
) -> Column:
    match kind:
        case "number":
            cells = drawn.number_column(dice, num_rows, style)
        case "truth":
            cells = drawn.truth_column(dice, num_rows)
        case "date":
            cells = drawn.date_column(dice, num_rows)
        case _:
            cells = drawn.name_column(dice, num_rows)
    if dice.random() < 0.3:
        words = drawn.NOT_A_NAME_EITHER if kind == "name" else drawn.MISSING
        for row in range(1, num_rows):
            if dice.random() < 0.2:
                cells[row] = Cell(dice.choice(words), None)
    missing = dice.choice(("", "", "", "drop", "median", "most_frequent", "indicator", "error"))
    is_categorical = bool(name) and kind == "number" and not is_target and dice.random() < 0.15
    if is_target and missing not in ("", "drop", "error"):
        missing = "drop"
    return Column(name, kind, tuple(cells), missing, is_categorical)


def _dialect(dice: random.Random, case: CsvCase) -> Dialect:
    style = case.style
    marks = [
        mark for mark in ",;\t|:" if mark not in (style.decimal, style.thousands) or mark == ","
    ]
    found = Dialect(
        delimiter=dice.choice(marks),
        line_end=dice.choice(("\n", "\n", "\r\n", "\r")),
        quotes_all=dice.random() < 0.2,
        ends_with_line_end=dice.random() < 0.7,
    )
    text = replace(case, dialect=found).text()[0]
    fitting = [one for one in ENCODINGS if _holds(one, text)]
    encoding = dice.choice(fitting)
    can_have_bom = encoding in ("utf-8", "utf-16-le")
    blank = tuple(at for at in range(case.num_rows + 1) if dice.random() < 0.1)
    return replace(
        found,
        encoding=encoding,
        has_bom=can_have_bom and dice.random() < 0.3,
        blank_lines=blank if dice.random() < 0.3 else (),
    )


def _holds(encoding: str, text: str) -> bool:
    try:
        return text.encode(encoding).decode(encoding) == text
    except UnicodeError:
        return False


def _with_faults(dice: random.Random, case: CsvCase) -> CsvCase:
    """One case in three has something that is refused, or has many rows."""
    others = [at for at in range(len(case.columns)) if at != case.target]
    match dice.randrange(24):
        case 0:
            record, more = dice.randint(1, case.num_rows), dice.choice((1, 2, -1))
            return replace(case, dialect=replace(case.dialect, ragged=(record, more)))
        case 1:
            at, other = dice.sample(range(len(case.columns)), 2)
            columns = list(case.columns)
            columns[at] = replace(columns[at], name=columns[other].name)
            return replace(case, columns=tuple(columns))
        case 2:
            columns = list(case.columns)
            at = dice.choice(others)
            columns[at] = replace(columns[at], name="", missing="", is_categorical=False)
            return replace(case, columns=tuple(columns))
        case 3:
            return replace(case, dialect=replace(case.dialect, has_trailing_delimiter=True))
        case 4:
            dialect = replace(case.dialect, has_trailing_delimiter=True)
            return replace(case, dialect=dialect, features=tuple(others))
        case 5 | 6:
            at = dice.choice(others)
            if case.num_rows < 5:
                return case
            cells = [
                Cell(f"{n}{case.style.decimal}5", Fraction(2 * n + 1, 2))
                for n in range(case.num_rows)
            ]
            column = Column(case.columns[at].name, "number", tuple(cells), case.columns[at].missing)
            changed = (*case.columns[:at], column, *case.columns[at + 1 :])
            return replace(case, columns=changed, spoiled=at)
        case 7:
            return replace(case, features=tuple(dice.sample(others, dice.randint(1, len(others)))))
        case 8:
            return replace(case, times=dice.choice((60, 1000 if case.num_rows < 10 else 2)))
    return case
