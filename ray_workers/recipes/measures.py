"""The metrics of the recipes, from torchmetrics; served as `val/{name}`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812
from torchmetrics import Metric, MetricCollection
from torchmetrics.classification import (
    MulticlassAccuracy,
    MulticlassConfusionMatrix,
    MulticlassF1Score,
)
from torchmetrics.regression import MeanAbsoluteError, MeanSquaredError
from torchmetrics.utilities import dim_zero_cat

from ray_workers.training.core.workload import LossSum

MOST_EXACT_SCORES = 20_000_000
"""Scores (samples times classes) up to which the area under the curve is exact; each rank keeps
them all. Beyond, they count how many fall into each of some bins."""
NUM_BINS = 400
MOST_LOG_ODDS = 16.0
"""Bins are as wide in log-odds: of a thousand classes, nearly all chances are below a hundredth."""


def of_classes(num_classes: int, num_samples: int) -> MetricCollection:
    """accuracy: share of the samples that are right. f1 and auroc: the mean over the classes, the
    latter of each class against the rest. Update with (N, num_classes) logits and (N,) labels."""
    exact = num_samples * num_classes <= MOST_EXACT_SCORES
    return MetricCollection(
        {
            "accuracy": MulticlassAccuracy(num_classes, average="micro", validate_args=False),
            "f1": MulticlassF1Score(num_classes, average="macro", validate_args=False),
            "auroc": Auroc(num_classes, exact=exact),
        }
    )


def of_numbers() -> MetricCollection:
    """mae, mse: in the target's units, and their square. r2: 1 is perfect, 0 the mean.
    Update with (N,) predictions and (N,) targets."""
    return MetricCollection({"mae": MeanAbsoluteError(), "mse": MeanSquaredError(), "r2": R2()})


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


class Auroc(Metric):
    """The mean of the classes' areas under the curve, each against the rest, over those classes
    that samples belong to; NaN if that is one alone, of which no curve is defined. So has it
    scikit-learn; torchmetrics counts a class that is absent as 0.
    """

    chances: list[Tensor]
    labels: list[Tensor]
    counts: Tensor

    def __init__(self, num_classes: int, *, exact: bool, **options: Any) -> None:
        super().__init__(**options)
        self._num_classes = num_classes
        self._exact = exact
        if exact:
            self.add_state("chances", [], dist_reduce_fx="cat")
            self.add_state("labels", [], dist_reduce_fx="cat")
        else:
            # By whether a sample is of the class, the class, and its log-odds.
            counts = torch.zeros(2, num_classes, NUM_BINS, dtype=torch.int64)
            self.add_state("counts", counts, dist_reduce_fx="sum")
        self._begin()

    def reset(self) -> None:
        super().reset()
        self._begin()

    def _begin(self) -> None:
        """Have the scores of a rank that is given nothing in the shape of the others'."""
        if self._exact:
            self.chances = [torch.zeros(0, self._num_classes, device=self.device)]
            self.labels = [torch.zeros(0, dtype=torch.int64, device=self.device)]

    def update(self, logits: Tensor, labels: Tensor) -> None:
        chances = logits.softmax(dim=1).nan_to_num()  # a model that diverged knows nothing: 0.5
        if self._exact:
            self.chances.append(chances)
            self.labels.append(labels)
            return
        place = (chances.logit() / MOST_LOG_ODDS + 1) * (NUM_BINS / 2)
        bins = place.clamp(0, NUM_BINS - 1).long()
        classes = torch.arange(self._num_classes, device=labels.device)
        rows = (labels[:, None] == classes) * self._num_classes + classes
        found = torch.bincount((rows * NUM_BINS + bins).flatten(), minlength=self.counts.numel())
        self.counts += found.view_as(self.counts)

    def compute(self) -> Tensor:
        if self._exact:
            chances, labels = dim_zero_cat(self.chances), dim_zero_cat(self.labels)
            present = torch.bincount(labels).nonzero().flatten()
            areas = [_exact_area(chances[:, one], labels == one) for one in present]
            return torch.stack(areas).mean()
        others, own = self.counts
        return _areas(others, own)[own.sum(dim=1) > 0].mean()


