"""Reads the samples of each step in advance, in a thread or in loader processes."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol, overload

import torch
from torch import Tensor

from ray_workers.training.data.device_dataset import InMemorySamples, MemoryMappedSamples
from ray_workers.training.data.loader_process import Loader
from ray_workers.training.data.sampler import Batch, DistributedBatchSampler
from ray_workers.training.devices import sent

PIECES_AHEAD = 2
"""Number of micro-batches that are read ahead for each loader process, unless a step has more."""
MOST_AHEAD = 64
"""Maximum number of micro-batches that wait to be computed, which limits the memory that they
use."""

Piece = tuple[Tensor, Tensor]
"""(inputs, targets) of a micro-batch."""


@dataclass(frozen=True)
class Share:
    """A share of a global batch, ready to be computed."""

    batch: Batch
    micro_batches: list[Piece]
    """The samples, split into pieces no larger than a micro-batch."""

    def counts(self, piece: int) -> bool:
        """Whether a piece counts. Ranks that compute together need the same number of pieces, so a
        rank with fewer samples repeats a sample as a placeholder."""
        return piece < len(self.batch.indices)


@dataclass(frozen=True)
class Feeding:
    """A rank's work in one optimizer step, usually one share."""

    num_global: int
    """Number of samples in the global batch."""
    shares: Sequence[Share]

    @property
    def num_inputs(self) -> int:
        """Number of elements in the inputs of all micro-batches."""
        return sum(inputs.numel() for share in self.shares for inputs, _ in share.micro_batches)


class SharesOnDemand(Sequence[Share]):
    """The shares of a global batch, which are read when they are requested."""

    def __init__(self, batches: Sequence[Batch], read: Callable[[Batch], Share]) -> None:
        self._batches = batches
        self._read = read

    def __len__(self) -> int:
        return len(self._batches)

    @overload
    def __getitem__(self, number: int) -> Share: ...
    @overload
    def __getitem__(self, number: slice) -> Sequence[Share]: ...
    def __getitem__(self, number: int | slice) -> Share | Sequence[Share]:
        chosen = self._batches[number]
        if isinstance(chosen, Batch):
            return self._read(chosen)
        return SharesOnDemand(chosen, self._read)


class Feed(Protocol):
    """A rank's work in each step."""

    def at(self, step: int) -> Feeding:
        """Return the batch that begins with this step. Steps can be requested in any order, up to
        the last one; consecutive steps are fastest."""

    def end_batches(self, last_of: Callable[[int], int], from_step: int) -> None:
        """Set `last_of`, which returns the last step of the batch that begins with a given step."""

    def close(self) -> None:
        """Stop the threads and processes that read in advance."""


