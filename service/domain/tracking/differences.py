"""Differences between documents."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from service.domain.tracking.document_values import nodes

IDENTITY = frozenset({"/version", "/name"})
"""Fields that say which job it is, and not what it does."""


def differences(documents: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """The values of each document at each place, by JSON pointer, where they are not all equal;
    None where a document has nothing. Labels, which group jobs, and names are left out."""
    fields = list(dict.fromkeys(field for document in documents for field in document))
    found: dict[str, list[Any]] = {}
    for field in fields:
        parts = [document.get(field) for document in documents]
        if field == "labels" or all(part == parts[0] for part in parts):
            continue
        values = [
            {at: value for at, value in nodes(part, f"/{field}") if not _has_parts(value)}
            for part in parts
        ]
        for pointer in dict.fromkeys(at for some in values for at in some):
            here = [some.get(pointer) for some in values]
            # As JSON, since 1 == True == 1.0 in Python.
            if pointer not in IDENTITY and len({_plain(value) for value in here}) > 1:
                found[pointer] = [None if value in ({}, []) else value for value in here]
    return found


def _has_parts(value: Any) -> bool:
    return isinstance(value, Mapping | list) and bool(value)


def _plain(value: Any) -> str:
    if value in ({}, []):
        return "null"  # an empty part says as much as a missing one
    is_whole = isinstance(value, float) and value.is_integer()
    return json.dumps(int(value) if is_whole else value)
