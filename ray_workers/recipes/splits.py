"""The split into training and validation samples, which depends on the seed and is the same on
every rank."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ray_workers.training.core.errors import DataError
from ray_workers.training.data.device_dataset import Rows
from ray_workers.training.data.sampler import derive_seed


def by_class(labels: npt.NDArray[np.int64], fraction: float, seed: int) -> tuple[Rows, Rows]:
    """Return (training, validation), each in ascending order, with the same share of every class.

    Raises DataError if either part would be empty.
    """
    generator = np.random.default_rng(derive_seed("split", seed))
    is_validation = np.zeros(len(labels), dtype=bool)
    for label in np.unique(labels):
        members = np.flatnonzero(labels == label)
        count = round(fraction * len(members))
        is_validation[generator.permutation(members)[:count]] = True
    return _checked(np.flatnonzero(~is_validation), np.flatnonzero(is_validation), fraction)


def at_random(num_samples: int, fraction: float, seed: int) -> tuple[Rows, Rows]:
    """Return (training, validation), chosen at random and each in ascending order.

    Raises DataError if either part would be empty.
    """
    generator = np.random.default_rng(derive_seed("split", seed))
    order = generator.permutation(num_samples)
    count = round(fraction * num_samples)
    return _checked(np.sort(order[count:]), np.sort(order[:count]), fraction)


def as_given(is_validation: npt.NDArray[np.bool_]) -> tuple[Rows, Rows]:
    """Return (training, validation), each in ascending order, as split by the data set itself."""
    return np.flatnonzero(~is_validation), np.flatnonzero(is_validation)


def at_the_end(num_samples: int, fraction: float) -> tuple[Rows, Rows]:
    """Return (training, validation). The order of the samples matters, so the last samples are used
    for validation.

    Raises DataError if either part would be empty.
    """
    count = round(fraction * num_samples)
    rows = np.arange(num_samples)
    return _checked(rows[: num_samples - count], rows[num_samples - count :], fraction)


def at_token(num_tokens: int, length: int, num_windows: int) -> tuple[Rows, Rows]:
    """Return (training windows, validation windows). Each window has `length` tokens and is used
    together with the token after it. The training windows use only the first `num_tokens` tokens;
    the validation windows begin after these tokens. Raises DataError if there are no training
    windows or no validation windows."""
    training = np.arange((num_tokens - 1) // length)
    validation = np.arange(-(-num_tokens // length), num_windows)
    if len(training) == 0 or len(validation) == 0:
        raise DataError(
            f"the split by files leaves {len(training)} samples of {length} tokens for training "
            f"and {len(validation)} for validation; each needs at least one"
        )
    return training, validation


def _checked(training: Rows, validation: Rows, fraction: float) -> tuple[Rows, Rows]:
    if len(training) == 0 or len(validation) == 0:
        raise DataError(
            f"data.validation_fraction {fraction} leaves {len(training)} samples for "
            f"training and {len(validation)} for validation; each needs at least one"
        )
    return training, validation
