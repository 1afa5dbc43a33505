"""Splits documents into individual values by JSON pointer, for searches and comparisons."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Any, NamedTuple

from dray.arguments import parameters_of
from dray.spec import JobSpec

MAX_TEXT = 255
"""Maximum number of characters of a string that can be searched."""
MAX_POINTER = 255
MAX_ITEMS = 64
"""Maximum number of items of a list, or entries of an object, that can be searched."""
MAX_VALUES = 1_000
"""Maximum number of values in a field such as `model.args`. A larger field can only be searched as
a whole. Without this limit, a document of one megabyte could create half a million rows."""
MAX_OF_ARRAY = 200_000
"""Maximum total number of values in which the jobs of an array differ. If a document contains more
values, the values in lists are left out. Without this limit, submitting a sweep of 10,000 trials
over lists could write twenty million rows."""

DEFAULTS = "defaults-"
"""Prefix of `SharedValues.holder` if the values are the default values of documents."""

NOT_SEARCHED = frozenset({"version", "name", "queue", "priority", "labels"})
"""Top-level fields that are columns of the job, some of which can change after submission."""
PARAMETERS = "parameters"
"""The name under which a script's named arguments are stored, next to the fields of documents."""


class StoredValue(NamedTuple):
    """A stored value of a document. A number has no `text`, and a string has no `number`; true,
    false and PARTS have both; ABSENT has neither."""

    number: float | None
    text: str | None


ABSENT = StoredValue(None, None)
PARTS = StoredValue(-1.0, "parts")
"""The value of a nonempty object or list."""
Values = Mapping[str, StoredValue]
"""Values by JSON pointer."""


class SharedValues(NamedTuple):
    """The values of a document with which other documents are compared."""

    holder: str
    document: Mapping[str, Any]
    values: Values

    def but_for(self, document: Mapping[str, Any]) -> dict[str, StoredValue]:
        """Return the values of a document that differ from the shared values."""
        return differing(document, self.document)

    def of_array(
        self, documents: Mapping[str, Mapping[str, Any]]
    ) -> tuple[SharedValues, dict[str, dict[str, StoredValue]]]:
        """Return the values to store for an array: the shared values, and the differing values of
        each job.

        If the jobs differ in more than `MAX_OF_ARRAY` values, lists that differ can only be
        searched as a whole: their items are stored neither as shared values nor for individual
        jobs. `documents` maps job ids to documents.
        """
        own: dict[str, dict[str, StoredValue]] = {}
        number = 0
        for job_id, document in documents.items():
            own[job_id] = self.but_for(document)
            number += len(own[job_id])
            if number > MAX_OF_ARRAY:
                break
        else:
            return self, own
        lists: set[str] = set()
        own = {
            job_id: differing(document, self.document, lists)
            for job_id, document in documents.items()
        }
        values = {at: value for at, value in self.values.items() if not _is_in(at, lists)}
        return self._replace(values=values), own


def stored(value: Any) -> StoredValue:
    """Return the value to store; ABSENT for null and for numbers outside the range of a double."""
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
    """Return the searchable values of a document."""
    return differing(document, {})


def differing(
    document: Mapping[str, Any], base: Mapping[str, Any], lists: set[str] | None = None
) -> dict[str, StoredValue]:
    """Return the values of `document` that differ from the values of `base`. If `lists` is given,
    the pointers of differing lists are added to it, and the items of these lists are left out."""
    found: dict[str, StoredValue] = {}
    for field in (document.keys() | base.keys()) - NOT_SEARCHED:
        _differ(document.get(field), base.get(field), f"/{escaped(field)}", found, lists)
    if not _is_same(document.get("script"), base.get("script")):
        named, others = parameters_of(document), parameters_of(base)
        _differ(named, others, f"/{PARAMETERS}", found, lists)
    return found


def _differ(
    value: Any, other: Any, pointer: str, found: dict[str, StoredValue], lists: set[str] | None
) -> None:
    if _is_same(value, other) or len(pointer) > MAX_POINTER:
        return
    kept = stored(value)
    if kept != stored(other):
        found[pointer] = kept
    if lists is not None and (isinstance(value, list) or isinstance(other, list)):
        lists.add(pointer)
        return
    here, there = _parts(value, pointer), _parts(other, pointer)
    for name in here.keys() | there.keys():
        _differ(here.get(name), there.get(name), f"{pointer}/{escaped(name)}", found, lists)


def _is_same(value: Any, other: Any) -> bool:
    """Whether both values are certain to be the same JSON. `repr` is compared because True == 1 in
    Python."""
    return value is other or (value == other and repr(value) == repr(other))


def of_trial(
    document: Mapping[str, Any], base: Mapping[str, Any], num_trials: int
) -> dict[str, StoredValue]:
    """For a trial that gets its parameter values after submission, return the values that differ
    from its sweep's document. The rule of `SharedValues.of_array` applies; all trials are assumed
    to differ in the same number of values."""
    own = differing(document, base)
    if len(own) * num_trials <= MAX_OF_ARRAY:
        return own
    lists: set[str] = set()
    own = differing(document, base, lists)
    return {**own, **{at: ABSENT for at in searchable(base) if _is_in(at, lists)}}


def _is_in(pointer: str, lists: Iterable[str]) -> bool:
    return pointer.startswith(tuple(f"{one}/" for one in lists))


def _parts(value: Any, pointer: str = "") -> dict[str, Any]:
    if pointer.count("/") == 2 and _num_values(value) > MAX_VALUES:
        return {}
    if isinstance(value, dict):
        return {str(name): inner for name, inner in islice(value.items(), MAX_ITEMS)}
    if isinstance(value, list):
        return {str(number): inner for number, inner in enumerate(value[:MAX_ITEMS])}
    return {}


def _num_values(value: Any) -> int:
    """Return the number of searchable values in a JSON value. If there are more than `MAX_VALUES`,
    the result can be any number above `MAX_VALUES`."""
    if not isinstance(value, dict | list):
        return 0
    number = 0
    for inner in islice(value.values() if isinstance(value, dict) else value, MAX_ITEMS):
        number += 1 + (_num_values(inner) if isinstance(inner, dict | list) else 0)
        if number > MAX_VALUES:
            break
    return number


def escaped(name: str) -> str:
    """Escape a name for use in a JSON pointer (RFC 6901)."""
    return name.replace("~", "~0").replace("/", "~1")


@functools.cache
def defaults() -> SharedValues:
    """Return the default values of a document, which all jobs outside arrays share."""
    document: dict[str, Any] = JobSpec(recipe="image_classification").model_dump(mode="json")
    values = searchable(document)
    digest = hashlib.sha256(json.dumps(sorted(values.items())).encode()).hexdigest()
    return SharedValues(f"{DEFAULTS}{digest[:32]}", document, values)
