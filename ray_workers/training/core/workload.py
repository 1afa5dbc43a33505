"""The workload that a recipe passes to the training loop."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import MetricCollection

from ray_workers.training.data.device_dataset import Samples

LossSum = Callable[[Tensor, Tensor], Tensor]
"""(outputs, targets) -> scalar: the sum (not the mean) of the samples' losses."""


@dataclass(frozen=True)
class StoredWeights:
    """Weights that are already stored as artifacts."""

    file_of: Mapping[str, str]
    """Name of the file that contains each tensor."""
    num_bytes: int
    """Size of all tensors."""


Trained = nn.Module | StoredWeights | Mapping[str, Tensor]
"""The trained model or, if it is divided, the locations of its weights. If
`Workload.gathers_result` is set, the trained tensors of a divided model."""

WriteResults = Callable[[Trained, Mapping[str, float], int, Path], None]
"""A function (trained model, final metrics, step, folder) that writes the result files to the
folder. If the weights are already stored, it writes the other files."""


def at_least_float32(outputs: Tensor) -> Tensor:
    """Convert a model's outputs to float32 for a loss or a metric. Predictions of numbers in a
    table remain float64, like the numbers themselves."""
    return outputs if outputs.dtype == torch.float64 else outputs.float()


@dataclass(frozen=True)
class TextPrompts:
    """Prompts that the model continues at every evaluation."""

    rows: Sequence[Sequence[int]]
    """Tokens of each prompt."""
    ends: Set[int]
    """Tokens that end a text."""
    max_tokens: int
    temperature: float
    inputs_of: Callable[[Sequence[Sequence[int]]], Tensor]
    """Returns the model's inputs for rows of tokens, which may have different lengths. The model's
    outputs are (rows, length of the longest row, vocabulary) logits for the next tokens."""
    text_of: Callable[[Sequence[int]], str]
    """Returns the text of generated tokens."""


@dataclass(frozen=True)
class Workload:
    """A model, its data on the CPU, and its metrics."""

    model: nn.Module
    """The model, whose parameters are on the meta device and whose buffers are on the CPU; see
    `meta_init.materialise`."""
    train: Samples
    validation: Samples
    loss_sum: LossSum
    """The loss that training minimises."""
    validation_loss_sum: LossSum
    """The loss without terms that are only useful for training; `val/loss` is its mean."""
    metrics: Callable[[], MetricCollection]
    """Creates new metrics, which are updated with (outputs, targets) and reported as
    `val/{name}`."""
    fingerprint: str
    """Hash of the data's content, to verify that all ranks and attempts of a job read the same
    data."""
    write_results: WriteResults
    step_metrics: Mapping[str, LossSum] = field(default_factory=dict)
    """Additional metrics of each step: functions that sum a metric over samples. The mean over the
    terms of the global batch is reported as `train/{name}`."""
    about: Sequence[str] = ()
    """Lines for the job's log about how the data were read."""
    files: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """JSON documents about the data by name, stored as artifacts before the first step."""
    base: str | None = None
    """Hash of the files with the frozen weights, which are not part of a checkpoint; None if no
    weights are frozen."""
    gathers_result: bool = False
    """Whether the trained tensors are small, so that rank 0 gets all of them for the result."""
    result_dtypes: Mapping[str, torch.dtype] = field(default_factory=dict)
    """The data type in which the result contains a tensor, if it differs from the model's."""
    inputs_per_token: int | None = None
    """Number of elements in the inputs for each token, if ranks report the number of tokens of each
    step."""
    prompts: TextPrompts | None = None
