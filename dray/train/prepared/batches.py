"""The global batches of each epoch, and each rank's share of them.

The order of the samples in an epoch is derived from the seed and the epoch, and each batch is cut
into contiguous shares, one for each rank. Therefore, the number of ranks determines which rank
computes a sample, but not which samples are computed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from dray.train.seeding import derive_seed, seed_generators


class BatchShare(NamedTuple):
    """A rank's part of a global batch."""

    indices: list[int]
    """Indices into the data set; never empty. If a batch has fewer samples than there are ranks,
    some shares repeat a neighbour's sample, because an exchange needs every rank."""
    num_global: int
    """Number of samples in the global batch."""
    is_empty: bool
    """Whether the sample belongs to a neighbour's share, and therefore does not count."""

    @property
    def num_counted(self) -> int:
        return 0 if self.is_empty else len(self.indices)


class BatchPlan:
    """The batches of a `DataLoader`, whose `batch_size` is the size of the global batch."""

    def __init__(self, loader: DataLoader[Any], seed: int) -> None:
        """Raises ValueError for a loader whose batches can't be numbered, and TypeError for an
        object that is not a DataLoader."""
        if not isinstance(loader, DataLoader):
            raise TypeError(
                "prepare() takes the model, the optimizer and a torch DataLoader, in this order, "
                f"but the third argument is a {type(loader).__name__}"
            )
        dataset = loader.dataset
        if isinstance(dataset, IterableDataset):
            raise ValueError(
                "prepare() needs a data set with a length and indices: the batches of an "
                "IterableDataset can't be read again"
            )
        if loader.batch_sampler is None:
            raise ValueError("prepare() needs a DataLoader with a batch_size or a batch_sampler")
        self._loader = loader
        self._seed = seed
        self._epoch = -1
        self._order: torch.Tensor | None = None
        self._batches: Sequence[Sequence[int]] = ()

    def num_batches(self, epoch: int) -> int:
        self._enter(epoch)
        if self._order is None:
            return len(self._batches)
        size = self._batch_size
        whole, rest = divmod(len(self._order), size)
        return whole + (1 if rest and not self._drops_last else 0)

    def share(self, epoch: int, batch: int, rank: int, world_size: int) -> BatchShare:
        """Return the share of one rank. Batches are numbered from 0."""
        self._enter(epoch)
        if self._order is None:
            whole = list(self._batches[batch])
        else:
            first = batch * self._batch_size
            whole = self._order[first : first + self._batch_size].tolist()
        num = len(whole)
        start, stop = num * rank // world_size, num * (rank + 1) // world_size
        is_empty = start == stop
        if is_empty:
            start = min(start, num - 1)
            stop = start + 1
        return BatchShare(whole[start:stop], num, is_empty)

    @property
    def _batch_size(self) -> int:
        assert isinstance(self._loader.batch_sampler, BatchSampler)
        return self._loader.batch_sampler.batch_size

    @property
    def _drops_last(self) -> bool:
        assert isinstance(self._loader.batch_sampler, BatchSampler)
        return self._loader.batch_sampler.drop_last

    def _enter(self, epoch: int) -> None:
        if epoch == self._epoch:
            return
        seed = derive_seed("order", self._seed, epoch)
        is_shuffled = _whole_order(self._loader)
        if is_shuffled is None:
            self._order, self._batches = None, self._sampled(epoch, seed)
        elif is_shuffled:
            generator = torch.Generator().manual_seed(seed)
            self._order = torch.randperm(_size(self._loader), generator=generator)
        else:
            self._order = torch.arange(_size(self._loader))
        self._epoch = epoch

    def _sampled(self, epoch: int, seed: int) -> list[list[int]]:
        """Return the batches that a user-defined sampler draws. The batches are the same on every
        rank."""
        loader = self._loader
        for sampler in (loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None)):
            set_epoch = getattr(sampler, "set_epoch", None)
            if set_epoch is not None:
                set_epoch(epoch)
            generator = getattr(sampler, "generator", None)
            if isinstance(generator, torch.Generator):
                generator.manual_seed(seed)
        seed_generators(seed)
        assert loader.batch_sampler is not None
        return [list(batch) for batch in loader.batch_sampler]


def _size(loader: DataLoader[Any]) -> int:
    return len(loader.dataset)  # type: ignore[arg-type]


def _whole_order(loader: DataLoader[Any]) -> bool | None:
    """Whether an epoch shuffles the whole data set; None if a custom sampler chooses the
    samples."""
    if type(loader.batch_sampler) is not BatchSampler:
        return None
    sampler = loader.batch_sampler.sampler
    if isinstance(sampler, SequentialSampler):
        return False
    if isinstance(sampler, DistributedSampler):  # dray divides the batches itself
        return sampler.shuffle
    if isinstance(sampler, RandomSampler):
        is_whole = not sampler.replacement and sampler.num_samples == _size(loader)
        return True if is_whole else None
    return None


class SeededDataset(torch.utils.data.Dataset[Any]):
    """A data set that reads the samples of each batch with generators seeded for this batch, even
    in the loader's worker processes."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __getitems__(self, asked: Sequence[tuple[int, int]]) -> list[Any]:
        """asked: (seed, index) of each sample of a batch."""
        seed_generators(asked[0][0])
        indices = [index for _, index in asked]
        read = getattr(self._dataset, "__getitems__", None)
        return list(read(indices)) if read else [self._dataset[index] for index in indices]


class RemainingShares:
    """A rank's shares of the remaining batches of an epoch, in the form that `SeededDataset`
    reads."""

    def __init__(
        self, plan: BatchPlan, seed: int, epoch: int, first: int, rank: int, world_size: int
    ) -> None:
        self._plan = plan
        self._seed = seed
        self._epoch = epoch
        self._first = first
        self._place = (rank, world_size)

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        for batch in range(self._first, self._plan.num_batches(self._epoch)):
            seed = derive_seed("samples", self._seed, self._epoch, batch, *self._place)
            share = self._plan.share(self._epoch, batch, *self._place)
            yield [(seed, index) for index in share.indices]

    def __len__(self) -> int:
        return self._plan.num_batches(self._epoch) - self._first
