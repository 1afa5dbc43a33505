"""The metrics of the recipes, from torchmetrics; served as `val/{name}`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812
from torchmetrics import Metric, MetricCollection
from torchmetrics.classification import (
    MulticlassAccuracy,
    MulticlassAUROC,
    MulticlassF1Score,
)
from torchmetrics.regression import MeanAbsoluteError, MeanSquaredError, R2Score
from torchmetrics.text import Perplexity

from ray_workers.training.workload import LossSum

MOST_EXACT_SCORES = 20_000_000
"""Scores (samples times classes) up to which the area under the curve is exact; each rank keeps
them all. Beyond, 200 thresholds stand for the curve."""


def of_classes(num_classes: int, num_samples: int) -> MetricCollection:
    """accuracy: share of the samples that are right. f1 and auroc: the mean over the classes, the
    latter of each class against the rest. Update with (N, num_classes) logits and (N,) labels."""
    thresholds = None if num_samples * num_classes <= MOST_EXACT_SCORES else 200
    return MetricCollection(
        {
            "accuracy": MulticlassAccuracy(num_classes, average="micro", validate_args=False),
            "f1": MulticlassF1Score(num_classes, average="macro", validate_args=False),
            "auroc": Auroc(num_classes, thresholds=thresholds, validate_args=False),
        }
    )


def of_numbers() -> MetricCollection:
    """mae, mse: in the target's units, and their square. r2: 1 is perfect, 0 the mean.
    Update with (N,) predictions and (N,) targets."""
    return MetricCollection(
        {"mae": MeanAbsoluteError(), "mse": MeanSquaredError(), "r2": R2Score()}
    )


def of_tokens() -> MetricCollection:
    """perplexity: e to the mean loss of a token. Update with (N, T, vocabulary_size) logits and
    (N, T) ids."""
    return MetricCollection({"perplexity": Perplexity(), "accuracy": TokenAccuracy()})


class Auroc(MulticlassAUROC):
    """torchmetrics guesses batch by batch whether it was given logits; here it always is."""

    def update(self, logits: Tensor, labels: Tensor) -> None:
        super().update(logits.softmax(dim=1), labels)


class TokenAccuracy(Metric):
    """Share of the tokens of which the likeliest was the one that came."""

    right: Tensor
    total: Tensor

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        for name in ("right", "total"):
            self.add_state(name, torch.tensor(0), dist_reduce_fx="sum")

    def update(self, logits: Tensor, targets: Tensor) -> None:
        self.right += (logits.argmax(dim=-1) == targets).sum()
        self.total += targets.numel()

    def compute(self) -> Tensor:
        return self.right / self.total


def cross_entropy(label_smoothing: float) -> LossSum:
    """The sum of the samples' cross entropies: (N, num_classes) logits, (N,) labels -> scalar.

    Smoothing (Szegedy et al. 2015, arXiv:1512.00567) is for training; measure without.
    """

    def loss_sum(logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(logits, labels, reduction="sum", label_smoothing=label_smoothing)

    return loss_sum
