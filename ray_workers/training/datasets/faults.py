"""The sentences in which a data set is refused."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from ray_workers.training.errors import DataError

MAX_SHOWN = 12


def broken(place: str, fault: str) -> DataError:
    """`place` is a source, or a source and the line or sample within it."""
    return DataError(f"{place}: {fault}")


def listed(names: Iterable[str]) -> str:
    """The names, as many as a person reads."""
    every = list(names)
    shown = ", ".join(shortened(name) for name in every[:MAX_SHOWN])
    return shown if len(every) <= MAX_SHOWN else f"{shown} and {len(every) - MAX_SHOWN:,} more"


def shortened(value: object, limit: int = 60) -> str:
    """A value of the data as it may stand in a sentence: in quotes, on one line, not too long."""
    text = repr(str(value)[: limit + 1])
    return text if len(str(value)) <= limit else f"{text[:limit]}…'"


def no_such_name(what: str, wanted: str, names: Iterable[str]) -> str:
    """That there is no `what` of that name, which there are, and which was probably meant."""
    every = list(names)
    folded = {name.casefold(): name for name in every}
    close = difflib.get_close_matches(wanted.casefold(), folded, n=1)
    meant = f"; did you mean {shortened(folded[close[0]])}?" if close else ""
    return f"there is no {what} {shortened(wanted)}, only {listed(every)}{meant}"


class Budget:
    """Bytes that preparing one data set may write, so that no archive can fill a node's disk."""

    def __init__(self, place: str, limit_bytes: int) -> None:
        self._place = place
        self._limit_bytes = limit_bytes
        self._left_bytes = limit_bytes

    def spend(self, size_bytes: int) -> None:
        """Raises DataError when more is spent than there is."""
        self._left_bytes -= size_bytes
        if self._left_bytes < 0:
            raise broken(
                self._place,
                f"unpacked, it needs more than the {self._limit_bytes:,} bytes that a node's "
                "cache may take (DRAY_DATA_CACHE_LIMIT_BYTES)",
            )
