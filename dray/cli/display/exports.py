"""Tables of jobs as CSV."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from dray.cli.display.output import write_csv_row
from dray.csv_rows import heads

if TYPE_CHECKING:
    from dray.views import Job


def column_names(columns: str) -> list[str]:
    """Split a list of columns at the commas that are not in quotes."""
    pieces = re.findall(r"""(?:"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*'|[^,"'])+""", columns)
    return list(dict.fromkeys(piece.strip() for piece in pieces))


def write_csv(jobs: Iterator[Job], columns: str) -> None:
    """Write a line for each job. A list or an object is written as JSON."""
    names: list[str] | None = None
    for job in jobs:
        if names is None:
            names = list(job.values)
            write_csv_row(heads(names))
        write_csv_row((job.id, *(job.values[name] for name in names), job.values_as_of))
    if names is None:
        write_csv_row(heads(column_names(columns)))
