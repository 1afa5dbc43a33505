"""Command line arguments of a training program, read as argparse, Hydra and click would.

A program's own parser decides what its arguments mean; these functions know none of its options.
So a value that follows an option belongs to it, and an option without one is a flag.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

Value: TypeAlias = "bool | int | float | str"

MAX_PARAMETERS = 256
MAX_CHARS = 255
"""Of a name, and of a value that is a text; longer texts are cut."""

_OPTION = re.compile(r"(--?[A-Za-z][^\s=]*)(?:=(.*))?", re.DOTALL)
_OVERRIDE = re.compile(r"(\+{0,2}[A-Za-z_][\w./@-]*)=(.*)", re.DOTALL)
"""`optimizer.lr=0.1`, as Hydra and OmegaConf take it."""
_WHOLE = re.compile(r"[-+]?[0-9]{1,15}")
_NUMBER = re.compile(r"[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?")
_ENDS_OPTIONS = "--"


@dataclass(frozen=True)
class Argument:
    """An option with the words that belong to it, or a word that belongs to none."""

    name: str | None
    """As it is written: `--lr`, or `optimizer.lr` of an override; None of a positional word."""
    values: tuple[str, ...]
    words: tuple[str, ...]
    """All of it as it stands on the command line."""


def parse(args: Sequence[str]) -> list[Argument]:
    """The arguments, in their order."""
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
    """Whether a word that follows an option belongs to it. A negative number does."""
    return word != _ENDS_OPTIONS and not (_OPTION.fullmatch(word) or _OVERRIDE.fullmatch(word))


def parameters(args: Sequence[str]) -> dict[str, Value]:
    """The named arguments as values: `--lr 0.1 --no-amp --sizes 64 32` is
    `{"lr": 0.1, "no_amp": True, "sizes": "64 32"}`.

    The last of several with one name counts, as it does in argparse. At most MAX_PARAMETERS.
    """
    found: dict[str, Value] = {}
    for argument in parse(args):
        if argument.name is None:
            continue
        name = argument.name.lstrip("-+")
        if argument.name.startswith("-"):
            name = name.replace("-", "_")
        if name in found or len(found) < MAX_PARAMETERS:
            found[name[:MAX_CHARS]] = _value(argument.values)
    return found


def _value(words: Sequence[str]) -> Value:
    if not words:
        return True
    text = " ".join(words)
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    if _WHOLE.fullmatch(text):
        return int(text)
    if _NUMBER.fullmatch(text):
        return float(text)
    return text[:MAX_CHARS]


def replaced(args: Sequence[str], changes: Sequence[str]) -> list[str]:
    """The arguments with those of `changes` in their places. An option that is not there yet is
    appended; positional words of `changes` replace all those of `args`."""
    new = parse(changes)
    by_name = {each.name: each for each in new if each.name is not None}
    has_words = any(each.name is None for each in new)
    kept: list[str] = []
    placed: set[str | None] = set()
    for old in parse(args):
        if old.name is None:
            kept += () if has_words else old.words
        elif old.name not in by_name:
            kept += old.words
        elif old.name not in placed:
            placed.add(old.name)
            kept += by_name[old.name].words
    words = [word for each in new if each.name is None for word in each.words]
    added = [word for name, each in by_name.items() if name not in placed for word in each.words]
    return [*words, *kept, *added] if has_words else [*kept, *added]


def with_parameters(document: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of a job document for a comparison: what its script is given has names, as
    `parameters`, and `script.args` has the positional words alone."""
    script = document.get("script")
    if not isinstance(script, Mapping):
        return dict(document)
    positional = [each for each in parse(script.get("args") or ()) if each.name is None]
    program = {**script, "args": [word for each in positional for word in each.values]}
    program.pop("parameters", None)
    return {**document, "script": program, "parameters": parameters_of(document)}


def parameters_of(document: Mapping[str, Any]) -> dict[str, Value]:
    """The parameters of a job document's script: those that it names, and its arguments."""
    script = document.get("script")
    if not isinstance(script, Mapping):
        return {}
    return {**parameters(script.get("args") or ()), **(script.get("parameters") or {})}
