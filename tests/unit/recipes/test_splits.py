from __future__ import annotations

import numpy as np
import pytest

from ray_workers.recipes import splits
from ray_workers.training.core.errors import DataError

LABELS = np.arange(1797) % 10


def test_a_split_by_class_cuts_every_class_alike() -> None:
    training, validation = splits.by_class(LABELS, 0.2, seed=0)
    assert sorted([*training.tolist(), *validation.tolist()]) == list(range(1797))
    for label in range(10):
        assert abs(np.mean(LABELS[validation] == label) - np.mean(label == LABELS)) < 0.005


@pytest.mark.parametrize("kind", ["by_class", "at_random"])
def test_a_split_is_drawn_from_the_seed(kind: str) -> None:
    def validation(seed: int) -> list[int]:
        if kind == "by_class":
            return list(splits.by_class(LABELS, 0.2, seed)[1])
        return list(splits.at_random(len(LABELS), 0.2, seed)[1])

    assert validation(0) == validation(0)
    assert validation(0) != validation(1)


def test_a_split_at_the_end_keeps_the_order() -> None:
    training, validation = splits.at_the_end(10, 0.3)
    assert (training.tolist(), validation.tolist()) == (list(range(7)), [7, 8, 9])


def test_a_split_that_leaves_nothing_is_the_datas_fault() -> None:
    with pytest.raises(DataError, match="validation_fraction 1e-06 leaves 1797 samples"):
        splits.by_class(LABELS, 1e-6, seed=0)
    with pytest.raises(DataError, match="leaves 0 samples for training"):
        splits.at_random(10, 0.99, seed=0)
    with pytest.raises(DataError, match="each needs at least one"):
        splits.at_the_end(1, 0.5)
