"""Lines of CSV that are safe to open in a spreadsheet."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from datetime import UTC, datetime


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
