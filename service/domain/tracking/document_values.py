"""Documents as single values by their place (a JSON pointer): to search and to compare them."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Mapping
from itertools import islice
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
        return differing(document, self.document)


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


def searchable(document: Mapping[str, Any]) -> dict[str, StoredValue]:
    """The values of a document that a search goes by."""
    return differing(document, {})


def differing(document: Mapping[str, Any], base: Mapping[str, Any]) -> dict[str, StoredValue]:
    """The values of a document where they are not those of another one."""
    found: dict[str, StoredValue] = {}
    for field in (document.keys() | base.keys()) - NOT_SEARCHED:
        _differ(document.get(field), base.get(field), f"/{escaped(field)}", found)
    return found


def _differ(value: Any, other: Any, pointer: str, found: dict[str, StoredValue]) -> None:
    if value is other or len(pointer) > MAX_POINTER:
        return
    kept = stored(value)
    if kept != stored(other):
        found[pointer] = kept
    here, there = _parts(value), _parts(other)
    for name in here.keys() | there.keys():
        _differ(here.get(name), there.get(name), f"{pointer}/{escaped(name)}", found)


def _parts(value: Any) -> dict[str, Any]:
    if isinstance(value, Mapping):
        return {str(name): inner for name, inner in islice(value.items(), MAX_ITEMS)}
    if isinstance(value, list):
        return {str(number): inner for number, inner in enumerate(value[:MAX_ITEMS])}
    return {}


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
