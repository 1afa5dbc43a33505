"""Each sample is one client's, each client has one, and clients are as unlike as was asked for."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from dray.spec.federated.parts import Partition
from ray_workers.training.core.errors import DataError
from ray_workers.training.data.device_dataset import Samples
from ray_workers.training.parallel.federated.simulation.partition import (
    ClientSamples,
    Numbers,
    divide,
)

NUM_CLASSES = 10


def samples(num_samples: int, seed: int = 0) -> Samples:
    labels = np.random.default_rng(seed).integers(NUM_CLASSES, size=num_samples)
    return Samples(np.arange(num_samples), lambda at: (torch.empty(len(at)),) * 2, labels)


TRAIN, VALIDATION = samples(3000), samples(700, seed=1)


def divided(num_clients: int, seed: int = 0, **options: Any) -> ClientSamples:
    return divide(Partition(**options), num_clients, TRAIN, VALIDATION, seed)


def shares(numbers: Numbers, of: Samples) -> Any:
    """Of each class in a client's samples."""
    assert of.labels is not None
    return np.bincount(of.labels[numbers], minlength=NUM_CLASSES) / len(numbers)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"by": "dirichlet", "alpha": 0.1},
        {"by": "dirichlet", "alpha": 1e-4},
        {"by": "dirichlet", "alpha": 100.0},
        {"by": "classes", "classes_per_client": 3},
    ],
)
@pytest.mark.parametrize("num_clients", [7, 1000])
def test_each_sample_is_one_clients_and_each_client_has_one(
    num_clients: int, options: dict[str, Any]
) -> None:
    found = divided(num_clients, **options)
    assert np.array_equal(np.sort(np.concatenate(found.train)), np.arange(3000))
    assert np.array_equal(np.sort(np.concatenate(found.validation)), np.arange(700))
    assert len(found.train) == len(found.validation) == num_clients
    assert min(map(len, found.train)) >= 1
    again = divided(num_clients, **options)
    pairs = zip(found.train, again.train, strict=True)
    assert all(np.array_equal(one, other) for one, other in pairs), "a seed gives one partition"
    other = divided(num_clients, seed=1, **options)
    pairs = zip(found.train, other.train, strict=True)
    assert not all(np.array_equal(one, two) for one, two in pairs)


def test_a_smaller_concentration_makes_clients_more_unlike() -> None:
    def largest_share(alpha: float) -> float:
        found = divided(30, by="dirichlet", alpha=alpha)
        return float(np.mean([shares(one, TRAIN).max() for one in found.train]))

    skew = [largest_share(alpha) for alpha in (0.05, 0.5, 100.0)]
    assert skew[0] > 0.6 > skew[1] > 0.25 > skew[2]


def test_validation_is_divided_as_training_is() -> None:
    found = divided(5, by="dirichlet", alpha=0.5)
    for train, validation in zip(found.train, found.validation, strict=True):
        assert shares(validation, VALIDATION) == pytest.approx(shares(train, TRAIN), abs=0.1)


def test_clients_of_few_classes_have_no_others_and_no_class_is_left_out() -> None:
    found = divided(40, by="classes", classes_per_client=2)
    classes = [set(np.flatnonzero(shares(one, TRAIN))) for one in found.train]
    assert {len(one) for one in classes} == {2}
    holders = np.bincount([label for one in classes for label in one])
    assert list(holders) == [8] * NUM_CLASSES
    for own, validation in zip(classes, found.validation, strict=True):
        assert set(np.flatnonzero(shares(validation, VALIDATION))) <= own


@pytest.mark.parametrize(
    ("num_clients", "options", "message"),
    [
        (3001, {}, "federated.clients is 3001, and there are 3000 samples"),
        (9, {"by": "classes", "classes_per_client": 1}, "would leave some of the 10 classes out"),
        (9, {"by": "classes", "classes_per_client": 11}, "the data have 10 classes"),
    ],
)
def test_data_that_are_not_enough_are_refused(
    num_clients: int, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(DataError, match=message):
        divided(num_clients, **options)
