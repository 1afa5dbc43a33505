"""The metrics, computed from shares of ranks, equal scikit-learn's on the whole."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import sklearn.exceptions
import sklearn.metrics
import torch

from ray_workers.recipes import measures

GENERATOR = torch.Generator().manual_seed(0)
LOGITS = torch.randn(300, 4, generator=GENERATOR) * 3
LABELS = (LOGITS + torch.randn(300, 4, generator=GENERATOR) * 4).argmax(dim=1)


@pytest.mark.parametrize("batch", [7, 300])
def test_metrics_of_classes_are_scikit_learns(batch: int) -> None:
    found = measures.of_classes(4, len(LABELS))
    for at in range(0, len(LABELS), batch):
        found.update(LOGITS[at : at + batch], LABELS[at : at + batch])
    values = {name: value.item() for name, value in found.compute().items()}
    predicted, chances = LOGITS.argmax(dim=1).numpy(), LOGITS.double().softmax(dim=1).numpy()
    labels = LABELS.numpy()
    expected = {
        "accuracy": sklearn.metrics.accuracy_score(labels, predicted),
        "f1": sklearn.metrics.f1_score(labels, predicted, average="macro"),
        "auroc": sklearn.metrics.roc_auc_score(labels, chances, multi_class="ovr"),
    }
    assert values == pytest.approx(expected, abs=1e-5)


def test_a_class_that_no_sample_has_is_not_in_the_mean() -> None:
    labels = torch.tensor([0, 2, 4, 4, 2, 0, 2, 4])
    for logits in (torch.eye(5)[labels] * 9, torch.randn(8, 5, generator=GENERATOR)):
        logits[1] = logits[2]  # ties, between classes and within one
        logits[3] = logits[4] = 0.0
        found = measures.of_classes(5, 8)
        found.update(logits, labels)
        chances = logits.double().softmax(dim=1).numpy().round(12)  # ties are exact
        areas = [sklearn.metrics.roc_auc_score(labels == c, chances[:, c]) for c in (0, 2, 4)]
        values = {name: value.item() for name, value in found.compute().items()}
        predicted = logits.argmax(dim=1)
        assert values == pytest.approx(
            {
                "accuracy": sklearn.metrics.accuracy_score(labels, predicted),
                "f1": sklearn.metrics.f1_score(labels, predicted, average="macro"),
                "auroc": np.mean(areas),
            },
            abs=1e-6,
        )


@pytest.mark.parametrize("num_samples", [1, 10**9], ids=["exact", "by bins"])
def test_of_one_class_alone_there_is_no_curve(num_samples: int) -> None:
    found = measures.of_classes(3, num_samples)
    found.update(LOGITS[:1, :3], torch.tensor([1]))
    values = {name: value.item() for name, value in found.compute().items()}
    right = float(LOGITS[0, :3].argmax() == 1)
    assert values == pytest.approx({"accuracy": right, "f1": right, "auroc": np.nan}, nan_ok=True)


def test_the_area_by_bins_is_near_the_exact_one_where_all_chances_are_small() -> None:
    labels = torch.arange(1000) % 200  # 100 classes are absent
    logits = torch.randn(1000, 300, generator=GENERATOR) * 0.2
    logits[torch.arange(1000), labels] += 0.3
    exact, near = (measures.of_classes(300, num_samples)["auroc"] for num_samples in (1, 10**9))
    for found in (exact, near):
        found.update(logits, labels)
    assert near.compute().item() == pytest.approx(exact.compute().item(), abs=5e-3)


@pytest.mark.parametrize("num_samples", [1, 10**9], ids=["exact", "by bins"])
def test_a_model_that_diverged_ranks_nothing(num_samples: int) -> None:
    found = measures.of_classes(4, num_samples)
    found.update(LOGITS * torch.nan, LABELS)
    assert found.compute()["auroc"].item() == 0.5


def test_logits_that_look_like_chances_are_still_logits() -> None:
    logits, labels = LOGITS.sigmoid(), LABELS
    found = measures.of_classes(4, len(labels))
    found.update(logits, labels)
    chances = logits.double().softmax(dim=1).numpy()
    expected = sklearn.metrics.roc_auc_score(labels.numpy(), chances, multi_class="ovr")
    assert found.compute()["auroc"].item() == pytest.approx(expected, abs=1e-5)


def test_metrics_of_numbers_are_scikit_learns() -> None:
    predicted, targets = LOGITS[:, 0], LOGITS[:, 0] * 0.9 + LOGITS[:, 1] * 0.2
    found = measures.of_numbers()
    found.update(predicted[:100], targets[:100])
    found.update(predicted[100:], targets[100:])
    values = {name: value.item() for name, value in found.compute().items()}
    p, t = np.asarray(predicted, dtype=float), np.asarray(targets, dtype=float)
    assert values == pytest.approx(
        {
            "mae": sklearn.metrics.mean_absolute_error(t, p),
            "mse": sklearn.metrics.mean_squared_error(t, p),
            "r2": sklearn.metrics.r2_score(t, p),
        },
        rel=1e-4,
    )


@pytest.mark.parametrize(
    "targets",
    [
        [3.0],
        [7.5, 7.5, 7.5],
        [1e-3, 2e-3, 4e-3],
        [16_000_000.0, 16_000_001.0, 16_000_003.0, 16_000_002.0, 16_000_000.0],
    ],
    ids=["one sample", "all the same", "small", "large and close together"],
)
@pytest.mark.parametrize("error", [0.0, 0.25])
def test_r2_of_any_targets_is_scikit_learns(targets: list[float], error: float) -> None:
    there = torch.tensor(targets)
    predicted = there * (1 + error * torch.tensor([(-1.0) ** i for i in range(len(there))]))
    found = measures.of_numbers()
    found.update(predicted[:2], there[:2])
    if len(there) > 2:
        found.update(predicted[2:], there[2:])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", sklearn.exceptions.UndefinedMetricWarning)
        expected = sklearn.metrics.r2_score(there.double(), predicted.double())
    assert found.compute()["r2"].item() == pytest.approx(expected, rel=1e-9, nan_ok=True)


def pixels() -> tuple[torch.Tensor, torch.Tensor]:
    """Nine images of 6 x 8 pixels and five classes, the fourth of which is in no mask."""
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(9, 5, 6, 8, generator=generator)
    masks = (logits + torch.randn(9, 5, 6, 8, generator=generator)).argmax(dim=1)
    masks[masks == 3] = 0
    return logits, masks


@pytest.mark.parametrize("predicts_the_absent", [True, False])
@pytest.mark.parametrize("batch", [2, 9])
def test_metrics_of_pixels_are_scikit_learns_without_the_background(
    batch: int, predicts_the_absent: bool
) -> None:
    logits, masks = pixels()
    if not predicts_the_absent:
        logits[:, 3] = -9.0
    found = measures.of_pixels(5)
    found.update(logits[:0], masks[:0])  # like a rank without a share
    for at in range(0, len(masks), batch):
        found.update(logits[at : at + batch], masks[at : at + batch])
    values = {name: value.item() for name, value in found.compute().items()}
    there, predicted = masks.flatten().numpy(), logits.argmax(dim=1).flatten().numpy()
    counted = [1, 2, 3, 4] if predicts_the_absent else [1, 2, 4]
    options = {"labels": counted, "average": "macro", "zero_division": 0}
    expected = {
        "dice": sklearn.metrics.f1_score(there, predicted, **options),
        "iou": sklearn.metrics.jaccard_score(there, predicted, **options),
        "accuracy": sklearn.metrics.accuracy_score(there, predicted),
    }
    assert values == pytest.approx(expected, abs=1e-6)


def test_finding_nothing_where_nothing_is_is_right() -> None:
    masks = torch.zeros(2, 4, 4, dtype=torch.int64)
    logits = torch.stack([masks + 1.0, masks * 0.0], dim=1)
    found = measures.of_pixels(2)
    found.update(logits, masks)
    assert {name: value.item() for name, value in found.compute().items()} == {
        "dice": 1.0,
        "iou": 1.0,
        "accuracy": 1.0,
    }
    found.reset()
    found.update(-logits, masks)
    assert {value.item() for value in found.compute().values()} == {0.0}


def test_perplexity_is_e_to_the_loss_of_a_token() -> None:
    logits, targets = LOGITS.view(30, 10, 4), LABELS.view(30, 10)
    found = measures.of_tokens()
    found.update(logits, targets)
    loss = torch.nn.functional.cross_entropy(LOGITS, LABELS)
    values = found.compute()
    assert values["perplexity"].item() == pytest.approx(loss.exp().item(), rel=1e-4)
    assert values["accuracy"].item() == pytest.approx((LOGITS.argmax(1) == LABELS).float().mean())


def test_a_large_loss_has_a_large_perplexity_and_no_infinite_one() -> None:
    logits = torch.tensor([[[0.0, 200.0], [0.0, 400.0]]])
    found = measures.of_tokens()
    found.update(logits, torch.tensor([[0, 0]]))
    assert found.compute()["perplexity"].item() == pytest.approx(np.exp(300.0))
