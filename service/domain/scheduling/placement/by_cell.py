"""Numbers of workers by cell. A cell contains the nodes that are in the same reservations, and the
bits of an integer stand for a set of cells (`slots.Fence`)."""

from __future__ import annotations

import functools
import operator


class ByCell:
    """The number of workers that fit in each cell (`Fence`)."""

    def __init__(self) -> None:
        self._numbers: dict[int, int] = {}
        self._cells: dict[int, int] = {}
        """The cells with each number of workers."""

    def add(self, cell: int, number: int) -> None:
        before, bit = self._numbers.get(cell, 0), 1 << cell
        after = self._numbers[cell] = before + number
        self._cells[before] = self._cells.get(before, 0) & ~bit
        self._cells[after] = self._cells.get(after, 0) | bit

    def within(self, cells: int) -> int:
        """Return how many workers fit in a set of cells."""
        return sum([number * (at & cells).bit_count() for number, at in self._cells.items()])

    @property
    def cells(self) -> int:
        """The cells with room for at least one worker."""
        return functools.reduce(operator.or_, (at for n, at in self._cells.items() if n), 0)
