"""What a recipe hands to the loop."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor, nn


@dataclass(frozen=True)
class Samples:
    """A data set that fits in memory: sample i is (inputs[i], targets[i])."""

    inputs: Tensor
    targets: Tensor

    def __len__(self) -> int:
        return len(self.targets)


@dataclass(frozen=True)
class Workload:
    """A model, its data and what is measured, on the CPU; the loop moves it to the device."""

    model: nn.Module
    train: Samples
    validation: Samples
    loss_sum: Callable[[Tensor, Tensor], Tensor]
    """(outputs, targets) -> scalar: the sum, not the mean, of the samples' losses."""
    metric_sums: Mapping[str, Callable[[Tensor, Tensor], Tensor]]
    """By name, (outputs, targets) -> scalar sum over the samples; served as `val/{name}`, the
    mean over the validation split."""
    write_results: Callable[[nn.Module, Mapping[str, float], int, Path], None]
    """(trained model, final metrics, step, folder): leave the result's files in the folder."""
