"""Reduces a failing case by leaving out one part after another."""

from __future__ import annotations

import copy
import pprint
import traceback
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import pytest

from tests.generated.names.drawing import Case

One = TypeVar("One")
MOST = 150
"""Number of cases to try."""
NEEDED = ("script", "entrypoint", "environment", "pattern", "name")


def pass_or_show(
    seed: int, case: One, check: Callable[[One], None], smaller: Callable[[One], Iterator[One]]
) -> None:
    """Fail with the smallest case that fails in the same way, if there is one."""
    error = error_of(case, check)
    if error is not None:
        case, error = smallest(case, error, check, smaller)
        pytest.fail(f"seed {seed}:\n{pprint.pformat(case, width=100)}\n{error}", pytrace=False)


def error_of(case: One, check: Callable[[One], None]) -> str | None:
    """Return the end of the traceback, or None if the case passes."""
    try:
        check(copy.deepcopy(case))
    except Exception as error:
        *_, frame = traceback.extract_tb(error.__traceback__)
        where = "".join(traceback.format_list([frame]))
        return f"{where}{type(error).__name__}: {error}"
    return None


def smallest(
    case: One,
    error: str,
    check: Callable[[One], None],
    smaller: Callable[[One], Iterator[One]],
) -> tuple[One, str]:
    """Return a case that fails at the same line and can't be reduced further, and its error."""
    tried = 0
    while True:
        for less in smaller(case):
            tried += 1
            if tried > MOST:
                return case, error
            found = error_of(less, check)
            if found is not None and location(found) == location(error):
                case, error = less, found
                break
        else:
            return case, error


def location(error: str) -> str:
    """Return the line that raised the error."""
    return error.partition("\n")[0]


def smaller(case: Case) -> Iterator[Case]:
    """Yield cases with something left out, or with a simpler way in."""
    for field, plain in (("hook", None), ("user", None), ("logger", "report"), ("door", "http")):
        if getattr(case, field) not in (plain, "program"):
            less = copy.deepcopy(case)
            setattr(less, field, plain)
            yield less
    for path in parts(case.document):
        if path[-1] not in NEEDED or path == ("name",):
            less = copy.deepcopy(case)
            remove(less.document, path)
            yield less
    for name in ("tags", "metrics", "lines", "files"):
        held = getattr(case, name)
        for key in list(held) if isinstance(held, dict) else range(len(held)):
            less = copy.deepcopy(case)
            del getattr(less, name)[key]
            yield less
    if case.notes:
        less = copy.deepcopy(case)
        less.notes = ""
        yield less


def parts(node: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Return the path of each part of a document, largest first."""
    items = [*(node.items() if isinstance(node, dict) else enumerate(node))]
    for key, _ in items:
        yield (*path, key)
    for key, value in items:
        if isinstance(value, dict | list):
            yield from parts(value, (*path, key))


def remove(document: Any, path: tuple[Any, ...]) -> None:
    *parents, last = path
    for part in parents:
        document = document[part]
    del document[last]
