"""Convert a silo's data set to the form of a public data set, with the same shape, classes and
codes.

A silo's data can have fewer classes and categories than the public data from which the model was
built. The same class can therefore have a different number in the silo's data.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from ray_workers.datasets.core.types import Images, MaskedImages, Table, Tokens
from ray_workers.training.core.errors import DataError


def images_like(public: Images, own: Images) -> Images:
    """Return `own` with the classes of `public`. Raises DataError if the shape differs, or if `own`
    has a class that `public` does not have."""
    _refuse_other("shape of the images is", public.pixels.shape[1:], own.pixels.shape[1:])
    codes = _codes("class", public.classes, own.classes)
    return replace(own, labels=codes[own.labels], classes=public.classes)


def masked_images_like(public: MaskedImages, own: MaskedImages) -> MaskedImages:
    """Same as `images_like`, but the masks are not converted, because their class numbers are the
    same in all data sets."""
    _refuse_other("shape of the images is", public.pixels.shape[1:], own.pixels.shape[1:])
    _codes("class", public.classes, own.classes)
    return replace(own, classes=public.classes)


def table_like(public: Table, own: Table) -> Table:
    """Return `own` with the codes of `public`. Raises DataError if columns differ, or if `own` has
    a class or category that `public` does not have."""
    _refuse_other("target is", public.target_name, own.target_name)
    _refuse_other("numeric columns are", public.numeric_names, own.numeric_names)
    _refuse_other("date columns are", public.date_names, own.date_names)
    _refuse_other("categorical columns are", public.category_names, own.category_names)
    categories = np.array(own.categories)
    for column, name in enumerate(own.category_names):
        known = _codes(f"{name} of", public.vocabularies[column], own.vocabularies[column])
        missing = categories[:, column] < 0
        categories[:, column] = known[categories[:, column]] if len(known) else 0
        categories[missing, column] = -1
    target = own.target
    if public.classes is not None and own.classes is not None:
        target = _codes("class", public.classes, own.classes)[own.target]
    columns = {*public.bases, *own.bases}
    return replace(
        own,
        categories=categories,
        vocabularies=public.vocabularies,
        target=target,
        classes=public.classes,
        bases=public.bases,
        shifts={
            name: float(own.bases.get(name, 0) - public.bases.get(name, 0)) for name in columns
        },
    )


def tokens_like(public: Tokens, own: Tokens) -> Tokens:
    """Return `own`. Raises DataError if the vocabularies differ."""
    _refuse_other("vocabulary size is", public.vocabulary_size, own.vocabulary_size)
    return own


def _refuse_other(what: str, public: Any, own: Any) -> None:
    if public != own:
        raise DataError(
            f"a silo's data must match data.source: the {what} {public} in data.source, but "
            f"{own} in the silo's data"
        )


def _codes(what: str, public: Sequence[str], own: Sequence[str]) -> npt.NDArray[np.int64]:
    """Return the public code of each of the silo's classes or categories, in the order of `own`."""
    code_of = {name: code for code, name in enumerate(public)}
    for name in own:
        if name not in code_of:
            raise DataError(
                f"a silo's data has the {what} {name!r}, which data.source does not have"
            )
    return np.array([code_of[name] for name in own], dtype=np.int64)
