"""The recipes' metrics, which are based on torchmetrics and reported as `val/{name}`."""

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
"""Up to this number of scores (samples times classes), each rank keeps all scores, and the area
under the curve is computed exactly. For more scores, a histogram is used."""
NUM_BINS = 1_000
IGNORED = -100
"""The target of a position whose prediction does not count, as in torch and transformers."""
MIDDLE_LOG_ODDS = 16.0
"""Half of the bins are for log-odds from minus this value to this value. Log-odds are used because
nearly all probabilities are below a hundredth if there are a thousand classes. The outer bins are
wider, and the outermost bins are unbounded."""


def of_classes(num_classes: int, num_samples: int) -> MetricCollection:
    """Return the metrics of a classification: accuracy is the share of correctly classified
    samples; f1 and auroc are means over the classes, and auroc compares each class with the rest.
    Update with (N, num_classes) logits and (N,) labels."""
    exact = num_samples * num_classes <= MOST_EXACT_SCORES
    return MetricCollection(
        {
            "accuracy": MulticlassAccuracy(num_classes, average="micro", validate_args=False),
            "f1": MulticlassF1Score(num_classes, average="macro", validate_args=False),
            "auroc": Auroc(num_classes, exact=exact),
        }
    )


def of_numbers() -> MetricCollection:
    """Return the metrics of a regression: mae in the target's unit, mse in the square of this unit,
    and r2, which is 1 for perfect predictions and 0 if the mean is always predicted. All metrics
    are summed in float64. Update with (N,) predictions and (N,) targets."""
    metrics: dict[str, Metric | MetricCollection] = {
        "mae": MeanAbsoluteError().set_dtype(torch.float64),
        "mse": MeanSquaredError().set_dtype(torch.float64),
        "r2": R2(),
    }
    return MetricCollection(metrics)


def of_pixels(num_classes: int) -> MetricCollection:
    """Return the metrics of a segmentation: dice, iou, and accuracy, the share of correct pixels.

    dice and iou are computed for each class except the background, over the pixels of all images,
    and averaged over the classes that occur in a mask or a prediction; they are 1 if no such class
    occurs.

    Update with (N, num_classes, H, W) logits and (N, H, W) class numbers. Counts are integers, so
    the results do not depend on how the images are distributed over ranks.
    """
    return MetricCollection(
        {
            "dice": Dice(num_classes, validate_args=False),
            "iou": Iou(num_classes, validate_args=False),
            "accuracy": PixelAccuracy(num_classes, validate_args=False),
        }
    )


def of_tokens() -> MetricCollection:
    """Return the metrics of a language model: accuracy and perplexity, which is e to the power of
    the mean loss per token. Update with (N, T, vocabulary_size) logits and (N, T) ids."""
    return MetricCollection({"perplexity": Perplexity(), "accuracy": TokenAccuracy()})


class Auroc(Metric):
    """The mean area under the ROC curve of each class against the rest, over the classes that occur
    in the samples. NaN if only one class occurs, because the curve is undefined in this case.
    scikit-learn uses the same definition; torchmetrics counts the area of an absent class as 0.

    Samples are ranked by their log-odds in float64. In float32, the probabilities of all samples
    with log-odds of 17 or more would be 1.
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
            # Indexed by whether the sample belongs to the class (0 or 1), by the class, and by the
            # bin of the log-odds.
            counts = torch.zeros(2, num_classes, NUM_BINS, dtype=torch.int64)
            self.add_state("counts", counts, dist_reduce_fx="sum")
        self._begin()

    def reset(self) -> None:
        super().reset()
        self._begin()

    def _begin(self) -> None:
        """Make the scores of a rank without samples match the shape of the other ranks' scores."""
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
        position = (scores / (scores.abs() + MIDDLE_LOG_ODDS)).nan_to_num() + 1
        bins = (position * (NUM_BINS / 2)).long().clamp(0, NUM_BINS - 1)
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
    """Return log(p / (1 - p)) of each class: (N, num_classes) -> float64 of the same shape. If the
    outputs of a diverged model are undefined, the result is 0 (a probability of one half)."""
    ahead = logits.double()
    ahead = ahead - ahead.amax(dim=1, keepdim=True)
    # Sort the logits, so that the score of a class doesn't depend on the order of the other
    # classes' logits.
    ordered = ahead.sort(dim=1, descending=True).values
    # The largest element adds exp(0) = 1, so at least 1 remains if any other element is subtracted.
    total = ordered.exp().sum(dim=1, keepdim=True)
    behind = ahead - (total - ahead.exp()).log()
    of_likeliest = -ordered[:, 1:].logsumexp(dim=1, keepdim=True)
    scores = torch.where(ahead == 0, of_likeliest, behind)
    return scores.nan_to_num(nan=0.0, posinf=torch.inf, neginf=-torch.inf)


