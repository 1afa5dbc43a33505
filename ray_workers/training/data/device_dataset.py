"""The samples of a data set by their number, from memory or from a file that is mapped into it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ray_workers.training.devices import sent

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
    labels: Rows | None = None
    """The class of each sample, in their order; None where samples have none."""

    def __len__(self) -> int:
        return len(self.rows)

    def take(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """(inputs, targets) of the samples, in the order of `indices`: int64 (B,)."""
        return self.fetch(self.rows[indices.numpy()])


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
    """Samples that are brought to the device batch by batch."""

    samples: Samples
    device: torch.device

    def __len__(self) -> int:
        return len(self.samples)

    def take(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        inputs, targets = self.samples.take(indices)
        return sent(inputs, self.device), sent(targets, self.device)


def on_device(samples: Samples, device: torch.device) -> InMemorySamples | MemoryMappedSamples:
    """The samples as the loop takes them: kept on the device if they are small enough."""
    inputs, targets = samples.fetch(samples.rows[:1])
    if (inputs.nbytes + targets.nbytes) * len(samples) > RESIDENT_BYTES:
        return MemoryMappedSamples(samples, device)
    inputs, targets = samples.fetch(samples.rows)
    return InMemorySamples(inputs.to(device), targets.to(device))
