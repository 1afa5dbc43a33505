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
NUM_BINS = 1_000
MIDDLE_LOG_ODDS = 16.0
"""Half of the bins are for log-odds between this and its negative: of a thousand classes, nearly
all chances are below a hundredth. The bins get wider further out, where they have no end."""


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
    """mae, mse: in the target's units, and their square. r2: 1 is perfect, 0 the mean. All are
    added up in float64. Update with (N,) predictions and (N,) targets."""
    metrics: dict[str, Metric | MetricCollection] = {
        "mae": MeanAbsoluteError().set_dtype(torch.float64),
        "mse": MeanSquaredError().set_dtype(torch.float64),
        "r2": R2(),
    }
    return MetricCollection(metrics)


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

    Samples are ranked by their log-odds in float64. Their chances in float32 would be 1 for all
    that are ahead by 17 or more.
    """

    scores: list[Tensor]
    labels: list[Tensor]
    counts: Tensor

    def __init__(self, num_classes: int, *, exact: bool, **options: Any) -> None:
        super().__init__(**options)
        self._num_classes = num_classes
        self._exact = exact
        if exact:
            self.add_state("scores", [], dist_reduce_fx="cat")
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
            empty = torch.zeros(0, self._num_classes, dtype=torch.float64, device=self.device)
            self.scores = [empty]
            self.labels = [torch.zeros(0, dtype=torch.int64, device=self.device)]

    def update(self, logits: Tensor, labels: Tensor) -> None:
        scores = log_odds(logits)
        if self._exact:
            self.scores.append(scores)
            self.labels.append(labels)
            return
        place = (scores / (scores.abs() + MIDDLE_LOG_ODDS)).nan_to_num() + 1
        bins = (place * (NUM_BINS / 2)).long().clamp(0, NUM_BINS - 1)
        classes = torch.arange(self._num_classes, device=labels.device)
        rows = (labels[:, None] == classes) * self._num_classes + classes
        found = torch.bincount((rows * NUM_BINS + bins).flatten(), minlength=self.counts.numel())
        self.counts += found.view_as(self.counts)

    def compute(self) -> Tensor:
        if self._exact:
            scores, labels = dim_zero_cat(self.scores), dim_zero_cat(self.labels)
            present = torch.bincount(labels).nonzero().flatten()
            areas = [_exact_area(scores[:, one], labels == one) for one in present]
            return torch.stack(areas).mean()
        others, own = self.counts
        return _areas(others, own)[own.sum(dim=1) > 0].mean()


def log_odds(logits: Tensor) -> Tensor:
    """log(p / (1 - p)) of each class: (N, num_classes) -> float64 of that shape. It is 0, a chance
    of one half, where a model that diverged knows nothing."""
    ahead = logits.double()
    ahead = ahead - ahead.amax(dim=1, keepdim=True)
    # In the order of their size: samples with the same numbers for other classes stay equal.
    ordered = ahead.sort(dim=1, descending=True).values
    # The largest number is 0 now, so what is left of the sum without a smaller one is at least 1.
    total = ordered.exp().sum(dim=1, keepdim=True)
    behind = ahead - (total - ahead.exp()).log()
    of_likeliest = -ordered[:, 1:].logsumexp(dim=1, keepdim=True)
    scores = torch.where(ahead == 0, of_likeliest, behind)
    return scores.nan_to_num(nan=0.0, posinf=torch.inf, neginf=-torch.inf)


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
    origin: Tensor
    """The first target, which is subtracted from all: a mean of 1.7e12 has no digits to spare."""
    mean: Tensor
    squares: Tensor
    residual: Tensor

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        for name in ("count", "origin", "mean", "squares", "residual"):
            # Of each rank by itself: `compute` puts them together.
            self.add_state(name, torch.zeros((), dtype=torch.float64), dist_reduce_fx=None)

    def update(self, predictions: Tensor, targets: Tensor) -> None:
        predictions, targets = predictions.double(), targets.double()
        self.origin = torch.where(self.count == 0, targets[0], self.origin)
        residual = (targets - predictions).square().sum()
        targets = targets - self.origin
        count, mean = self.count.new_tensor(len(targets)), targets.mean()
        parts = torch.stack((self.count, count)), torch.stack((self.mean, mean))
        squares = (targets - mean).square().sum()
        self.count, self.mean, between = _together(*parts)
        self.squares = self.squares + squares + between
        self.residual = self.residual + residual

    def compute(self) -> Tensor:
        counts, origins = self.count.reshape(-1), self.origin.reshape(-1)
        # A rank without samples has the origin 0, which is far from those of the others.
        means = origins - origins[counts.argmax()] + self.mean.reshape(-1)
        count, _, between = _together(counts, torch.where(counts > 0, means, 0.0))
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
