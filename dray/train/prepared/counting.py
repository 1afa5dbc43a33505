"""Counts the samples behind the gradients that a rank brings to an exchange."""

from __future__ import annotations


class SampleCount:
    """The samples of the batch at hand, and of those whose gradients are to be exchanged."""

    def __init__(self) -> None:
        self._at_hand = (0, 0)
        """Samples of the batch at hand: of this rank, of all."""
        self._counted = self._num_global = 0
        """Samples of the batches whose gradients the next exchange takes, likewise."""
        self._is_counted = False
        """Whether the batch at hand is one of these: it had a backward pass."""
        self.has_exchanged = True
        """Whether no backward pass came after the last exchange."""

    @property
    def num_global(self) -> int:
        return self._num_global

    def begin(self, counted: int, num_global: int) -> None:
        """A batch begins, with this many samples of this rank and of all ranks."""
        self._at_hand, self._is_counted = (counted, num_global), False

    def passed(self) -> None:
        """A backward pass has ended: the batch at hand counts in the next exchange, alone or with
        those before it whose gradients were added up."""
        counted, num_global = self._at_hand
        if self.has_exchanged:
            self._counted, self._num_global = counted, num_global
        elif not self._is_counted:
            self._counted += counted
            self._num_global += num_global
        self._is_counted, self.has_exchanged = True, False

    def weight(self, world_size: int) -> float:
        """This rank's part of the samples; an equal one where there is no loader."""
        return self._counted / self._num_global if self._num_global else 1.0 / world_size