class Prefetcher:
    """A rank's shares of each global batch, keyed by the first step of the batch.

    While the previous step is computed, a thread reads samples that are not in memory. If
    `loader_workers` is set, that many processes read the samples (see `Loader`).
    """

    def __init__(
        self,
        samples: InMemorySamples | MemoryMappedSamples,
        batches: DistributedBatchSampler,
        micro_batch_size: int,
        last_step: int,
        loader_workers: int = 0,
        evenly: bool = False,
        on_demand: bool = False,
    ) -> None:
        """evenly: whether every rank must have the same number of pieces, because ranks compute
        them together. on_demand: whether a rank's shares are determined during the step, so that
        nothing can be read in advance."""
        self._samples = samples
        self._evenly = evenly
        self._on_demand = on_demand
        self._batches = batches
        self._micro_batch_size = micro_batch_size
        self._last_step = last_step
        self._last_of: Callable[[int], int] = lambda first: first
        """Maps the first step of a batch to the last step of the same batch."""
        self._loader_workers = loader_workers
        self._pool = self._new_pool()
        self._own = threading.local()
        self._loaders: list[Loader] = []
        """One loader for each thread of the pool."""
        self._planned: deque[tuple[int, list[Batch]]] = deque()
        """The batches whose pieces are being read, each with its first step."""
        self._reading: deque[Future[Piece]] = deque()
        """The pieces in the order in which they will be computed."""
        self._begin(1)

    def at(self, step: int) -> Feeding:
        """Return the batch that begins with this step. Steps can be requested in any order, up to
        the last one; batches of consecutive steps are read in advance."""
        return self._read(step) if self._pool is None else self._await(step, self._pool)

    def end_batches(self, last_of: Callable[[int], int], from_step: int) -> None:
        """Set `last_of`, which returns the last step of the batch that begins with a given step."""
        self._last_of = last_of
        self._begin(from_step)

    def cut_anew(self, parts: Sequence[float], from_step: int) -> None:
        """Starting with this step, divide the global batches according to these parts; see
        `DistributedBatchSampler.parts`."""
        self._batches.parts = parts
        self._begin(from_step)

    def close(self) -> None:
        """Stop reading in advance."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
        while self._loaders:
            self._loaders.pop().close()
        self._begin(self._last_step + 1)

    def _new_pool(self) -> ThreadPoolExecutor | None:
        if isinstance(self._samples, InMemorySamples) or self._on_demand:
            return None
        return ThreadPoolExecutor(self._loader_workers or 1, "dray-feed")

    def _begin(self, step: int) -> None:
        """Start reading at this step, and discard reads of other steps."""
        self._planned.clear()
        self._reading.clear()
        self._plan = self._plan_from(step)

    def _plan_from(self, step: int) -> Iterator[Tensor]:
        """Iterate over the pieces of the batch that begins with this step and of all later batches,
        in order."""
        while step <= self._last_step:
            last = self._last_of(step)
            batches = self._batches.at(step, last)
            self._planned.append((step, batches))
            step = last + 1
            for batch in batches:
                yield from self._cut(batch)

    def _await(self, step: int, pool: Executor) -> Feeding:
        if not self._planned or self._planned[0][0] != step:
            self._begin(step)
            self._read_ahead(pool, 1)
        _, batches = self._planned.popleft()
        counts = [len(self._cut(batch)) for batch in batches]
        ahead = sum(counts) if not self._loader_workers else PIECES_AHEAD * self._loader_workers
        ahead = min(max(ahead, sum(counts)), MOST_AHEAD)
        shares = []
        for batch, count in zip(batches, counts, strict=True):
            pieces = []
            for _ in range(count):
                self._read_ahead(pool, ahead)
                pieces.append(self._reading.popleft().result())
            shares.append(Share(batch, pieces))
        self._read_ahead(pool, ahead)
        return Feeding(batches[0].num_global, shares)

    def _read_ahead(self, pool: Executor, ahead: int) -> None:
        """Ensure that `ahead` pieces, or all remaining pieces if there are fewer, have been read or
        are being read."""
        while len(self._reading) < ahead:
            at = next(self._plan, None)
            if at is None:
                return
            read = self._load if self._loader_workers else self._samples.take
            self._reading.append(pool.submit(read, at))

    def _load(self, at: Tensor) -> Piece:
        """Read a piece with the calling thread's loader process."""
        assert isinstance(self._samples, MemoryMappedSamples)
        loader = getattr(self._own, "loader", None)
        if loader is None:
            self._own.loader = loader = Loader(self._samples.samples.take)
            self._loaders.append(loader)
        inputs, targets = loader.read(at)
        return sent(inputs, self._samples.device), sent(targets, self._samples.device)

    def _read(self, step: int) -> Feeding:
        batches = self._batches.at(step, self._last_of(step))
        shares = SharesOnDemand(batches, self._read_share)
        return Feeding(batches[0].num_global, shares if self._on_demand else list(shares))

    def _read_share(self, batch: Batch) -> Share:
        return Share(batch, [self._samples.take(at) for at in self._cut(batch)])

    def _cut(self, batch: Batch) -> Sequence[Tensor]:
        if not self._evenly:
            return torch.split(batch.indices, self._micro_batch_size)
        largest = -(-batch.num_global // self._batches.num_shares)
        pieces = torch.tensor_split(batch.indices, -(-largest // self._micro_batch_size))
        return [piece if len(piece) else batch.indices[:1] for piece in pieces]
