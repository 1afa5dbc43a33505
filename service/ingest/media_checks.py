"""Checks the media that a job's ranks report, because ranks run user code."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final, assert_never

from pydantic import TypeAdapter

from dray import views
from dray.media import formats
from dray.media.kinds import (
    FILE_KINDS,
    MAX_BINS,
    MAX_CELL_CHARS,
    MAX_CLASSES,
    MAX_COLUMNS,
    MAX_CURVE_POINTS,
    MAX_EXACT_INT,
    MAX_NAME_CHARS,
    MAX_ROWS,
    MAX_TEXT_CHARS,
    MAX_VALUE_BYTES,
    MediaKind,
)
from ray_workers.shared.frame_fields import clean

_VALUES: Final[TypeAdapter[views.MediaValue]] = TypeAdapter(views.MediaValue)


@dataclass(frozen=True)
class CheckedMedia:
    """A value that can be stored."""

    value: dict[str, Any]
    """A `views.MediaValue` as JSON data."""
    num_bytes: int
    """Size of the value as JSON, without its file."""
    file: views.MediaFile | None


def checked(kind: MediaKind, given: Mapping[str, Any], content: bytes | None) -> CheckedMedia:
    """Return a value that can be stored. Raises ValueError if the value or the file is malformed,
    or is beyond its limits."""
    file: views.MediaFile | None = None
    if kind in FILE_KINDS:
        if content is None:
            raise ValueError(f"the {kind} has no file")
        given, file = _of_file(kind, content)
    elif content is not None:
        raise ValueError(f"a {kind} has no file")
    value = _VALUES.validate_python({**_cleaned(given), "kind": kind.value})
    _check(value)
    body = value.model_dump(mode="json")
    num_bytes = len(json.dumps(body))
    # Only the spelling of numbers can differ from what the rank measured.
    if num_bytes > 2 * MAX_VALUE_BYTES:
        raise ValueError(f"the {kind} has {num_bytes:,} bytes")
    return CheckedMedia(body, num_bytes, file)


def _of_file(kind: MediaKind, content: bytes) -> tuple[Mapping[str, Any], views.MediaFile]:
    found = formats.picture(content) if kind is MediaKind.IMAGE else formats.sound(content)
    digest = hashlib.sha256(content).hexdigest()
    file = views.MediaFile(sha256=digest, size_bytes=len(content), media_type=found.media_type)
    return {**vars(found), "file": file.model_dump()}, file


def _cleaned(value: Any) -> Any:
    """Replace characters in strings that a database can't store."""
    if isinstance(value, str):
        return clean(value)
    if isinstance(value, list):
        return [_cleaned(each) for each in value]
    if isinstance(value, Mapping):
        return {key: _cleaned(each) for key, each in value.items()}
    return value


def _check(value: views.MediaValue) -> None:
    match value:
        case views.Histogram():
            _check_counts([value.counts, [value.not_finite]])
            is_long = not 0 < len(value.counts) <= MAX_BINS
            if is_long or len(value.edges) != len(value.counts) + 1 or not _rises(value.edges):
                raise ValueError(f"a histogram must have at most {MAX_BINS} bins, in order")
        case views.ReportedText():
            if len(value.text) > MAX_TEXT_CHARS or value.num_chars < len(value.text):
                raise ValueError(f"a text must have at most {MAX_TEXT_CHARS} characters")
            _check_counts([[value.num_chars]])
        case views.ReportedTable():
            _check_table(value)
        case views.ConfusionMatrix():
            size = len(value.classes)
            _check_names(value.classes, MAX_CLASSES)
            if [len(row) for row in value.counts] != [size] * size:
                raise ValueError("a confusion matrix must have one row and column for each class")
            _check_counts(value.counts)
        case views.RateCurve():
            _check_counts([[value.positives, value.negatives]])
            if not 0 < len(value.x) == len(value.y) == len(value.thresholds) <= MAX_CURVE_POINTS:
                raise ValueError(f"a curve must have at most {MAX_CURVE_POINTS} points")
            if not all(0 <= each <= 1 for each in (*value.x, *value.y, value.area)):
                raise ValueError("the rates of a curve must be from 0 to 1")
        case views.Image() | views.Audio():
            pass  # read from the file
        case _:
            assert_never(value)


def _check_table(table: views.ReportedTable) -> None:
    _check_names(table.columns, MAX_COLUMNS)
    _check_counts([[table.num_rows]])
    if len(table.rows) > MAX_ROWS or table.num_rows < len(table.rows):
        raise ValueError(f"a table must have at most {MAX_ROWS} rows")
    if any(len(row) != len(table.columns) for row in table.rows):
        raise ValueError("each row of a table must have a cell for each column")
    for cell in (cell for row in table.rows for cell in row):
        if isinstance(cell, str) and len(cell) > MAX_CELL_CHARS:
            raise ValueError(f"a cell must have at most {MAX_CELL_CHARS} characters")
        if isinstance(cell, int) and abs(cell) > MAX_EXACT_INT:
            raise ValueError("an integer in a table must be from -2**53 to 2**53")


def _check_names(names: Sequence[str], limit: int) -> None:
    if not 0 < len(names) <= limit or any(len(name) > MAX_NAME_CHARS for name in names):
        raise ValueError(f"there must be 1 to {limit} names of at most {MAX_NAME_CHARS} characters")


def _check_counts(rows: Sequence[Sequence[int]]) -> None:
    if not all(0 <= count <= MAX_EXACT_INT for row in rows for count in row):
        raise ValueError("counts must be from 0 to 2**53")


def _rises(edges: Sequence[float]) -> bool:
    return all(low < high for low, high in pairwise(edges))
