"""Tables of jobs as CSV and as Parquet files."""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from dray import frames
from dray.cli.display.output import warn, write_csv_row

if TYPE_CHECKING:
    from dray.views import Job


_INT64 = 2**63
"""Integers from here on don't fit into a column of integers."""


def column_names(columns: str) -> list[str]:
    """Split a list of columns at the commas that are not in quotes."""
    pieces = re.findall(r"""(?:"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*'|[^,"'])+""", columns)
    return list(dict.fromkeys(piece.strip() for piece in pieces))


def _column_of_ids(names: Collection[str]) -> str:
    """Return the name of the column of job ids: `job`, or a longer one if a chosen column, such as
    a parameter, has this name."""
    name = "job"
    while name in names:
        name += "_id"
    return name


def write_csv(jobs: Iterator[Job], columns: str) -> None:
    """Write a line for each job. A list or an object is written as JSON."""
    names: list[str] | None = None
    for job in jobs:
        if names is None:
            names = list(job.values)
            write_csv_row((_column_of_ids(names), *names))
        write_csv_row((job.id, *(_plain(job.values[name]) for name in names)))
    if names is None:
        names = column_names(columns)
        write_csv_row((_column_of_ids(names), *names))


def write_parquet(jobs: Sequence[Job], path: Path) -> None:
    """Write a file with a row for each job. A column that has strings and other values, or
    integers of more than 64 bits, is written as strings."""
    try:
        pyarrow = importlib.import_module("pyarrow")
        parquet = importlib.import_module("pyarrow.parquet")
    except ModuleNotFoundError:
        message = "writing Parquet requires pyarrow: pip install pyarrow, or use --csv"
        raise typer.BadParameter(message, param_hint="--parquet") from None
    chosen = {name: _of_one_type(values) for name, values in frames.of_values(jobs).items()}
    columns = {_column_of_ids(chosen): [job.id for job in jobs], **chosen}
    try:
        parquet.write_table(pyarrow.table(columns), path)
    except OSError as error:
        raise typer.BadParameter(f"can't write {path}: {error}", param_hint="--parquet") from None
    warn(f"wrote {len(jobs)} jobs to {path}")


def _of_one_type(values: Sequence[Any]) -> list[Any]:
    kinds = {type(value) for value in values if value is not None}
    if any(isinstance(value, int) and not -_INT64 <= value < _INT64 for value in values):
        kinds.add(str)
    if kinds == {int, float}:
        return [None if value is None else float(value) for value in values]
    if len(kinds) <= 1 and not kinds & {list, dict}:
        return list(values)
    return [None if value is None else _as_text(value) for value in values]


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _plain(value: Any) -> Any:
    """Return a value for a cell of CSV. Booleans are written as in JSON."""
    return _as_text(value) if isinstance(value, bool | list | dict) else value