def _exact_area(scores: Tensor, is_own: Tensor) -> Tensor:
    """Compute the exact area. `scores` are the scores of one class, (N,), and `is_own` states
    whether each sample belongs to this class, (N,)."""
    levels, level_of = torch.unique(scores, return_inverse=True)
    others, own = (
        torch.bincount(level_of[chosen], minlength=len(levels)) for chosen in (~is_own, is_own)
    )
    return _areas(others, own)


def _areas(others: Tensor, own: Tensor) -> Tensor:
    """Pair each sample in the class with each sample outside it, and return the share of pairs in
    which the sample in the class has the higher score. Pairs with equal scores count half. This
    share is the area under the curve (Hanley and McNeil 1982, doi:10.1148/radiology.143.1.7063747).
    `others` and `own` are the numbers of samples with each score, (..., levels), lowest score
    first."""
    others, own = others.double(), own.double()
    below = others.cumsum(dim=-1) - others / 2
    return (own * below).sum(dim=-1) / (own.sum(dim=-1) * others.sum(dim=-1))


class R2(Metric):
    """1 - (squared error) / (squared distance of the targets from their mean), defined as in
    scikit-learn: NaN for a single sample; for constant targets, 1 if all predictions are correct,
    otherwise 0.

    The squared distances from the mean are summed (Chan et al. 1983, doi:10.2307/2683386).
    torchmetrics subtracts squares in float32, which loses all digits if targets are large and close
    together, and it treats targets as constant if the sum is below 0.01.
    """

    count: Tensor
    origin: Tensor
    """The first target. It is subtracted from all targets, because a mean such as 1.7e12 would
    leave no significant digits for the differences."""
    mean: Tensor
    squares: Tensor
    residual: Tensor

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        for name in ("count", "origin", "mean", "squares", "residual"):
            # Don't reduce these states over ranks, because `compute` combines the ranks' values.
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
        # Exclude ranks without samples: their origin is 0, which may be far from the other origins.
        means = origins - origins[counts.argmax()] + self.mean.reshape(-1)
        count, _, between = _together(counts, torch.where(counts > 0, means, 0.0))
        total, residual = self.squares.sum() + between, self.residual.sum()
        if count < 2:
            return total.new_full((), torch.nan)
        if total == 0:
            return (residual == 0).to(total)
        return 1 - residual / total


