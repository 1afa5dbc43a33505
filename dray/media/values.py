"""Converts what a script reports to JSON data and files. ValueError is raised for a value that
can't be stored, and TypeError for an object of the wrong type."""

from __future__ import annotations

import io
import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from dray.media import formats
from dray.media.kinds import (
    MAX_CELL_CHARS,
    MAX_COLUMNS,
    MAX_EXACT_INT,
    MAX_FILE_BYTES,
    MAX_NAME_CHARS,
    MAX_ROWS,
    MAX_TEXT_CHARS,
    MAX_VALUE_BYTES,
    MediaKind,
)


@dataclass(frozen=True)
class Converted:
    """A value as it is sent to the service."""

    value: Mapping[str, Any]
    """JSON data. The service adds what it reads from the file."""
    content: bytes | None = None
    """The file of an image or of audio."""


def convert(kind: MediaKind, given: Any) -> Converted:
    """Return the value of a record. Raises ValueError, and TypeError for an object that can't be a
    value of this kind."""
    try:
        converted = _CONVERTERS[kind](given)
    except (RuntimeError, ArithmeticError, MemoryError) as error:
        # Such as the errors of torch for sparse tensors, and for a GPU without free memory.
        raise ValueError(f"{type(error).__name__}: {error}") from error
    if len(json.dumps(converted.value)) > MAX_VALUE_BYTES:
        raise ValueError(f"it has more than {MAX_VALUE_BYTES:,} bytes")
    return converted


def _histogram(given: Any) -> Converted:
    from dray.media import arrays

    return Converted(arrays.histogram(given))


def _image(given: Any) -> Converted:
    if isinstance(given, str | os.PathLike | bytes | bytearray | memoryview):
        content = _content(given)
    elif hasattr(given, "savefig"):  # a figure of matplotlib
        given.savefig(target := io.BytesIO(), format="png")
        content = target.getvalue()
    elif hasattr(given, "convert") and hasattr(given, "mode"):  # a picture of Pillow
        plain = given if given.mode in ("L", "LA", "RGB", "RGBA") else given.convert("RGB")
        plain.save(target := io.BytesIO(), format="PNG")
        content = target.getvalue()
    else:
        from dray.media import arrays

        content = arrays.png(given)
    formats.picture(content)
    return Converted({}, content)


def _audio(given: Any) -> Converted:
    if isinstance(given, tuple):
        from dray.media import arrays

        samples, sample_rate = given
        content = arrays.wav(samples, sample_rate)
    elif isinstance(given, str | os.PathLike | bytes | bytearray | memoryview):
        content = _content(given)
    else:
        raise TypeError(
            "audio must be (samples, samples per second), or a WAV file, not "
            f"{type(given).__name__}"
        )
    formats.sound(content)
    return Converted({}, content)


def _content(given: str | os.PathLike[str] | bytes | bytearray | memoryview) -> bytes:
    """Return the bytes, or the content of the file at a path."""
    if isinstance(given, bytes | bytearray | memoryview):
        return bytes(given)
    try:
        with Path(given).open("rb") as file:
            return file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ValueError(f"the file {os.fspath(given)!r} can't be read: {error}") from error


def _text(given: Any) -> Converted:
    if not isinstance(given, str):
        raise TypeError(f"a text must be a str, not {type(given).__name__}")
    return Converted({"text": _clean(given[:MAX_TEXT_CHARS]), "num_chars": len(given)})


def _table(given: Any) -> Converted:
    """Convert a data frame, a mapping from column names to values, or rows as mappings."""
    if hasattr(given, "to_dict") and hasattr(given, "columns"):  # a data frame of pandas
        num_rows, given = len(given), given.head(MAX_ROWS).to_dict("list")
    elif isinstance(given, Mapping):
        lengths = {len(column) for column in given.values()}
        if len(lengths) > 1:
            raise ValueError("the columns of the table have different lengths")
        num_rows = max(lengths, default=0)
    elif isinstance(given, Sequence) and not isinstance(given, str | bytes):
        num_rows = len(given)
        rows = given[:MAX_ROWS]
        if not all(isinstance(row, Mapping) for row in rows):
            raise TypeError("each row of a table must be a mapping from column names to values")
        names = dict.fromkeys(name for row in rows for name in row)
        given = {name: [row.get(name) for row in rows] for name in names}
    else:
        raise TypeError(
            "a table must be a data frame, a mapping from column names to lists, or a list of rows "
            f"as mappings, not {type(given).__name__}"
        )
    if not 0 < len(given) <= MAX_COLUMNS:
        raise ValueError(f"a table must have 1 to {MAX_COLUMNS} columns, not {len(given)}")
    columns = [[_cell(cell) for cell in islice(column, MAX_ROWS)] for column in given.values()]
    value = {
        "columns": [_clean(str(name))[:MAX_NAME_CHARS] for name in given],
        "rows": [list(row) for row in zip(*columns, strict=True)],
        "num_rows": num_rows,
    }
    return Converted(value)


def _cell(given: Any) -> int | float | str | None:
    """Return a cell as JSON data. Everything except finite numbers, booleans and None is written as
    text."""
    if getattr(given, "ndim", None) == 0:  # a number of numpy or torch
        given = given.item()
    if given is None or isinstance(given, bool):
        return given
    if isinstance(given, int):
        return int(given) if abs(given) <= MAX_EXACT_INT else str(given)
    if isinstance(given, float) and math.isfinite(given):
        return float(given)
    return _clean(str(given)[:MAX_CELL_CHARS])


def _confusion_matrix(given: Any) -> Converted:
    """Convert (labels, predictions), (labels, predictions, names), counts, or counts with names as
    a mapping."""
    from dray.media import arrays

    classes: Sequence[str] | None = None
    if isinstance(given, Mapping):
        if not given.keys() <= {"counts", "classes"} or "counts" not in given:
            raise TypeError("a confusion matrix as a mapping needs `counts`; `classes` is optional")
        classes, given = given.get("classes"), given["counts"]
    elif isinstance(given, tuple):
        if len(given) not in (2, 3):
            raise TypeError("a confusion matrix must be (labels, predictions[, names of classes])")
        classes, given = (given[2] if len(given) == 3 else None), given[:2]
    names = None if classes is None else [_clean(str(name))[:MAX_NAME_CHARS] for name in classes]
    return Converted(arrays.confusion_matrix(given, names))


def _curve(kind: MediaKind) -> Callable[[Any], Converted]:
    def converted(given: Any) -> Converted:
        from dray.media import arrays

        if not isinstance(given, tuple) or len(given) != 2:
            raise TypeError("a curve must be (labels, scores)")
        compute = arrays.pr_curve if kind is MediaKind.PR_CURVE else arrays.roc_curve
        return Converted(compute(*given))

    return converted


def _clean(text: str) -> str:
    """Replace what the service's databases can't store."""
    return text.replace("\0", "␀").encode("utf-8", "replace").decode()


_CONVERTERS: Mapping[MediaKind, Callable[[Any], Converted]] = {
    MediaKind.HISTOGRAM: _histogram,
    MediaKind.IMAGE: _image,
    MediaKind.AUDIO: _audio,
    MediaKind.TEXT: _text,
    MediaKind.TABLE: _table,
    MediaKind.CONFUSION_MATRIX: _confusion_matrix,
    MediaKind.PR_CURVE: _curve(MediaKind.PR_CURVE),
    MediaKind.ROC_CURVE: _curve(MediaKind.ROC_CURVE),
}
