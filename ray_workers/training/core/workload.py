"""The workload that a recipe passes to the training loop."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torchmetrics import MetricCollection

from ray_workers.training.data.device_dataset import Samples

LossSum = Callable[[Tensor, Tensor], Tensor]
"""(outputs, targets) -> scalar: the sum, not the mean, of the samples' losses."""
WriteResults = Callable[[nn.Module, Mapping[str, float], int, Path], None]
"""(trained model, final metrics, step, folder): write the result's files into the folder."""


def at_least_float32(outputs: Tensor) -> Tensor:
    """Convert a model's outputs to float32 for a loss or a metric. Predictions of a table's numbers
    stay float64, as the numbers are."""
    return outputs if outputs.dtype == torch.float64 else outputs.float()


@dataclass(frozen=True)
class Workload:
    """A model, its data on the CPU, and its metrics."""

    model: nn.Module
    """Has parameters on the meta device and buffers on the CPU; see `meta_init.materialise`."""
    train: Samples
    validation: Samples
    loss_sum: LossSum
    """The loss that training minimises."""
    validation_loss_sum: LossSum
    """The loss without the terms that only help training; `val/loss` is its mean."""
    metrics: Callable[[], MetricCollection]
    """Makes fresh metrics, to be updated with (outputs, targets); reported as `val/{name}`."""
    fingerprint: str
    """Hash of the data's content: all ranks and attempts of a job must have read the same data."""
    write_results: WriteResults
    about: Sequence[str] = ()
    """Lines for the job's log about the reading of the data."""
