"""Differences between documents."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from service.domain.tracking.document_values import escaped

IDENTITY = frozenset({"/version", "/name", "/origin/job"})
"""Fields that identify a job and don't affect what it does."""
MAX_DIFFERENCES = 5_000
"""Maximum number of differences to return; any others are left out."""


def differences(documents: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return the fields in which the documents differ: for each JSON pointer, the value in each
    document, or None if the document doesn't have the field. Names are left out. Labels are left
    out too, because they group jobs."""
    found: dict[str, list[Any]] = {}
    for field in dict.fromkeys(field for document in documents for field in document):
        if field != "labels":
            _differ([document.get(field) for document in documents], f"/{field}", found)
    return found


def _differ(values: Sequence[Any], pointer: str, found: dict[str, list[Any]]) -> None:
    # Compare values as JSON, because 1 == True == 1.0 in Python.
    if pointer in IDENTITY or len({json.dumps(value) for value in values}) == 1:
        return
    parts = [_parts(value) for value in values]
    # Treat an empty object or list as missing.
    here = [
        None if some or value in ({}, []) else value
        for value, some in zip(values, parts, strict=True)
    ]
    if len({_plain(value) for value in here}) > 1:
        found[pointer] = here
    for name in dict.fromkeys(name for some in parts for name in some):
        if len(found) >= MAX_DIFFERENCES:
            return
        _differ([some.get(name) for some in parts], f"{pointer}/{escaped(name)}", found)


def _parts(value: Any) -> Mapping[str, Any]:
    if isinstance(value, Mapping):
        return {str(name): inner for name, inner in value.items()}
    if isinstance(value, list):
        return {str(number): inner for number, inner in enumerate(value)}
    return {}


def _plain(value: Any) -> str:
    is_whole = isinstance(value, float) and value.is_integer()
    return json.dumps(int(value) if is_whole else value)
