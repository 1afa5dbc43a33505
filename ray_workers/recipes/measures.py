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
    MulticlassConfusionMatrix,
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


def of_pixels(num_classes: int) -> MetricCollection:
    """dice, iou: of each class but the background, over the pixels of all images together; then
    the mean over those classes that a mask or a prediction has. Where none has any it is 1.
    accuracy: share of all pixels that are right.

    Update with (N, num_classes, H, W) logits and (N, H, W) class numbers. Counts are whole numbers,
    so the results do not depend on how images are shared out.
    """
    return MetricCollection(
        {
            "dice": Dice(num_classes, validate_args=False),
            "iou": Iou(num_classes, validate_args=False),
            "accuracy": PixelAccuracy(num_classes, validate_args=False),
        }
    )


def of_tokens() -> MetricCollection:
    """perplexity: e to the mean loss of a token. Update with (N, T, vocabulary_size) logits and
    (N, T) ids."""
    return MetricCollection({"perplexity": Perplexity(), "accuracy": TokenAccuracy()})


class Auroc(MulticlassAUROC):
    """torchmetrics guesses batch by batch whether it was given logits; here it always is. And of a
    rank that was given nothing it could not put that together with the others' scores: here even
    nothing has its right shape."""

    def __init__(self, num_classes: int, **options: Any) -> None:
        super().__init__(num_classes, **options)
        self._begin()

    def reset(self) -> None:
        super().reset()
        self._begin()

    def _begin(self) -> None:
        if self.thresholds is None:  # else it counts, and keeps no scores
            self.preds = [torch.zeros(0, self.num_classes, device=self.device)]
            self.target = [torch.zeros(0, dtype=torch.long, device=self.device)]

    def update(self, logits: Tensor, labels: Tensor) -> None:
        super().update(logits.softmax(dim=1), labels)


class Dice(MulticlassConfusionMatrix):
    """Twice the pixels in which mask and prediction agree, by the sum of both."""

    def compute(self) -> Tensor:
        agreed, both = _overlap(super().compute())
        return _mean_of_present(2 * agreed, both)


class Iou(MulticlassConfusionMatrix):
    """The pixels in which mask and prediction agree, by those that either has."""

    def compute(self) -> Tensor:
        agreed, both = _overlap(super().compute())
        return _mean_of_present(agreed, both - agreed)


class PixelAccuracy(MulticlassConfusionMatrix):
    def compute(self) -> Tensor:
        counts = super().compute()
        return counts.diagonal().sum() / counts.sum()


def _overlap(counts: Tensor) -> tuple[Tensor, Tensor]:
    """Of each class but the background: pixels that are right, and those of mask and prediction
    together. counts: (C, C), by what is there and what was predicted."""
    both = counts.sum(dim=0) + counts.sum(dim=1)
    return counts.diagonal()[1:], both[1:]


def _mean_of_present(shares: Tensor, totals: Tensor) -> Tensor:
    present = totals > 0
    if not present.any():
        return torch.ones((), device=totals.device)
    return (shares[present].double() / totals[present]).mean()


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


def cross_entropy_and_dice(logits: Tensor, masks: Tensor) -> Tensor:
    """The sum of the images' losses: (N, C, H, W) logits, (N, H, W) class numbers -> scalar.

    Of an image, the mean cross entropy of its pixels, and one minus its soft Dice (Milletari et al.
    2016, arXiv:1606.04797), the mean over all classes but the background. One pixel is added above
    and below, so that a class the image lacks costs what is predicted of it, and no more. The sum
    of both is what nnU-Net trains with (Isensee et al. 2021, arXiv:1904.08128).
    """
    logits = logits.float()
    entropy = F.cross_entropy(logits, masks, reduction="none").mean(dim=(1, 2))
    chances = logits.softmax(dim=1)
    there = torch.zeros_like(chances).scatter_(1, masks[:, None], 1.0)
    agreed = (chances * there)[:, 1:].sum(dim=(2, 3))
    both = (chances + there)[:, 1:].sum(dim=(2, 3))
    dice = (2 * agreed + 1) / (both + 1)
    return (entropy + 1 - dice.mean(dim=1)).sum()
