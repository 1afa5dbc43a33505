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
    """The share of each class in a client's samples."""
    assert of.labels is not None
    return np.bincount(of.labels[numbers], minlength=NUM_CLASSES) / len(numbers)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"by": "dirichlet", "alpha": 0.1},
        {"by": "dirichlet", "alpha": 1e-4},
        {"by": "dirichlet", "alpha": 100.0},
        {"by": "dirichlet_per_client", "alpha": 0.1},
        {"by": "dirichlet_per_client", "alpha": 1e-4},
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


def test_clients_of_hsus_split_are_equally_large_and_as_unlike_as_plain_draws() -> None:
    """Hsu et al. 2019: q ~ Dir(alpha p) for each client. The draws of numpy, without a data set,
    show the share of a client's samples in its two largest classes; classes that are used up
    make the split less extreme by a little."""
    assert TRAIN.labels is not None
    prior = np.bincount(TRAIN.labels) / len(TRAIN)
    for alpha, tolerance in ((0.1, 0.03), (1.0, 0.06), (100.0, 0.06)):
        found = divided(30, by="dirichlet_per_client", alpha=alpha)
        assert {len(one) for one in found.train} == {100}
        two = np.mean([np.sort(shares(one, TRAIN))[-2:].sum() for one in found.train])
        plain = np.random.default_rng(7).dirichlet(alpha * prior, 20_000)
        assert two == pytest.approx(np.sort(plain)[:, -2:].sum(axis=1).mean(), abs=tolerance)
    several = [divided(7, seed, by="dirichlet_per_client", alpha=0.3) for seed in range(5)]
    assert {len(one) for each in several for one in each.train} == {428, 429}


@pytest.mark.parametrize(
    ("by", "of_two_classes", "in_two_classes"),
    [("dirichlet", 0.22, 0.52), ("dirichlet_per_client", 0.94, 0.98)],
)
def test_the_documented_shares_of_clients_with_few_classes(
    by: Any, of_two_classes: float, in_two_classes: float
) -> None:
    """The shares of clients with at most two classes, and with nine tenths of their samples in two:
    100 clients and ten classes of 600 samples, at alpha 0.1."""
    whole = Samples(
        np.arange(6000), lambda at: (torch.empty(len(at)),) * 2, np.repeat(np.arange(10), 600)
    )
    few, most = [], []
    for seed in range(10):
        found = divide(Partition(by=by, alpha=0.1), 100, whole, VALIDATION, seed)
        for one in found.train:
            ordered = np.sort(shares(one, whole))
            few.append(np.count_nonzero(ordered) <= 2)
            most.append(ordered[-2:].sum() >= 0.9)
    assert np.mean(few) == pytest.approx(of_two_classes, abs=0.03)
    assert np.mean(most) == pytest.approx(in_two_classes, abs=0.03)


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
