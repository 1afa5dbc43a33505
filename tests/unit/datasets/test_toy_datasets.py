"""The sets that come with scikit-learn."""

from __future__ import annotations

import numpy as np
import pytest

from dray.spec import Data
from ray_workers.datasets import open_images, open_table
from ray_workers.shared.node_needs import DataPolicy

POLICY = DataPolicy.open()


def test_digits_are_small_images_of_ten_classes() -> None:
    images = open_images(Data(source="sklearn://digits"), POLICY)
    assert images.pixels.shape == (1797, 1, 8, 8)
    assert images.pixels.max() == images.max_value == 16
    assert images.classes == tuple("0123456789")
    assert len(images.fingerprint) == 64


@pytest.mark.parametrize(
    ("name", "shape", "classes"),
    [("iris", (150, 4), 3), ("wine", (178, 13), 3), ("breast_cancer", (569, 30), 2)],
)
def test_tables_with_classes(name: str, shape: tuple[int, int], classes: int) -> None:
    table = open_table(Data(source=f"sklearn://{name}"), POLICY, classifies=True)
    assert table.numeric.shape == shape
    assert table.categories.shape == (shape[0], 0)
    assert table.classes is not None
    assert len(table.classes) == classes
    assert set(table.target.tolist()) == set(range(classes))


def test_diabetes_is_a_number_to_predict() -> None:
    table = open_table(Data(source="sklearn://diabetes"), POLICY, classifies=False)
    assert table.classes is None
    assert table.target.dtype == np.float64
    assert len(table.numeric_names) == table.numeric.shape[1] == 10
