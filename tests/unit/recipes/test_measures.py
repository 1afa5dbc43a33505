"""The metrics over shares of ranks, against scikit-learn on the whole."""

from __future__ import annotations

import numpy as np
import pytest
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


def test_perplexity_is_e_to_the_loss_of_a_token() -> None:
    logits, targets = LOGITS.view(30, 10, 4), LABELS.view(30, 10)
    found = measures.of_tokens()
    found.update(logits, targets)
    loss = torch.nn.functional.cross_entropy(LOGITS, LABELS)
    values = found.compute()
    assert values["perplexity"].item() == pytest.approx(loss.exp().item(), rel=1e-4)
    assert values["accuracy"].item() == pytest.approx((LOGITS.argmax(1) == LABELS).float().mean())