def _exact_area(scores: Tensor, is_own: Tensor) -> Tensor:
    """scores: (N,) of a class; is_own: (N,), of which samples it is the class."""
    levels, level_of = torch.unique(scores, return_inverse=True)
    others, own = (
        torch.bincount(level_of[chosen], minlength=len(levels)) for chosen in (~is_own, is_own)
    )
    return _areas(others, own)


def _areas(others: Tensor, own: Tensor) -> Tensor:
    """The share of the pairs, one sample of the class and one of the others, in which the former
    has the higher score; of equal scores half. That is the area under the curve (Hanley and McNeil
    1982, doi:10.1148/radiology.143.1.7063747). others, own: (..., levels), how many samples have
    each score, the lowest first."""
    others, own = others.double(), own.double()
    below = others.cumsum(dim=-1) - others / 2
    return (own * below).sum(dim=-1) / (own.sum(dim=-1) * others.sum(dim=-1))


class R2(Metric):
    """1 - (squared error) / (squared distance of the targets from their mean), as scikit-learn
    has it: NaN of a single sample; of targets that are all the same 1 if each is met, else 0.

    The distances are added up around the mean (Chan et al. 1983, doi:10.2307/2683386): torchmetrics
    subtracts squares in float32, which leaves nothing of targets that are large and close together,
    and takes those below 0.01 for all the same.
    """

    count: Tensor
    mean: Tensor
    squares: Tensor
    residual: Tensor

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        for name in ("count", "mean", "squares", "residual"):
            # Of each rank by itself: `compute` puts them together.
            self.add_state(name, torch.zeros((), dtype=torch.float64), dist_reduce_fx=None)

    def update(self, predictions: Tensor, targets: Tensor) -> None:
        predictions, targets = predictions.double(), targets.double()
        count, mean = self.count.new_tensor(len(targets)), targets.mean()
        parts = torch.stack((self.count, count)), torch.stack((self.mean, mean))
        squares = (targets - mean).square().sum()
        self.count, self.mean, between = _together(*parts)
        self.squares = self.squares + squares + between
        self.residual = self.residual + (targets - predictions).square().sum()

    def compute(self) -> Tensor:
        count, _, between = _together(self.count.reshape(-1), self.mean.reshape(-1))
        total, residual = self.squares.sum() + between, self.residual.sum()
        if count < 2:
            return total.new_full((), torch.nan)
        if total == 0:
            return (residual == 0).to(total)
        return 1 - residual / total


def _together(counts: Tensor, means: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The count and the mean of all samples, from the counts and means of their parts, and the part
    of the sum of squared distances from the mean that is between the parts."""
    count = counts.sum()
    mean = (counts * means).sum() / count
    return count, mean, (counts * (means - mean).square()).sum()


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
    """For each class except the background: the pixels that are right, and those of mask and
    prediction together. counts: (C, C), by true class and predicted class."""
    both = counts.sum(dim=0) + counts.sum(dim=1)
    return counts.diagonal()[1:], both[1:]


def _mean_of_present(shares: Tensor, totals: Tensor) -> Tensor:
    present = totals > 0
    if not present.any():
        return torch.ones((), device=totals.device)
    return (shares[present].double() / totals[present]).mean()


class Perplexity(Metric):
    """torchmetrics takes the logarithm of a chance in float32: infinite beyond a loss of 103."""

    loss: Tensor
    total: Tensor

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        zero = torch.zeros((), dtype=torch.float64)
        self.add_state("loss", zero, dist_reduce_fx="sum")
        self.add_state("total", torch.tensor(0), dist_reduce_fx="sum")

    def update(self, logits: Tensor, targets: Tensor) -> None:
        self.loss += F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
        self.total += targets.numel()

    def compute(self) -> Tensor:
        return (self.loss / self.total).exp()


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
