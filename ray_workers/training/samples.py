"""The samples of a data set by their number, from memory or from a file that is mapped into it."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ray_workers.training.data import Batch, Batches

RESIDENT_BYTES = 256 << 20
"""A split no larger than this, once it is made into tensors, stays on the device."""

Rows = npt.NDArray[np.int64]
Fetch = Callable[[Rows], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Samples:
    """Some rows of a data set, in an order of their own; sample i is row `rows[i]`.

    The arrays behind `fetch` may be larger than memory: only what is asked for is read.
    """

    rows: Rows
    fetch: Fetch
    """Row numbers (B,) -> (inputs, targets), the first dimension of both being B, on the CPU."""

    def __len__(self) -> int:
        return len(self.rows)

    def take(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """(inputs, targets) of the samples, in the order of `indices`: int64 (B,)."""
        return self.fetch(self.rows[indices.numpy()])


@dataclass(frozen=True)
class ResidentSamples:
    """All samples as two tensors on one device."""

    inputs: Tensor
    targets: Tensor

    def __len__(self) -> int:
        return len(self.targets)

    def take(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        at = indices.to(self.inputs.device)
        return self.inputs.index_select(0, at), self.targets.index_select(0, at)


@dataclass(frozen=True)
class DistantSamples:
    """Samples that are brought to the device batch by batch."""

    samples: Samples
    device: torch.device

    def __len__(self) -> int:
        return len(self.samples)

    def take(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        inputs, targets = self.samples.take(indices)
        return inputs.to(self.device), targets.to(self.device)


@dataclass(frozen=True)
class Feeding:
    """What a rank computes in one optimizer step."""

    batch: Batch
    micro_batches: list[tuple[Tensor, Tensor]]
    """(inputs, targets) of the rank's share, in pieces of at most the micro-batch size."""


class Feed:
    """A rank's share of each global batch, by the step; what is not at hand is read one step
    ahead, while the step before is computed."""

    def __init__(
        self,
        samples: ResidentSamples | DistantSamples,
        batches: Batches,
        micro_batch_size: int,
        last_step: int,
    ) -> None:
        self._samples = samples
        self._batches = batches
        self._micro_batch_size = micro_batch_size
        self._last_step = last_step
        self._reader: ThreadPoolExecutor | None = None
        if isinstance(samples, DistantSamples):
            self._reader = ThreadPoolExecutor(1, "dray-feed")
        self._ahead: tuple[int, Future[Feeding]] | None = None

    def at(self, step: int) -> Feeding:
        """Steps may be asked for in any order; in a row they were read ahead."""
        if self._reader is None:
            return self._read(step)
        ahead, self._ahead = self._ahead, None
        # Waited for even if it is of another step: one at a time reads.
        found = ahead[1].result() if ahead is not None else None
        if ahead is None or found is None or ahead[0] != step:
            found = self._reader.submit(self._read, step).result()
        if step < self._last_step:
            self._ahead = (step + 1, self._reader.submit(self._read, step + 1))
        return found

    def close(self) -> None:
        """End the reading ahead."""
        if self._reader is not None:
            self._reader.shutdown(wait=False, cancel_futures=True)

    def _read(self, step: int) -> Feeding:
        batch = self._batches.at(step)
        pieces = torch.split(batch.indices, self._micro_batch_size)
        return Feeding(batch, [self._samples.take(piece) for piece in pieces])


def on_device(samples: Samples, device: torch.device) -> ResidentSamples | DistantSamples:
    """The samples as the loop takes them: kept on the device if they are small enough."""
    inputs, targets = samples.fetch(samples.rows[:1])
    if (inputs.nbytes + targets.nbytes) * len(samples) > RESIDENT_BYTES:
        return DistantSamples(samples, device)
    inputs, targets = samples.fetch(samples.rows)
    return ResidentSamples(inputs.to(device), targets.to(device))
