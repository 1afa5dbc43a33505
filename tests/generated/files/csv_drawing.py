"""Generates CSV files."""

from __future__ import annotations

import random
from dataclasses import replace
from fractions import Fraction

from tests.generated.files import columns as drawn
from tests.generated.files.columns import Cell, Column, Kind, Style
from tests.generated.files.csv_files import CsvCase, Dialect

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
    blank = tuple(at for at in range(case.num_rows + 1) if dice.random() < 0.2)
    return replace(
        found,
        encoding=encoding,
        has_bom=can_have_bom and dice.random() < 0.3,
        blank_lines=blank if dice.random() < 0.5 else (),
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
