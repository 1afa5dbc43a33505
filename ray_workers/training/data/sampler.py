"""The samples of a rank at a step, as pure functions of the seed, step, rank, and world size.

An epoch visits every sample once, in an order derived from (seed, epoch). The order is divided into
steps; the last step of an epoch can be shorter. A global batch consists of the samples of one step,
or of several consecutive steps if the document specifies a range of batch sizes. Each global batch
is divided into contiguous shares: one share for each rank or, in an exact group, a number of shares
that does not depend on the world size. Therefore the world size determines which rank computes a
sample, but not which samples are computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dray.train.seeding import derive_seed as derive_seed


def steps_per_epoch(num_samples: int, samples_per_step: int) -> int:
    return -(-num_samples // samples_per_step)


def samples_of(first: int, last: int, num_samples: int, samples_per_step: int) -> int:
    """Return the number of samples in a batch of these steps. All steps must belong to one epoch.
    The last step of an epoch can have fewer samples."""
    start = (first - 1) % steps_per_epoch(num_samples, samples_per_step) * samples_per_step
    return min((last - first + 1) * samples_per_step, num_samples - start)


def position_after(step: int, steps_per_epoch: int, samples_per_step: int) -> dict[str, int]:
    """Return the position from which to continue reading the data after a step: `samples` is the
    number of samples of the epoch's order that have been used, regardless of the world size."""
    epoch, step_in_epoch = divmod(step, steps_per_epoch)
    samples = step_in_epoch * samples_per_step
    return {"epoch": epoch, "step_in_epoch": step_in_epoch, "samples": samples}


def epoch_order(num_samples: int, seed: int, epoch: int) -> Tensor:
    """Return a permutation of [0, num_samples): int64 of shape (num_samples,). Epochs count from
    0."""
    generator = torch.Generator().manual_seed(derive_seed("order", seed, epoch))
    return torch.randperm(num_samples, generator=generator)


def share(num_items: int, rank: int, world_size: int) -> tuple[int, int]:
    """Return the range [start, stop) of a rank's contiguous share. The sizes of the shares differ
    by at most one item."""
    return num_items * rank // world_size, num_items * (rank + 1) // world_size


def share_by(parts: Sequence[float], num_items: int, number: int) -> tuple[int, int]:
    """Return the range [start, stop) of a contiguous share whose size is proportional to its entry
    in `parts`; the sum of `parts` is 1. Each share has at least one item if there are enough
    items."""
    least = min(num_items // len(parts), 1)
    free = num_items - least * len(parts)
    start, stop = (round(free * sum(parts[:end])) + least * end for end in (number, number + 1))
    return start, stop


@dataclass(frozen=True)
class Batch:
    """One share of one global batch."""

    number: int
    """Index of the share; equal to the rank unless the group is exact."""
    indices: Tensor
    """Indices of the samples to process: int64, never empty. If there are more shares than samples,
    a share repeats a sample of its neighbour, because collective operations wait for every rank."""
    num_global: int
    """Number of samples in the global batch."""
    is_empty: bool
    """Whether the samples belong to a neighbour's share, and have no weight in this share."""
    num_terms: int | None = None
    """Number of terms in the loss of the global batch; None for one per sample."""

    @property
    def weight(self) -> float:
        """The weight of each term of the loss in the mean over the global batch."""
        return 0.0 if self.is_empty else 1 / (self.num_terms or self.num_global)


class DistributedBatchSampler:
    """A rank's shares of the global batches of a data set, by step number (the first step is 1).
    The rank has the shares with the indices `shares`, out of `num_shares`."""

    def __init__(
        self,
        num_samples: int,
        *,
        samples_per_step: int,
        seed: int,
        shares: Sequence[int],
        num_shares: int,
        num_terms: Tensor | None = None,
    ) -> None:
        """num_terms: number of terms in the loss of each sample, int64 (num_samples,); None if each
        sample has one term."""
        self._num_samples = num_samples
        self._samples_per_step = samples_per_step
        self._seed = seed
        self._shares = shares
        self.num_shares = num_shares
        self._num_terms = num_terms
        self.parts: Sequence[float] | None = None
        """Fraction of the global batch for each share; the fractions sum to 1. None for equal
        shares."""
        self._epoch = -1
        self._order = torch.empty(0, dtype=torch.int64)

    @property
    def steps_per_epoch(self) -> int:
        return steps_per_epoch(self._num_samples, self._samples_per_step)

    def at(self, first: int, last: int) -> list[Batch]:
        """Return, in order, the rank's shares of the batch that consists of these steps. All steps
        must belong to one epoch."""
        epoch, number = divmod(first - 1, self.steps_per_epoch)
        if epoch != self._epoch:
            self._order = epoch_order(self._num_samples, self._seed, epoch)
            self._epoch = epoch
        start = number * self._samples_per_step
        order = self._order[start : start + (last - first + 1) * self._samples_per_step]
        return [self._cut(order, number) for number in self._shares]

    def _cut(self, order: Tensor, number: int) -> Batch:
        if self.parts is None:
            start, stop = share(len(order), number, self.num_shares)
        else:
            start, stop = share_by(self.parts, len(order), number)
        is_empty = start == stop
        if is_empty:
            start = min(start, len(order) - 1)
            stop = start + 1
        terms = None if self._num_terms is None else int(self._num_terms[order].sum())
        return Batch(number, order[start:stop], len(order), is_empty, terms)
