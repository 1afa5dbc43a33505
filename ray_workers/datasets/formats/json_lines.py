"""Read JSON lines: a JSON object in each line of a UTF-8 file."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from ray_workers.datasets.core.errors import broken
from ray_workers.datasets.formats import utf8
from ray_workers.datasets.formats.archives import gunzipped
from ray_workers.datasets.formats.prepared import Workshop
from ray_workers.datasets.sources.source import SourceFile

SUFFIXES = (".jsonl", ".jsonl.gz")
MAX_LINE_CHARS = 64 << 20
"""Maximum length of a line, so that a file without line ends is not read into memory."""


def records(file: SourceFile, shop: Workshop) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each object with its location, such as `file:///a.jsonl, line 17`. Lines with only
    white space are skipped. Raises DataError."""
    for number, line in enumerate(_lines(file, shop), start=1):
        if not line.strip():
            continue
        location = f"{file.location}, line {number:,}"
        try:
            found = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise broken(location, f"is not JSON: {error}") from None
        if not isinstance(found, dict):
            kind = type(found).__name__
            raise broken(location, f"is a JSON {kind}, but each line must be a JSON object")
        yield location, found


def _lines(file: SourceFile, shop: Workshop) -> Iterator[str]:
    path = gunzipped(file, shop.scratch / "plain", shop.budget)
    rest = ""
    try:
        for number, piece in enumerate(utf8.pieces(path)):
            text = piece.removeprefix("\ufeff") if number == 0 else piece
            *lines, rest = (rest + text).split("\n")
            yield from lines
            if len(rest) > MAX_LINE_CHARS:
                raise broken(
                    file.location, f"has a line of more than {MAX_LINE_CHARS:,} characters"
                )
    except utf8.NotTextError as error:
        raise broken(
            file.location,
            f"is not UTF-8: the byte at offset {error.offset:,} is invalid; the file's encoding "
            f"is probably {utf8.likely_encoding(path)}: save it as UTF-8",
        ) from None
    yield rest
