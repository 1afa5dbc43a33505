"""Assigns shares of global batches to ranks of different speeds: an idle rank gets the next share.
The shares of all steps are numbered consecutively. A rank draws the next number from a counter in
the store of its group. Therefore every share is computed exactly once, and slow ranks compute fewer
shares. All ranks complete all steps: a rank has completed a step when it draws a share of a later
step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from ray_workers.training.core.compat_torch import Store
from ray_workers.training.data.prefetcher import Share

_DRAWN: Final = "shares-drawn"
_LEAVES_AFTER: Final = "leaves-after"
_LEAVING: Final = 1 << 48
"""Number that is added to the counter when the ranks must leave, so that every rank notices the
request at its next draw."""


class DynamicShares:
    """The shares that a rank draws in a group."""

    def __init__(self, store: Store, rank: int, num_ranks: int, last_step: int) -> None:
        """last_step: last completed step when the group was formed."""
        self._store = store
        self._num_ranks = num_ranks
        self._first = last_step * num_ranks
        """Number of the group's first share, starting from 0."""
        self._next = self._first + rank
        """The share that this rank drew last and has not computed yet. The first share of each
        rank is determined by its number."""
        self.leaves_after: int | None = None
        """The step after which all ranks leave, if a rank was asked to leave."""

    def of_step(self, step: int, shares: Sequence[Share]) -> Iterator[Sequence[Share]]:
        """Yield the shares that this rank draws, one at a time, until no shares of the step are
        left."""
        start = (step - 1) * self._num_ranks
        while self._next < start + self._num_ranks:
            number = self._next - start
            yield [shares[number]]
            self._next = self._draw()

    def _draw(self) -> int:
        drawn = self._store.add(_DRAWN, 1) - 1
        if drawn >= _LEAVING:
            drawn -= _LEAVING
            if self.leaves_after is None:
                self.leaves_after = int(self._store.get(_LEAVES_AFTER))
        return self._first + self._num_ranks + drawn

    def leave(self) -> None:
        """Make all ranks leave after the step whose shares are being drawn. Every rank draws a
        share before it passes this step, and therefore notices the request."""
        if self.leaves_after is None:
            drawn = self._store.add(_DRAWN, _LEAVING) - _LEAVING
            last = self._first + self._num_ranks + drawn - 1
            self.leaves_after = last // self._num_ranks + 1
            self._store.set(_LEAVES_AFTER, str(self.leaves_after))
