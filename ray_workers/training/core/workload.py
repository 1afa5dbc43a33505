"""The workload that a recipe hands to the training loop."""

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
"""(trained model, final metrics, step, folder): leave the result's files in the folder."""


def at_least_float32(outputs: Tensor) -> Tensor:
    """A model's outputs for a loss or a metric. The predictions of a table's numbers are float64,
    as the numbers are."""
    return outputs if outputs.dtype == torch.float64 else outputs.float()


@dataclass(frozen=True)
class Workload:
    """A model, its data and its metrics; the data are on the CPU."""

    model: nn.Module
    """With parameters on the meta device and buffers on the CPU; see `meta_init.materialise`."""
    train: Samples
    validation: Samples
    loss_sum: LossSum
    """The loss that training minimises."""
    validation_loss_sum: LossSum
    """The loss without the terms that only help training; `val/loss` is its mean."""
    metrics: Callable[[], MetricCollection]
    """Fresh metrics, to be updated with (outputs, targets); served as `val/{name}`."""
    fingerprint: str
    """Of the data's content: ranks and attempts of a job must have read the same."""
    write_results: WriteResults
    about: Sequence[str] = ()
    """Lines of the job's log on how the data were taken."""
