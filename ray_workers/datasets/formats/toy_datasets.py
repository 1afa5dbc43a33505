"""The small data sets that are included in scikit-learn, which need no files and no cache."""

from __future__ import annotations

import hashlib
from functools import lru_cache
from typing import Any

import numpy as np

from dray import spec
from ray_workers.datasets.core.types import Images, Table

WHITE_OF_DIGITS = 16.0


def name_of(data: spec.Data) -> str:
    """Return the name of the data set, such as `digits` for `sklearn://digits`."""
    return data.source.removeprefix("sklearn://").rstrip("/")


@lru_cache
def images(name: str) -> Images:
    """Return `digits`: 1,797 images of 8 x 8 pixels."""
    assert name == "digits", "the job document allows no other image set"
    bunch = _load(name)
    pixels = np.ascontiguousarray(bunch.images[:, None], dtype=np.uint8)
    labels = bunch.target.astype(np.int64)
    classes = tuple(str(one) for one in bunch.target_names)
    fingerprint = _digest(pixels, labels)
    return Images(pixels, WHITE_OF_DIGITS, labels, classes, fingerprint)


@lru_cache
def table(name: str, *, classifies: bool) -> Table:
    """Return a table of numbers. The data set `diabetes` is for regression; all other data sets
    have classes."""
    bunch = _load(name)
    numeric = np.ascontiguousarray(bunch.data, dtype=np.float64)
    target = bunch.target.astype(np.int64 if classifies else np.float64)
    narrow = np.int64 if classifies else np.float32
    return Table(
        numeric=numeric,
        categories=np.empty((len(numeric), 0), dtype=np.int32),
        target=target,
        numeric_names=tuple(str(one) for one in bunch.feature_names),
        category_names=(),
        vocabularies=(),
        classes=tuple(str(one) for one in bunch.target_names) if classifies else None,
        target_name="target",
        # Compute the hash from float32, which older versions used, so that older jobs can resume.
        fingerprint=_digest(numeric.astype(np.float32), target.astype(narrow)),
    )


def _load(name: str) -> Any:
    import sklearn.datasets

    return getattr(sklearn.datasets, f"load_{name}")()


def _digest(*arrays: Any) -> str:
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(f"{array.dtype.str}{array.shape}".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()
