"""Parses search expressions, such as `val/accuracy > 0.9 and train.optimizer.lr < 0.01`.

    expression = conjunct { "or" conjunct }
    conjunct   = negation { "and" negation }
    negation   = "not" negation | "(" expression ")" | condition
    condition  = "exists" "(" field ")"
               | field ( "=" | "!=" | "<" | "<=" | ">" | ">=" ) literal
               | field [ "not" ] "in" "(" literal { "," literal } ")"
               | text [ "not" ] "in" "tags"
    field      = name { "[" ( integer | text ) "]" }
               | ( "last" | "best" | "min" | "max" ) "(" field ")"
    literal    = number | text | "true" | "false"

A name with `/` is a metric, and a name in `COLUMNS` is a column of the job. `labels.x` is a label,
`metrics.x` is a metric, `parameters.x` is a script's named argument, and other names are fields of
the document. A condition on a field that a
job doesn't have is false, even with `!=`. `not` negates a condition.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from difflib import get_close_matches
from enum import StrEnum
from typing import Any, NoReturn

from dray.spec import JobSpec
from dray.views import JobState
from service.domain.errors import InvalidSearch
from service.domain.tracking.document_values import (
    MAX_POINTER,
    NOT_SEARCHED,
    PARAMETERS,
    escaped,
)
from service.domain.tracking.search_tree import (
    COLUMNS,
    EXPERIMENT,
    AllOf,
    AnyOf,
    ColumnKind,
    Compared,
    DocumentField,
    Exists,
    HasTag,
    IsOneOf,
    JobColumn,
    LabelField,
    Literal,
    MetricField,
    Negated,
    Of,
    Order,
    SearchField,
    SearchNode,
)

MAX_CHARS = 4000
MAX_DEPTH = 32
"""Maximum nesting depth of parentheses and `not`."""
MAX_CONDITIONS = 32
MAX_LITERALS = 100
"""Maximum number of literals in the parentheses of one `in`."""
MAX_METRIC = 512
POINTER = "/where"


def parse_search(text: str) -> SearchNode:
    """Parse an expression into a tree. Raises InvalidSearch with the column of the error, starting
    at 1."""
    if len(text) > MAX_CHARS:
        raise InvalidSearch(
            f"the expression has {len(text):,} characters, but at most {MAX_CHARS:,} are allowed",
            pointer=POINTER,
        )
    return _Parser(_tokens(text)).whole()


def parse_field(text: str) -> SearchField:
    """Parse one field. Raises InvalidSearch like `parse_search`."""
    return _Parser(_tokens(text)).lone_field()


def is_known_name(name: str) -> bool:
    """Whether a field that consists only of this name can occur in an expression."""
    return name in COLUMNS or name in (EXPERIMENT, "labels", "metrics") or name in _DOCUMENT


class _Kind(StrEnum):
    NUMBER = "number"
    TEXT = "text"
    NAME = "name"
    SIGN = "sign"
    END = "end"


@dataclass(frozen=True)
class _Token:
    kind: _Kind
    text: str
    at: int
    """The column of the first character, starting at 1."""

    @property
    def word(self) -> str:
        """The word in lower case; empty if the token is not a word."""
        return self.text.lower() if self.kind is _Kind.NAME else ""

    @property
    def shown(self) -> str:
        if self.kind is _Kind.END:
            return "the end"
        return f"{self.text[:40]}..." if len(self.text) > 40 else self.text


_SPACE = re.compile(r"[ \t\r\n]+")
_TOKEN = re.compile(
    r"""(?P<number>[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?(?![A-Za-z0-9_.]))
      | (?P<text>"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')
      | (?P<name>[A-Za-z_][A-Za-z0-9_./-]*)
      | (?P<sign><=|>=|!=|==|[<>=(),\[\]])""",
    re.VERBOSE | re.DOTALL,
)


def _tokens(text: str) -> list[_Token]:
    found = []
    at = 0
    while at < len(text):
        if space := _SPACE.match(text, at):
            at = space.end()
            continue
        match = _TOKEN.match(text, at)
        if match is None:
            _refuse(at + 1, _why_no_token(text, at))
        assert match.lastgroup is not None
        found.append(_Token(_Kind(match.lastgroup), match[0], at + 1))
        at = match.end()
    return [*found, _Token(_Kind.END, "", len(text) + 1)]


def _why_no_token(text: str, at: int) -> str:
    if text[at] in "\"'":
        return f"the string that begins here has no closing {text[at]}"
    if text[at].isdigit() or text[at] in "+-.":
        return "expected a number, such as 0.1 or 1e-3"
    return f"{text[at]!a} is not valid here"


def _refuse(at: int, message: str, hint: str | None = None) -> NoReturn:
    raise InvalidSearch(f"column {at}: {message}", pointer=POINTER, hint=hint)


class _Parser:
    """A recursive-descent parser of bounded depth."""

    def __init__(self, tokens: Sequence[_Token]) -> None:
        self._tokens = tokens
        self._next = 0
        self._depth = 0
        self._num_conditions = 0

    def whole(self) -> SearchNode:
        node = self._any_of()
        if self._token.kind is not _Kind.END:
            self._expected('"and", "or" or the end')
        return node

    def lone_field(self) -> SearchField:
        field = self._field()
        if self._token.kind is not _Kind.END:
            self._expected("the end")
        return field

    @property
    def _token(self) -> _Token:
        return self._tokens[self._next]

    def _take(self) -> _Token:
        token = self._token
        self._next += 1
        return token

    def _takes(self, *signs: str) -> _Token | None:
        """Consume and return the next token if it is one of `signs` (symbols or words)."""
        token = self._token
        is_one = token.word in signs or (token.kind is _Kind.SIGN and token.text in signs)
        return self._take() if is_one else None

    def _need(self, sign: str) -> _Token:
        return self._takes(sign) or self._expected(f'"{sign}"')

    def _expected(self, what: str, hint: str | None = None) -> NoReturn:
        _refuse(self._token.at, f"expected {what}, found {self._token.shown}", hint)

    def _any_of(self) -> SearchNode:
        items = [self._all_of()]
        while self._takes("or"):
            items.append(self._all_of())
        return items[0] if len(items) == 1 else AnyOf(items)

    def _all_of(self) -> SearchNode:
        items = [self._negation()]
        while self._takes("and"):
            items.append(self._negation())
        return items[0] if len(items) == 1 else AllOf(items)

    def _negation(self) -> SearchNode:
        if opening := self._takes("not"):
            return Negated(self._deeper(opening, self._negation))
        if opening := self._takes("("):
            node = self._deeper(opening, self._any_of)
            self._need(")")
            return node
        return self._condition()

    def _deeper(self, opening: _Token, parse: Callable[[], SearchNode]) -> SearchNode:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            _refuse(opening.at, f'more than {MAX_DEPTH} "(" and "not" are nested')
        node = parse()
        self._depth -= 1
        return node

    def _condition(self) -> SearchNode:
        token = self._token
        self._num_conditions += 1
        if self._num_conditions > MAX_CONDITIONS:
            _refuse(token.at, f"the expression has more than {MAX_CONDITIONS} conditions")
        if token.kind is _Kind.TEXT:
            return self._has_tag(_unquoted(self._take()))
        if self._takes("exists"):
            self._need("(")
            field = self._field()
            self._need(")")
            return Exists(field)
        field = self._field()
        if self._takes("not"):
            self._need("in")
            return AllOf([Exists(field), Negated(self._one_of(field))])
        if self._takes("in"):
            return self._one_of(field)
        sign = self._takes("=", "==", "!=", *Order)
        if sign is None:
            self._expected('a comparison (= != < <= > >=) or "in"')
        if sign.text in ("=", "==", "!="):
            equal = IsOneOf(field, [self._literal(field)])
            return AllOf([Exists(field), Negated(equal)]) if sign.text == "!=" else equal
        return Compared(field, Order(sign.text), self._bound(field, sign))

    def _has_tag(self, tag: str) -> SearchNode:
        is_negated = self._takes("not")
        if not self._takes("in"):
            self._expected(
                '"in tags"',
                'a string must follow a comparison operator or be followed by "in tags"',
            )
        self._need("tags")
        return Negated(HasTag(tag)) if is_negated else HasTag(tag)

    def _one_of(self, field: SearchField) -> IsOneOf:
        self._need("(")
        literals = [self._literal(field)]
        while comma := self._takes(","):
            if len(literals) == MAX_LITERALS:
                _refuse(comma.at, f"the list has more than {MAX_LITERALS} values")
            literals.append(self._literal(field))
        self._need(")")
        return IsOneOf(field, literals)

    def _literal(self, field: SearchField) -> Literal:
        """Parse a literal for a comparison with the field using `=`, `!=` or `in`."""
        token = self._token
        match field:
            case JobColumn(name):
                return self._of_column(COLUMNS[name], name)
            case LabelField():
                return self._text("a quoted string: labels are strings")
            case MetricField():
                return self._number("a number: metrics are numbers")
            case DocumentField():
                if token.word in ("true", "false"):
                    return self._take().word == "true"
                if token.kind is _Kind.NUMBER:
                    return self._number("a number")
                return self._text("a number, a quoted string, true or false")

    def _bound(self, field: SearchField, sign: _Token) -> float | datetime:
        """Parse a literal with which the field can be compared using `<`, `<=`, `>` or `>=`."""
        is_time = isinstance(field, JobColumn) and COLUMNS[field.name] is ColumnKind.TIME
        if is_time:
            return self._time()
        has_no_order = isinstance(field, LabelField) or (
            isinstance(field, JobColumn) and COLUMNS[field.name] is not ColumnKind.NUMBER
        )
        if has_no_order or self._token.kind is _Kind.TEXT:
            at = sign.at if has_no_order else self._token.at
            _refuse(at, f'strings can be compared with =, != and "in", not with {sign.text}')
        return self._number("a number")

    def _of_column(self, kind: ColumnKind, name: str) -> Literal:
        match kind:
            case ColumnKind.NUMBER:
                return self._number(f"a number: {name} is a number")
            case ColumnKind.TIME:
                return self._time()
            case ColumnKind.STATE:
                at = self._token.at
                state = self._text('a quoted state, such as "RUNNING"').upper()
                if state not in JobState.__members__:
                    _refuse(at, f"there is no such state; the states are {', '.join(JobState)}")
                return state
            case ColumnKind.TEXT:
                return self._text("a quoted string")

    def _text(self, expected: str) -> str:
        if self._token.kind is not _Kind.TEXT:
            word = self._token.text
            is_word = self._token.kind is _Kind.NAME and len(word) <= 40
            self._expected(expected, f'write "{word}" for a string' if is_word else None)
        return _unquoted(self._take())

    def _number(self, expected: str) -> float:
        if self._token.kind is not _Kind.NUMBER:
            self._expected(expected)
        token = self._take()
        number = float(token.text)
        if number in (float("inf"), float("-inf")):
            _refuse(token.at, "the number is too large: the maximum is 1.8e308")
        return number

    def _time(self) -> datetime:
        at = self._token.at
        text = self._text("a quoted time, such as '2026-01-31T12:00:00Z'")
        try:
            time = datetime.fromisoformat(text)
            return (time if time.tzinfo else time.replace(tzinfo=UTC)).astimezone(UTC)
        except (ValueError, OverflowError):
            _refuse(at, "this is not a time: write 2026-01-31 or 2026-01-31T12:00:00Z")

    def _field(self) -> SearchField:
        token = self._token
        if token.kind is not _Kind.NAME or token.word in ("and", "or", "in", "true", "false"):
            self._expected("a field, such as state, val/loss or train.optimizer.lr")
        self._take()
        if token.word in Of.__members__.values() and self._takes("("):
            inner_at = self._token.at
            inner = self._field()
            if not isinstance(inner, MetricField):
                _refuse(inner_at, f"{token.text} can only be used with metrics")
            self._need(")")
            return MetricField(inner.key, Of(token.word))
        return _field_of(token, self._parts())

    def _parts(self) -> list[str | int]:
        """Parse the bracketed parts of a field: indices of lists and names of entries."""
        parts: list[str | int] = []
        while self._takes("["):
            token = self._token
            if token.kind is _Kind.TEXT:
                parts.append(_unquoted(self._take()))
            elif token.kind is _Kind.NUMBER and token.text.isdigit() and len(token.text) < 10:
                parts.append(int(self._take().text))
            else:
                self._expected('a nonnegative integer, or a quoted name such as ["my key"]')
            self._need("]")
        return parts


def _unquoted(token: _Token) -> str:
    text = re.sub(r"\\(.)", r"\1", token.text[1:-1], flags=re.DOTALL)
    if "\0" in text or any("\ud800" <= character <= "\udfff" for character in text):
        _refuse(token.at, "the string contains an invalid character: NUL or a lone surrogate")
    return text


def _field_of(token: _Token, parts: Sequence[str | int]) -> SearchField:
    name = token.text
    head, _, rest = name.partition(".")
    if head in ("labels", "metrics"):
        return _named(token, head, [*([rest] if rest else []), *parts])
    if not parts and "/" in name:
        return MetricField(_bounded(token, name, MAX_METRIC))
    if not parts and name in COLUMNS:
        return JobColumn(name)
    if not parts and name == EXPERIMENT:
        return LabelField(EXPERIMENT)
    if head not in _DOCUMENT or "/" in name:
        known = (*COLUMNS, EXPERIMENT, "tags", "labels", "metrics", *_DOCUMENT)
        close = get_close_matches(head, known, n=1)
        guess = f"; did you mean {close[0]}?" if close else ""
        hint = f'a metric without "/" must be written as metrics.{name[:40]}'
        _refuse(token.at, f"there is no field {token.shown}{guess}", hint)
    names = [*name.split("."), *parts]
    if "" in names:
        _refuse(token.at, f"{token.shown} has an empty part")
    pointer = "".join(f"/{escaped(str(part))}" for part in names)
    return DocumentField(_bounded(token, pointer, MAX_POINTER))


def _named(token: _Token, head: str, names: Sequence[str | int]) -> SearchField:
    """Return the label or metric with this name."""
    if len(names) != 1 or not isinstance(names[0], str) or not names[0]:
        example = 'labels.team, or labels["my/team"]' if head == "labels" else 'metrics["loss"]'
        _refuse(token.at, f"expected a name after {head}: {example}")
    if head == "labels":
        return LabelField(names[0])
    return MetricField(_bounded(token, names[0], MAX_METRIC))


def _bounded(token: _Token, name: str, most: int) -> str:
    if len(name) > most:
        _refuse(token.at, f"the name has more than {most} characters")
    return name


_DOCUMENT: Any = (
    *(name for name in JobSpec.model_fields if name not in NOT_SEARCHED),
    PARAMETERS,
)
"""Top-level fields of documents, and the named arguments of scripts."""