def _together(counts: Tensor, means: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Combine the counts and means of several parts of the samples. Return the count and mean of
    all samples, and the sum of squared distances of the parts' means from the overall mean."""
    count = counts.sum()
    mean = (counts * means).sum() / count
    return count, mean, (counts * (means - mean).square()).sum()


class Dice(MulticlassConfusionMatrix):
    """Twice the number of pixels on which mask and prediction agree, divided by the sum of their
    sizes."""

    def compute(self) -> Tensor:
        agreed, both = _overlap(super().compute())
        return _mean_of_present(2 * agreed, both)


class Iou(MulticlassConfusionMatrix):
    """The number of pixels on which mask and prediction agree, divided by the size of their
    union."""

    def compute(self) -> Tensor:
        agreed, both = _overlap(super().compute())
        return _mean_of_present(agreed, both - agreed)


class PixelAccuracy(MulticlassConfusionMatrix):
    def compute(self) -> Tensor:
        counts = super().compute()
        return counts.diagonal().sum() / counts.sum()


def _overlap(counts: Tensor) -> tuple[Tensor, Tensor]:
    """Return, for each class except the background, the number of correct pixels, and the number of
    pixels in the mask plus the number in the prediction. `counts` is indexed by true and predicted
    class, (C, C)."""
    both = counts.sum(dim=0) + counts.sum(dim=1)
    return counts.diagonal()[1:], both[1:]


def _mean_of_present(shares: Tensor, totals: Tensor) -> Tensor:
    present = totals > 0
    if not present.any():
        return torch.ones((), device=totals.device)
    return (shares[present].double() / totals[present]).mean()


class Perplexity(Metric):
    """Perplexity over all targets except `IGNORED`. torchmetrics computes the loss from a float32
    probability, so that a loss of 103 or more becomes infinite."""

    loss: Tensor
    total: Tensor

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        zero = torch.zeros((), dtype=torch.float64)
        self.add_state("loss", zero, dist_reduce_fx="sum")
        self.add_state("total", torch.tensor(0), dist_reduce_fx="sum")

    def update(self, logits: Tensor, targets: Tensor) -> None:
        self.loss += token_losses(logits, targets)
        self.total += (targets != IGNORED).sum()

    def compute(self) -> Tensor:
        return (self.loss / self.total).exp()


def token_losses(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the sum of the cross entropies of all targets except `IGNORED`: (N, T, vocabulary)
    logits, (N, T) ids -> scalar."""
    return F.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), reduction="sum", ignore_index=IGNORED
    )


class TokenAccuracy(Metric):
    """The share of tokens, except `IGNORED`, for which the most likely prediction was correct."""

    right: Tensor
    total: Tensor

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        for name in ("right", "total"):
            self.add_state(name, torch.tensor(0), dist_reduce_fx="sum")

    def update(self, logits: Tensor, targets: Tensor) -> None:
        self.right += (logits.argmax(dim=-1) == targets).sum()
        self.total += (targets != IGNORED).sum()

    def compute(self) -> Tensor:
        return self.right / self.total


def cross_entropy(label_smoothing: float) -> LossSum:
    """Return a loss function that sums the samples' cross entropies: (N, num_classes) logits, (N,)
    labels -> scalar.

    Label smoothing (Szegedy et al. 2015, arXiv:1512.00567) is used in training, but not in
    validation.
    """

    def loss_sum(logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(logits, labels, reduction="sum", label_smoothing=label_smoothing)

    return loss_sum


def cross_entropy_and_dice(logits: Tensor, masks: Tensor) -> Tensor:
    """Sum the images' losses: (N, C, H, W) logits, (N, H, W) class numbers -> scalar.

    The loss of an image is the mean cross entropy of its pixels, plus one minus its soft Dice
    (Milletari et al. 2016, arXiv:1606.04797), averaged over all classes except the background. One
    pixel is added to the numerator and the denominator, so that a class that is not in the image
    contributes only if it is predicted. nnU-Net uses the same sum (Isensee et al. 2021,
    arXiv:1904.08128).
    """
    logits = logits.float()
    entropy = F.cross_entropy(logits, masks, reduction="none").mean(dim=(1, 2))
    chances = logits.softmax(dim=1)
    present = torch.zeros_like(chances).scatter_(1, masks[:, None], 1.0)
    agreed = (chances * present)[:, 1:].sum(dim=(2, 3))
    both = (chances + present)[:, 1:].sum(dim=(2, 3))
    dice = (2 * agreed + 1) / (both + 1)
    return (entropy + 1 - dice.mean(dim=1)).sum()
