"""Differences between documents."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from service.domain.tracking.document_values import escaped

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
        values = [dict(_leaves(part, f"/{field}")) for part in parts]
        for pointer in dict.fromkeys(at for some in values for at in some):
            here = [some.get(pointer) for some in values]
            # As JSON, since 1 == True == 1.0 in Python.
            if pointer not in IDENTITY and len({_plain(value) for value in here}) > 1:
                found[pointer] = [None if value in ({}, []) else value for value in here]
    return found


def _leaves(value: Any, pointer: str) -> Iterator[tuple[str, Any]]:
    """(pointer, value) of each value that has no parts."""
    if isinstance(value, Mapping) and value:
        for name, inner in value.items():
            yield from _leaves(inner, f"{pointer}/{escaped(str(name))}")
    elif isinstance(value, list) and value:
        for number, inner in enumerate(value):
            yield from _leaves(inner, f"{pointer}/{number}")
    else:
        yield pointer, value


def _plain(value: Any) -> str:
    if value in ({}, []):
        return "null"  # an empty part says as much as a missing one
    is_whole = isinstance(value, float) and value.is_integer()
    return json.dumps(int(value) if is_whole else value)
