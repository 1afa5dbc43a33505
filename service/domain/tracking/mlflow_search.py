"""Parses MLflow's language for searching runs: `metrics.loss < 0.1 AND params.model = 'cnn'`.

A search consists of conditions joined by AND, and of orderings such as `metrics.loss DESC`
(https://mlflow.org/docs/latest/search-runs). Keys can be in backticks or double quotes.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum


class BadSearch(ValueError):
    """Raised for an invalid filter or ordering. The message names the invalid part."""


class Entity(StrEnum):
    METRIC = "metric"
    PARAM = "param"
    TAG = "tag"
    ATTRIBUTE = "attribute"


_ENTITIES = {
    **dict.fromkeys(("metric", "metrics"), Entity.METRIC),
    **dict.fromkeys(("param", "params", "parameter", "parameters"), Entity.PARAM),
    **dict.fromkeys(("tag", "tags"), Entity.TAG),
    **dict.fromkeys(("attribute", "attributes", "attr", "run"), Entity.ATTRIBUTE),
}
_ATTRIBUTES = {
    **{name: name for name in ("run_id", "run_name", "status", "user_id", "start_time")},
    "name": "run_name",  # of experiments
    "run name": "run_name",
    "Run name": "run_name",
    "Run ID": "run_id",
    "end_time": "end_time",
    "created": "start_time",
    "Created": "start_time",
}
_NUMERIC_ATTRIBUTES = ("start_time", "end_time")
_NUMERIC = ("=", "!=", ">", ">=", "<", "<=")
_TEXTUAL = ("=", "!=", "LIKE", "ILIKE", "IN", "NOT IN")
MAX_CHARS, MAX_CONDITIONS, MAX_PATTERN = 10_000, 100, 255
"""Databases compare a pattern at each position of a string, and can't be interrupted while they do.
A search for a long pattern in long notes would exceed the time limit."""

Value = float | str | tuple[str, ...]


@dataclass(frozen=True)
class Condition:
    entity: Entity
    key: str
    operator: str
    """One of `_NUMERIC` if the value is a number, or one of `_TEXTUAL` if it is a string. For IN
    and NOT IN, the value is a tuple of strings."""
    value: Value


@dataclass(frozen=True)
class Ordering:
    entity: Entity
    key: str
    descending: bool


_TOKEN = re.compile(
    r"""\s*(?:
      (?P<operator> <= | >= | != | = | < | > )
    | (?P<bracket> [(),] )
    | (?P<number> [-+]? (?: [0-9]+ (?:\.[0-9]*)? | \.[0-9]+ ) (?: [eE][-+]?[0-9]+ )? (?![\w.]) )
    | (?P<name> [A-Za-z_][\w]* \. (?: `[^`]+` | "[^"]+" | [\w./-]+ ) )
    | (?P<text> '(?:[^']|'')*' | "[^"]*" | `[^`]*` )
    | (?P<word> [\w-]+ )
    )""",
    re.VERBOSE,
)


class _Tokens:
    def __init__(self, text: str) -> None:
        if len(text) > MAX_CHARS:
            raise BadSearch(f"the search expression is longer than {MAX_CHARS} characters")
        self._text, self._at = text, 0
        self._found: list[tuple[str, str]] = []
        end = len(text.rstrip())
        while self._at < end:
            match = _TOKEN.match(text, self._at)
            if match is None:
                raise BadSearch(f"{text[self._at :][:40]!r} is not valid syntax")
            kind = match.lastgroup or ""
            self._found.append((kind, match[kind]))
            self._at = match.end()
        self._found.reverse()

    def __bool__(self) -> bool:
        return bool(self._found)

    def take(self, what: str) -> tuple[str, str]:
        if not self._found:
            raise BadSearch(f"{what} is missing at the end of {self._text[-60:]!r}")
        return self._found.pop()

    def take_word(self, *words: str) -> str | None:
        """Consume the next word if it is one of `words`, and return it in upper case."""
        if self._found and self._found[-1][1].upper() in words:
            return self._found.pop()[1].upper()
        return None


def parse_filter(text: str) -> list[Condition]:
    """Return the conditions, all of which must be satisfied. Raises BadSearch."""
    tokens = _Tokens(text)
    found: list[Condition] = []
    while tokens:
        if found and tokens.take_word("AND") is None:
            raise BadSearch(f"write AND before {tokens.take('')[1]!r}: OR is not supported")
        found.append(_condition(tokens))
        if len(found) > MAX_CONDITIONS:
            raise BadSearch(f"the filter has more than {MAX_CONDITIONS} conditions")
    return found


def parse_name_filter(text: str) -> list[Condition]:
    """Return the conditions of a search for experiments. The conditions can refer only to `name`.
    Raises BadSearch."""
    found = parse_filter(text)
    if any((one.entity, one.key) != (Entity.ATTRIBUTE, "run_name") for one in found):
        raise BadSearch("experiments can only be searched by name")
    return found


def parse_order(texts: Sequence[str]) -> list[Ordering]:
    """Return the orderings. Raises BadSearch."""
    found = []
    for text in texts:
        tokens = _Tokens(text)
        entity, key = _key(tokens)
        direction = tokens.take_word("ASC", "DESC")
        if tokens:
            raise BadSearch(f"an ordering must be a key followed by ASC or DESC, not {text!r}")
        found.append(Ordering(entity, key, direction == "DESC"))
    return found


def _key(tokens: _Tokens) -> tuple[Entity, str]:
    kind, text = tokens.take("a key such as metrics.loss")
    prefix, _, key = text.partition(".")
    entity = _ENTITIES.get(prefix.lower()) if kind == "name" else None
    if kind in ("word", "text"):  # an attribute needs no prefix
        entity, key = Entity.ATTRIBUTE, text
    if entity is None:
        raise BadSearch(
            f"{text!r} is not a key: keys begin with metrics, params, tags or attributes"
        )
    key = key[1:-1] if key[0] in "`\"'" else key
    if entity is Entity.ATTRIBUTE:
        if key not in _ATTRIBUTES:
            raise BadSearch(
                f"there is no attribute {key!r}: the attributes are {', '.join(_ATTRIBUTES)}"
            )
        key = _ATTRIBUTES[key]
    return entity, key


def _condition(tokens: _Tokens) -> Condition:
    entity, key = _key(tokens)
    operator = tokens.take("an operator")[1].upper()
    if operator == "NOT" and tokens.take_word("IN"):
        operator = "NOT IN"
    is_numeric = entity is Entity.METRIC or key in _NUMERIC_ATTRIBUTES
    known = _NUMERIC if is_numeric else _TEXTUAL
    if operator not in known:
        raise BadSearch(
            f"{key!r} can be compared with {', '.join(known)}, but not with {operator!r}"
        )
    if operator.endswith("IN"):
        return Condition(entity, key, operator, _texts(tokens))
    kind, text = tokens.take("a value")
    if is_numeric:
        number = text.strip("'\"")
        try:
            return Condition(entity, key, operator, float(number))
        except ValueError:
            raise BadSearch(f"{key!r} must be compared with a number, not with {text!r}") from None
    if kind != "text":
        raise BadSearch(f"{key!r} must be compared with a quoted string, not with {text!r}")
    value = _unquoted(text)
    if operator.endswith("LIKE") and len(value) > MAX_PATTERN:
        raise BadSearch(
            f"a pattern for {operator} must not have more than {MAX_PATTERN} characters"
        )
    return Condition(entity, key, operator, value)


def _texts(tokens: _Tokens) -> tuple[str, ...]:
    """Return the strings of a list such as `('a', 'b')`."""
    found: list[str] = []
    expected = "("
    while True:
        if tokens.take("a list of strings in parentheses")[1] != expected:
            raise BadSearch("IN must be followed by strings in parentheses: ('a', 'b')")
        kind, text = tokens.take("a string")
        if kind != "text":
            raise BadSearch(f"IN must be followed by quoted strings, not {text!r}")
        found.append(_unquoted(text))
        if tokens.take_word(")"):
            return tuple(found)
        expected = ","


def _unquoted(text: str) -> str:
    return text[1:-1].replace("''", "'") if text[0] == "'" else text[1:-1]
