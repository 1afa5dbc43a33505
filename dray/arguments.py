"""Parse the command line arguments of a training program as argparse, Hydra and click would.

The program's own declarations of its options are not available, so these functions assume that a
value after an option belongs to the option, and that an option without a value is a flag.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

Value: TypeAlias = "bool | int | float | str"

MAX_PARAMETERS = 256
MAX_DIGITS = 17
"""Maximum number of digits of a number. A float has up to 17 significant digits."""
MAX_CHARS = 255
"""Maximum length of names and string values. Longer strings are truncated."""

_OPTION = re.compile(r"((?:-[A-Za-z]|--\w)[^\s=]*)(?:=(.*))?", re.DOTALL)
"""An option. After a single dash, a digit begins a negative number."""
_OVERRIDE = re.compile(r"(\+{0,2}[A-Za-z_][\w./@-]*)=(.*)", re.DOTALL)
"""An override in the syntax of Hydra and OmegaConf, such as `optimizer.lr=0.1`."""
_WHOLE = re.compile(r"[-+]?(?:0|[1-9][0-9]{0,14})")
_NUMBER = re.compile(r"[-+]?(?P<digits>(?:0|[1-9][0-9]*)\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?")
_ENDS_OPTIONS = "--"


@dataclass(frozen=True)
class Argument:
    """An option and its values, or a positional word."""

    name: str | None
    """Name as written: `--lr`, or `optimizer.lr` in an override. None for a positional word."""
    values: tuple[str, ...]
    words: tuple[str, ...]
    """All words of the argument, as on the command line."""


def parse(args: Sequence[str]) -> list[Argument]:
    """Split a command line into arguments, in their order."""
    return list(_parse(args))


def _parse(args: Sequence[str]) -> Iterator[Argument]:
    position = 0
    while position < len(args):
        word = args[position]
        position += 1
        if word == _ENDS_OPTIONS:
            yield Argument(None, (), (word,))
            yield from (Argument(None, (each,), (each,)) for each in args[position:])
            return
        if option := _OPTION.fullmatch(word):
            name, value = option.groups()
            first = position
            while value is None and position < len(args) and _is_value(args[position]):
                position += 1
            values = tuple(args[first:position]) if value is None else (value,)
            yield Argument(name, values, (word, *args[first:position]))
        elif override := _OVERRIDE.fullmatch(word):
            yield Argument(override[1], (override[2],), (word,))
        else:
            yield Argument(None, (word,), (word,))


def _is_value(word: str) -> bool:
    """Whether a word that follows an option is the option's value. Negative numbers count as
    values."""
    return word != _ENDS_OPTIONS and not (_OPTION.fullmatch(word) or _OVERRIDE.fullmatch(word))


def parameters(args: Sequence[str], *, as_written: bool = False) -> dict[str, Value]:
    """Return the values of the named arguments: for `--lr 0.1 --no-amp --sizes 64 32`, return
    `{"lr": 0.1, "no_amp": True, "sizes": "64 32"}`.

    If a name occurs several times, the last value is used, as in argparse. Returns at most
    MAX_PARAMETERS entries. as_written: whether numbers that are written in an unusual form, such as
    `1.10`, are returned as strings.
    """
    found: dict[str, Value] = {}
    for argument in parse(args):
        if argument.name is None:
            continue
        name = argument.name.lstrip("-+")
        if argument.name.startswith("-"):
            name = name.replace("-", "_")
        if name in found or len(found) < MAX_PARAMETERS:
            found[name[:MAX_CHARS]] = _value(argument.values, as_written)
    return found


def _value(words: Sequence[str], as_written: bool) -> Value:
    if not words:
        return True
    text = " ".join(words)
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    number = _number(text)
    if number is None or (as_written and str(number) != text):
        return text[:MAX_CHARS]
    return number


def _number(text: str) -> int | float | None:
    """Return the number, or None if the text is not a number. Also returns None for a string that
    is probably a name, such as `007` or the hash `12e4567`, because converting the string to a
    number would lose some of its digits."""
    if _WHOLE.fullmatch(text):
        return int(text)
    match = _NUMBER.fullmatch(text)
    if match is None:
        return None
    digits, number = match["digits"].replace(".", "").strip("0"), float(text)
    is_name = text.lstrip("+-").isdigit() or len(digits) > MAX_DIGITS
    is_out_of_range = math.isinf(number) or (number == 0 and digits != "")
    return None if is_name or is_out_of_range else number


class AmbiguousArguments(ValueError):
    """A word could be either the value of an option or a positional argument."""


def replaced(args: Sequence[str], changes: Sequence[str]) -> list[str]:
    """Return `args` with the options of `changes`, which replace options of the same name. New
    options are appended. If `changes` has positional words, they replace all positional words of
    `args`.

    An option keeps its form (`--lr=0.1` or `--lr 0.1`) if the program might otherwise mistake
    positional words for values of the option. Raises AmbiguousArguments if a word that might be
    positional would be lost or would become the value of an option.
    """
    given, tail = _split(args)
    new, new_tail = _split(changes)
    by_name = {each.name: each for each in new if each.name is not None}
    words = [word for each in new if each.name is None for word in each.words]
    replaces_words = bool(words or new_tail)
    if replaces_words:
        _refuse_hidden_words(given, by_name)
        given = [each for each in given if each.name is not None]
        tail = new_tail
    kept: list[str] = []
    counts: dict[str, int] = {}
    """Name of a replaced option -> number of its values that can't be positional words."""
    for index, old in enumerate(given):
        if old.name not in by_name or old.name is None:
            kept += old.words
            continue
        change = by_name[old.name]
        if not replaces_words:
            _refuse_loss(old, counts.get(old.name, len(change.values)))
        if old.name not in counts:
            counts[old.name] = min(len(old.words) - 1, len(change.values))
            follower = given[index + 1] if index + 1 < len(given) else None
            kept += _in_form_of(old, change, follower)
    added = [word for name, each in by_name.items() if name not in counts for word in each.words]
    return [*words, *kept, *added, *tail]


