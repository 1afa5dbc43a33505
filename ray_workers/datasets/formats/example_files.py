"""Read examples from JSON lines, CSV and Parquet files, as records that do not depend on the
format."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

from dray import spec
from ray_workers.datasets.core.errors import broken
from ray_workers.datasets.formats import json_lines, utf8
from ray_workers.datasets.formats.archives import gunzipped
from ray_workers.datasets.formats.prepared import Workshop
from ray_workers.datasets.formats.table_files import CsvFile, ParquetFile
from ray_workers.datasets.sources.source import SourceFile

SUFFIXES: Final[Mapping[str, tuple[str, ...]]] = {
    "jsonl": json_lines.SUFFIXES,
    "csv": (".csv", ".csv.gz", ".tsv", ".tsv.gz"),
    "parquet": (".parquet", ".pq"),
}
"""The suffixes of the files that are read if the source is a folder."""
PYTHON_MESSAGES: Final = re.compile(
    r"""\[\s*\{.*['"](?:role|from)['"]\s*:|\{\s*['"]messages['"]\s*:""", re.DOTALL
)
"""Matches `str()` of messages, or of an object with messages."""


def format_of(data: spec.Data) -> str:
    return data.known_format or "jsonl"


def records(
    file: SourceFile, shop: Workshop, data: spec.Data
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each record with its location, such as `file:///a.jsonl, line 17`. Raises
    DataError."""
    form = format_of(data)
    if form == "jsonl":
        yield from json_lines.records(file, shop)
        return
    path = gunzipped(file, shop.scratch / "plain", shop.budget)
    if form == "parquet":
        for location, record in ParquetFile(path, file.location).records():
            yield location, _with_messages(location, record)
        return
    text = utf8.converted(path, data.encoding, file.location, shop.scratch / "utf8", shop.budget)
    delimiter = data.model_copy(update={"source": file.location}).known_delimiter
    for location, record in CsvFile(text, file.location, delimiter).records():
        yield location, _with_messages(location, record)


def _with_messages(location: str, record: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _messages_in(cell, name, location) for name, cell in record.items()}


def _messages_in(cell: Any, name: str, location: str) -> Any:
    """Return the messages in a cell with a JSON list of objects with a role; return any other cell
    unchanged. Raises DataError for messages that are not JSON, which would be taken for a text."""
    text = cell.strip() if isinstance(cell, str) else ""
    if text.startswith(("[", "{")) and text.endswith(("]", "}")):
        try:
            found = json.loads(text)
        except (ValueError, RecursionError):
            if PYTHON_MESSAGES.match(text):
                raise broken(
                    location,
                    f"has messages in the column `{name}` in the notation of Python: write them as "
                    f"JSON, for example with `table[{name!r}] = table[{name!r}].map(json.dumps)` "
                    "before `table.to_csv(...)` of pandas",
                ) from None
            return cell
        if (
            found
            and isinstance(found, list)
            and all(isinstance(one, dict) and "role" in one for one in found)
        ):
            return found
    return cell
