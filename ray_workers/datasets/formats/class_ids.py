"""Determine which classes the pixels of masks represent. Pixels contain class indices or, for two
classes, black and white."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ray_workers.datasets.core.errors import broken
from ray_workers.datasets.formats.prepared import Workshop

WHITE = 255
"""Value of white. In masks that contain only 0 and this value, white represents class 1."""
BLOCK_BYTES = 8 << 20


def note(seen: dict[int, str], mask: npt.NDArray[Any], location: str) -> None:
    """For each value, record the first mask that contains the value. Raises DataError if a value
    does not fit in a byte."""
    for value in np.unique(mask).tolist():
        if not 0 <= value <= WHITE:
            raise broken(location, f"has a pixel with the value {value}; {_MEANING}")
        seen.setdefault(int(value), location)


def settle(shop: Workshop, seen: Mapping[int, str], given: Sequence[str] | None) -> tuple[str, ...]:
    """Convert the written masks to class indices in place, and return the names of the classes.
    seen: all values in the masks, as recorded by `note`. given: `data.classes`. Raises DataError.
    """
    if len(seen) < 2:
        (value,) = seen
        raise broken(
            shop.location,
            f"has only one class, but needs two: every pixel of its masks is {value}",
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
            f"has a pixel with the value {highest}, but data.classes lists {len(given)} classes, "
            f"0 to {len(given) - 1}",
        )
    if highest == WHITE:
        raise broken(seen[WHITE], f"has a pixel with the value {WHITE}; {_MEANING}")
    return tuple(given or map(str, range(highest + 1)))


_MEANING = (
    f"the pixels of masks must be class indices from 0 to {WHITE - 1}, or all be 0 or {WHITE}"
)
