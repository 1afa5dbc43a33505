"""What the kinds of drawn files share: a case, its outcome, and the search for a smaller one."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Protocol, Self, TypeVar

from ray_workers.shared.node_needs import DataPolicy
from ray_workers.training.core.errors import DataError

MOST_TRIED = 400
"""Smaller cases that are tried."""
ENOUGH = 40
"""Characters of a fault that tell which it is."""
LEAKED = ("can't be read (", "list index", "KeyError", "AssertionError", "NotImplementedError")
"""Words of a refusal that no rule made: an error of a library, or of ours."""


T = TypeVar("T")


class Case(Protocol):
    def fault(self, folder: Path, policy: DataPolicy) -> str | None:
        """Write the files into the folder and read them: how that differs from what they hold."""

    def smaller(self) -> Iterator[Self]:
        """Cases with something less."""


class Refusal(Exception):
    """The files are refused with a sentence that names all of some texts."""

    def __init__(self, *named: str) -> None:
        super().__init__(*named)
        self.named = named

    def is_met(self, sentence: str) -> bool:
        return all(name in sentence for name in self.named)


def outcome(read: Callable[[], T], expected: Sequence[Refusal]) -> tuple[T | None, str | None]:
    """(what was read, the fault): neither where the files are refused as they are to be."""
    try:
        found = read()
    except DataError as error:
        return None, _fault_of_refusal(error, expected)
    if expected:
        return None, f"read, and to be refused: {[one.named for one in expected]}"
    return found, None


def _fault_of_refusal(error: DataError, expected: Sequence[Refusal]) -> str | None:
    """How a refusal differs from the expected ones, of which one is met."""
    sentence = str(error)
    if any(word in sentence for word in LEAKED):
        return f"a refusal that no rule made: {sentence}"
    if not expected:
        return f"refused: {sentence}"
    if not any(one.is_met(sentence) for one in expected):
        return f"refused for another reason than {[one.named for one in expected]}: {sentence}"
    return None


def fault_in(case: Case) -> str | None:
    with tempfile.TemporaryDirectory() as name:
        policy = DataPolicy.open(str(Path(name, "cache")))
        folder = Path(name, "data")
        folder.mkdir()
        try:
            return case.fault(folder, policy)
        except Exception as error:
            return f"{type(error).__name__}: {error}"


def smallest(case: Case) -> Case:
    """A case from which nothing can be left out without the fault."""
    start = (fault_in(case) or "")[:ENOUGH]
    tried = 0
    while True:
        for less in case.smaller():
            tried += 1
            if tried > MOST_TRIED:
                return case
            if (fault_in(less) or "").startswith(start):
                case = less
                break
        else:
            return case


def without(some: Sequence[T], at: int) -> tuple[T, ...]:
    return (*some[:at], *some[at + 1 :])
