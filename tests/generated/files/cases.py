"""Code shared by all kinds of generated files: a case, its outcome, and its reduction."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Protocol, Self, TypeVar

from ray_workers.shared.node_needs import DataPolicy
from ray_workers.training.core.errors import DataError

MOST_TRIED = 400
"""Number of smaller cases to try."""
ENOUGH = 40
"""Number of characters of a fault that identify it."""
LEAKED = ("can't be read (", "list index", "KeyError", "AssertionError", "NotImplementedError")
"""Words of a refusal that no rule produced: an error of a library, or of dray."""


T = TypeVar("T")


class Case(Protocol):
    def fault(self, folder: Path, policy: DataPolicy) -> str | None:
        """Write the files into the folder and read them; return how they differ from the truth."""

    def smaller(self) -> Iterator[Self]:
        """Yield cases with something removed."""


class Refusal(Exception):
    """The expected refusal, a sentence that contains all of these strings."""

    def __init__(self, *named: str) -> None:
        super().__init__(*named)
        self.named = named

    def is_met(self, sentence: str) -> bool:
        return all(name in sentence for name in self.named)


def outcome(read: Callable[[], T], expected: Sequence[Refusal]) -> tuple[T | None, str | None]:
    """Return (what was read, the fault); both None if the files are refused as expected."""
    try:
        found = read()
    except DataError as error:
        return None, _fault_of_refusal(error, expected)
    if expected:
        return None, f"read, and to be refused: {[one.named for one in expected]}"
    return found, None


def _fault_of_refusal(error: DataError, expected: Sequence[Refusal]) -> str | None:
    """Return how a refusal differs from the expected ones, one of which must match."""
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
    """Return a case from which nothing can be removed without losing the fault."""
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
