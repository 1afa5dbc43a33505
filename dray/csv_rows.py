"""Lines of CSV that are safe to open in a spreadsheet."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from datetime import UTC, datetime

JOB, AS_OF = "job", "values_as_of"
"""The first and the last column of a table of jobs."""


def csv_row(cells: Sequence[object]) -> str:
    """Return one line of CSV, without its end. Text that a spreadsheet would read as a formula gets
    a leading `'`. Booleans, lists and objects are written as JSON."""
    import csv
    import io

    row = io.StringIO()
    csv.writer(row, lineterminator="").writerow([_inert(_plain(cell)) for cell in cells])
    return row.getvalue()


def as_text(value: object) -> str:
    """Return a string unchanged, and any other value as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _plain(cell: object) -> object:
    return as_text(cell) if isinstance(cell, bool | list | dict) else cell


def _inert(cell: object) -> object:
    if isinstance(cell, datetime):
        return cell.astimezone(UTC).isoformat().replace("+00:00", "Z")
    if not isinstance(cell, str) or not re.match(r"\s*[=+@-]|[\t\r]", cell):
        return cell
    return cell if re.fullmatch(r"[+-](Infinity|\d+)", cell) else f"'{cell}"


def heads(columns: Sequence[str]) -> list[str]:
    """Return the head of a table of jobs: the column of their ids, `columns`, and the time up to
    which the metrics of a job cover its points. The first and the last column have longer names if
    a chosen column, such as a parameter, has their name."""
    first, last = JOB, AS_OF
    while first in columns:
        first += "_id"
    while last in columns:
        last += "_time"
    return [first, *columns, last]
