"""Access to the samples of a data set by index, in memory or in a memory-mapped file."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ray_workers.training.devices import sent

RESIDENT_BYTES = 256 << 20
"""Maximum size, as tensors, of a split that is kept on the device."""

Rows = npt.NDArray[np.int64]
Fetch = Callable[[Rows], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Samples:
    """Some rows of a data set in a given order; sample i is row `rows[i]`.

    The arrays that `fetch` reads can be larger than memory, because only the requested rows are
    read.
    """

    rows: Rows
    fetch: Fetch
    """Maps row numbers (B,) to (inputs, targets) on the CPU, each with first dimension B."""
    labels: Rows | None = None
    """The class of each sample, in order; None if the samples have no classes."""
    num_terms: Rows | None = None
    """Number of terms in the loss of each sample, in order, such as its tokens that count. The loss
    of a batch is the mean over the terms of all its samples. None for one term per sample."""
    is_ragged: bool = False
    """Whether the samples differ in length, so that `fetch` combines the samples of each call in as
    few rows as needed; then the first dimension can be smaller than B."""

    def __len__(self) -> int:
        return len(self.rows)

    def take(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Return (inputs, targets) of the samples, in the order of `indices`: int64 (B,)."""
        return self.fetch(self.rows[indices.numpy()])

    @property
    def total_terms(self) -> int:
        """Number of terms in the losses of all samples."""
        return len(self) if self.num_terms is None else int(self.num_terms.sum())


@dataclass(frozen=True)
class InMemorySamples:
    """All samples as two tensors on one device."""

    inputs: Tensor
    targets: Tensor

    def __len__(self) -> int:
        return len(self.targets)

    def take(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        at = sent(indices, self.inputs.device)
        return self.inputs.index_select(0, at), self.targets.index_select(0, at)


@dataclass(frozen=True)
class MemoryMappedSamples:
    """Samples that are copied to the device batch by batch."""

    samples: Samples
    device: torch.device

    def __len__(self) -> int:
        return len(self.samples)

    def take(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        inputs, targets = self.samples.take(indices)
        return sent(inputs, self.device), sent(targets, self.device)


def on_device(samples: Samples, device: torch.device) -> InMemorySamples | MemoryMappedSamples:
    """Keep the samples on the device if they are small enough; otherwise copy them batch by
    batch."""
    if samples.is_ragged:
        return MemoryMappedSamples(samples, device)
    inputs, targets = samples.fetch(samples.rows[:1])
    if (inputs.nbytes + targets.nbytes) * len(samples) > RESIDENT_BYTES:
        return MemoryMappedSamples(samples, device)
    inputs, targets = samples.fetch(samples.rows)
    return InMemorySamples(inputs.to(device), targets.to(device))
