"""Documents as single values by their place (a JSON pointer): to search and to compare them."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from types import MappingProxyType
from typing import Any, NamedTuple

from dray.spec import JobSpec

MAX_TEXT = 255
"""Characters of a text that a search goes by."""
MAX_POINTER = 255
MAX_ITEMS = 64
"""Items of a list, and entries of an object, that can be searched."""

DEFAULTS = "defaults-"
"""How the holders begin whose values a document has that says nothing."""

NOT_SEARCHED = frozenset({"version", "name", "queue", "priority", "labels"})
"""Top-level fields that are columns of the job, some of which change after the submit."""


class StoredValue(NamedTuple):
    """A value of a document as it is stored: a number has no text, a text no number; true, false
    and PARTS have both; ABSENT has neither."""

    number: float | None
    text: str | None


ABSENT = StoredValue(None, None)
PARTS = StoredValue(-1.0, "parts")
"""Of an object or a list that is not empty."""
Values = Mapping[str, StoredValue]
"""By JSON pointer."""


class SharedValues(NamedTuple):
    """The values of a document that others differ from."""

    holder: str
    document: Mapping[str, Any]
    values: Values

    def but_for(self, document: Mapping[str, Any]) -> dict[str, StoredValue]:
        """The values of a document where it differs."""
        return differing(document, self.values, self.document)


def stored(value: Any) -> StoredValue:
    """A value as it is stored; ABSENT of null, and of a number that no double holds."""
    if isinstance(value, bool):
        return StoredValue(float(value), "true" if value else "false")
    if isinstance(value, str):
        return StoredValue(None, value[:MAX_TEXT])
    if isinstance(value, int | float):
        try:
            number = float(value)
        except OverflowError:
            return ABSENT
        return StoredValue(number, None) if number == number else ABSENT
    return PARTS if value else ABSENT


NOTHING: Mapping[str, Any] = MappingProxyType({})


def searchable(document: Mapping[str, Any]) -> dict[str, StoredValue]:
    """The values of a document that a search goes by."""
    found: dict[str, StoredValue] = {}
    for field in document:
        if field not in NOT_SEARCHED:
            found.update(_searchable(document, field))
    return found


def _searchable(document: Mapping[str, Any], field: str) -> Iterator[tuple[str, StoredValue]]:
    for pointer, value in nodes(document[field], f"/{escaped(field)}", MAX_ITEMS):
        if (kept := stored(value)) != ABSENT and len(pointer) <= MAX_POINTER:
            yield pointer, kept


def differing(
    document: Mapping[str, Any], base_values: Values, base: Mapping[str, Any] = NOTHING
) -> dict[str, StoredValue]:
    """The values of a document where it differs from another one, which has `base_values`. Fields
    that are as in `base`, the other document if it is at hand, are not looked into."""
    same = {field for field in document if field in base and document[field] == base[field]}
    here = searchable({field: document[field] for field in document if field not in same})
    there = {at: ABSENT for at in base_values if at.split("/", 2)[1] not in same}
    return {at: value for at, value in (there | here).items() if base_values.get(at) != value}


def nodes(value: Any, pointer: str, max_items: int | None = None) -> Iterator[tuple[str, Any]]:
    """(pointer, value) of the value and of all within it."""
    yield pointer, value
    parts: Iterable[tuple[object, Any]] = ()
    if isinstance(value, Mapping):
        parts = value.items()
    elif isinstance(value, list):
        parts = enumerate(value)
    for name, inner in islice(parts, max_items):
        yield from nodes(inner, f"{pointer}/{escaped(str(name))}", max_items)


def escaped(name: str) -> str:
    """A name as a part of a JSON pointer (RFC 6901)."""
    return name.replace("~", "~0").replace("/", "~1")


@functools.cache
def defaults() -> SharedValues:
    """Those that jobs share which are in no array: of a document that says nothing."""
    document: dict[str, Any] = JobSpec(recipe="image_classification").model_dump(mode="json")
    values = searchable(document)
    digest = hashlib.sha256(json.dumps(sorted(values.items())).encode()).hexdigest()
    return SharedValues(f"{DEFAULTS}{digest[:32]}", document, values)