def _split(args: Sequence[str]) -> tuple[list[Argument], list[str]]:
    """Return the arguments before `--`, and the words from `--` onwards."""
    end = args.index(_ENDS_OPTIONS) if _ENDS_OPTIONS in args else len(args)
    return parse(args[:end]), list(args[end:])


def _refuse_loss(old: Argument, count: int) -> None:
    """Raise AmbiguousArguments if words that might be positional would be lost. count: number of
    words after the option that are certainly its values."""
    if len(old.words) - 1 > count:
        raise AmbiguousArguments(
            f"{shlex.join(old.words)!r} would be replaced, but {old.words[-1]!r} might be a "
            f"positional argument instead of a value of {old.name}: repeat the program's "
            "positional arguments before the options"
        )


def _refuse_hidden_words(args: Sequence[Argument], by_name: Mapping[str, Argument]) -> None:
    """Reject new positional arguments if the old job's positional arguments can't be distinguished
    from option values."""
    if any(old.name is None for old in args):
        return
    stay: list[Argument] = []
    for old in args:
        change = by_name.get(old.name or "")
        if change is not None and len(old.words) - 1 > len(change.values):
            return  # its words include the replaced words
        if change is None and len(old.words) > 1:
            stay.append(old)
    if stay:
        old = stay[-1]
        raise AmbiguousArguments(
            f"the last word of {shlex.join(old.words)!r} might be a value of {old.name}, or a "
            f"positional argument that the new ones replace: specify {old.name} as well"
        )


def _in_form_of(old: Argument, change: Argument, follower: Argument | None) -> tuple[str, ...]:
    """Return the words of the changed argument in the same form as the old argument, such as
    `--lr=0.1`. follower: the argument after the old argument."""
    if len(old.words) > 1 or not old.values or "=" in change.words[0]:
        return change.words
    if len(change.values) == 1:
        return (f"{change.name}={change.values[0]}",)
    if follower is not None and follower.name is None:
        raise AmbiguousArguments(
            f"{shlex.join(change.words)!r} would be followed by {follower.words[0]!r}, which the "
            f"program might interpret as a value of {change.name}: repeat the program's "
            "positional arguments before the options"
        )
    return change.words


def with_parameters(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a job document for comparisons. The script's named arguments are moved to
    `parameters`, and only positional words remain in `script.args`."""
    script = document.get("script")
    if not isinstance(script, Mapping):
        return dict(document)
    positional = [each for each in parse(script.get("args") or ()) if each.name is None]
    program = {**script, "args": [word for each in positional for word in each.values]}
    given = program.pop("parameters", None) or {}
    named = {**parameters(script.get("args") or (), as_written=True), **given}
    return {**document, "script": program, "parameters": named}


def parameters_of(document: Mapping[str, Any]) -> dict[str, Value]:
    """Return the parameters of a job document's script: its named arguments and its
    `parameters`."""
    script = document.get("script")
    if not isinstance(script, Mapping):
        return {}
    return {**parameters(script.get("args") or ()), **(script.get("parameters") or {})}
