"""The classes in the pixels of masks: class numbers, or black and white for two classes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ray_workers.datasets.core.errors import broken
from ray_workers.datasets.formats.prepared import Workshop

WHITE = 255
"""This value stands for 1 in masks that have no other value than it and 0."""
BLOCK_BYTES = 8 << 20


def note(seen: dict[int, str], mask: npt.NDArray[Any], place: str) -> None:
    """Record for each value the first mask that has it. Raises DataError if it is not a byte."""
    for value in np.unique(mask).tolist():
        if not 0 <= value <= WHITE:
            raise broken(place, f"has a pixel of {value}; {_MEANING}")
        seen.setdefault(int(value), place)


def settle(shop: Workshop, seen: Mapping[int, str], given: Sequence[str] | None) -> tuple[str, ...]:
    """Convert the written masks to class numbers, in place, and return the names of the classes.

    seen: all their values, as `note` recorded them. given: `data.classes`. Raises DataError.
    """
    if len(seen) < 2:
        (value,) = seen
        raise broken(
            shop.place,
            f"has one class only: every pixel of its masks is {value}; it needs two",
        )
    if set(seen) == {0, WHITE} and (given is None or len(given) == 2):
        masks = np.load(shop.output / "masks.npy", mmap_mode="r+")
        step = max(1, BLOCK_BYTES // masks[0].nbytes)
        for first in range(0, len(masks), step):
            masks[first : first + step] //= WHITE
        masks.flush()
        return tuple(given or ("0", "1"))
    highest = max(seen)
    if given is not None and highest >= len(given):
        raise broken(
            seen[highest],
            f"has a pixel of {highest}, but data.classes names {len(given)} classes, which are 0 "
            f"to {len(given) - 1}",
        )
    if highest == WHITE:
        raise broken(seen[WHITE], f"has a pixel of {WHITE}; {_MEANING}")
    return tuple(given or map(str, range(highest + 1)))


_MEANING = (
    f"the pixels of masks are numbers of classes, 0 to {WHITE - 1}, or all of them are 0 or {WHITE}"
)
