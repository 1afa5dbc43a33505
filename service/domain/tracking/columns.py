"""Parses the columns of the table of jobs, such as `name,lr,best:val/accuracy`, and the column by
which the table is sorted.

    columns = column { "," column }
    sort    = [ "-" ] column
    column  = [ ( "last" | "best" | "min" | "max" ) ":" ] field

A field has the grammar of `service.domain.tracking.search`. In addition, the names in `FACTS` are
columns, and a name that is no other field is a parameter.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from service.domain.errors import InvalidSearch
from service.domain.tracking.document_values import defaults
from service.domain.tracking.search import is_known_name, parse_field
from service.domain.tracking.search_tree import JobColumn, MetricField, Of, SearchField

MAX_COLUMNS = 100
FACTS = ("duration", "cost", "array", "tags", "variant", "progress", "goodput", "attempt")
"""Columns that a search doesn't have."""
SORTED_BY = (
    *("id", "name", "owner", "project", "queue", "state", "created_at", "started_at"),
    *("finished_at", "duration", "cost"),
)
"""Columns and facts of a job by which the table can be sorted."""

_PIECE = re.compile(r"""(?:"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*'|[^,"'])*""", re.DOTALL)
_OF = re.compile(r"\s*(last|best|min|max)\s*:")
_BARE = re.compile(r"\s*([A-Za-z_][A-Za-z0-9_-]*)\s*")


@dataclass(frozen=True)
class Fact:
    """One of `FACTS`."""

    name: str


@dataclass(frozen=True)
class ParameterField:
    """A parameter: a named argument of a script, or the field of a recipe's document that has this
    name."""

    name: str
    pointer: str | None
    """JSON pointer of the recipe's field; None if recipes have no such field."""


Field = SearchField | Fact | ParameterField


@dataclass(frozen=True)
class TableColumn:
    text: str
    """The column as the caller wrote it, without spaces at its ends."""
    field: Field


@dataclass(frozen=True)
class Sort:
    field: Field
    descending: bool = False


def parse_columns(text: str) -> list[TableColumn]:
    """Parse a list of columns. A column that occurs twice is returned once. Raises InvalidSearch
    with the column that is wrong."""
    found: dict[str, TableColumn] = {}
    at = 0
    while at <= len(text):
        match = _PIECE.match(text, at)
        assert match is not None
        end = match.end()
        if end < len(text) and text[end] != ",":
            raise _invalid(text[at:], f"{text[end]} has no closing {text[end]}", "/columns")
        piece = match[0].strip()
        found[piece] = TableColumn(piece, _field(piece, "/columns"))
        at = end + 1
    if len(found) > MAX_COLUMNS:
        raise InvalidSearch(
            f"{len(found)} columns are too many: at most {MAX_COLUMNS} are allowed",
            pointer="/columns",
        )
    return list(found.values())


def parse_sort(text: str) -> Sort:
    """Parse the column by which to sort. Raises InvalidSearch if the table can't be sorted by
    it."""
    stripped = text.strip()
    descending = stripped.startswith("-")
    field = _field(stripped.removeprefix("-").strip(), "/sort")
    if isinstance(field, JobColumn | Fact) and field.name not in SORTED_BY:
        hint = f"sort by a metric, a parameter, a label, or one of {', '.join(SORTED_BY)}"
        raise _invalid(stripped, f"jobs can't be sorted by {field.name}", "/sort", hint)
    return Sort(field, descending)


def parse_metric(text: str) -> MetricField | Fact:
    """Parse a metric, such as `val/loss`, `best:val/loss` or `accuracy`; or `cost` or `duration`.
    Raises InvalidSearch for other fields."""
    stripped = text.strip()
    of = _OF.match(stripped)
    name = _BARE.fullmatch(stripped[of.end() :] if of else stripped)
    if name is not None and name[1] not in FACTS and not is_known_name(name[1]):
        return MetricField(name[1], Of(of[1]) if of else Of.LAST)
    field = _field(stripped, "/metric")
    if isinstance(field, MetricField):
        return field
    if isinstance(field, Fact) and field.name in SORTED_BY:
        return field
    hint = "use a metric such as val/loss or best:val/loss, or cost or duration"
    raise _invalid(stripped, "is not a metric", "/metric", hint)


def _field(text: str, pointer: str) -> Field:
    bare = _BARE.fullmatch(text)
    if bare is not None and bare[1] in FACTS:
        return Fact(bare[1])
    if bare is not None and not is_known_name(bare[1]):
        return ParameterField(bare[1], _recipe_field(bare[1], pointer))
    of = _OF.match(text)
    rest = text[of.end() :] if of else text
    try:
        field = parse_field(f"{of[1]}({rest})" if of else rest)
    except InvalidSearch as error:
        raise _invalid(text, error.message, pointer, error.hint) from None
    return field


def _recipe_field(name: str, pointer: str) -> str | None:
    found = _fields_by_name().get(name, ())
    if len(found) > 1:
        names = [each[1:].replace("/", ".") for each in found]
        message = f"{len(names)} fields have this name"
        raise _invalid(name, message, pointer, f"write one of {', '.join(names)}")
    return found[0] if found else None


@cache
def _fields_by_name() -> dict[str, Sequence[str]]:
    """Return the pointers of the fields of a recipe's document, keyed by their last part."""
    found: dict[str, list[str]] = {}
    for pointer in sorted(defaults().values):
        found.setdefault(pointer.rpartition("/")[2], []).append(pointer)
    return {name: tuple(pointers) for name, pointers in found.items()}


def _invalid(text: str, message: str, pointer: str, hint: str | None = None) -> InvalidSearch:
    shown = text if len(text) <= 80 else f"{text[:80]}..."
    return InvalidSearch(f"{shown!r}: {message}", pointer=pointer, hint=hint)
