"""Encode updates as integers in a ring, so that masks cancel out exactly and sums do not depend on
their order."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from dray.secure_aggregation.messages import missing_package

try:
    import numpy as np
    import numpy.typing as npt
except ModuleNotFoundError as error:
    raise missing_package(error) from error

from dray.secure_aggregation.keys import keystream
from dray.secure_aggregation.messages import MaskingSettings

Ring = npt.NDArray[Any]
"""Unsigned 32-bit or 64-bit little-endian integers, added modulo 2**bits."""
Values = npt.NDArray[np.floating[Any]]
LEAST_LEVELS = 2**15
"""Minimum number of levels between 0 and the limit. With fewer levels, values far below the limit
would be rounded to 0."""


@dataclass(frozen=True)
class Aggregate:
    """The result of a round."""

    sums: npt.NDArray[np.float64]
    """The weighted sum of each value over the clients, with shape (num_values,)."""
    weight: int
    """The sum of the weights."""
    clients: tuple[str, ...]
    """The clients whose updates are in the sum."""

    @property
    def mean(self) -> npt.NDArray[np.float64]:
        return self.sums / self.weight


@dataclass(frozen=True)
class FixedPoint:
    """Encodes values as numbers in the ring, and decodes their sum.

    A value is clipped to the limit, multiplied by a power of two, rounded, and multiplied by the
    client's weight. The weight itself is appended as an additional number, so that it is masked
    like the values. The power of two is the largest for which the sum over all clients can't
    overflow.
    """

    num_values: int
    limit: float
    bits: int
    max_total_weight: int

    @classmethod
    def of(cls, settings: MaskingSettings, num_clients: int) -> FixedPoint:
        """Return the encoding for a round. Raises ValueError if `settings.bits` is too small for
        the values of the round."""
        most = settings.max_weight * num_clients
        found = cls(settings.num_values, settings.limit, settings.bits, most)
        if most >= 2 ** (settings.bits - 1) or found.limit * found.scale < LEAST_LEVELS:
            raise ValueError(
                f"{settings.bits} bits are too few for values up to {settings.limit:g} from "
                f"{num_clients} clients with weights up to {settings.max_weight}: use more bits, "
                "a lower limit, or smaller weights"
            )
        return found

    @cached_property
    def scale(self) -> float:
        # Rounding adds at most one half, so one bit is reserved for it.
        most = math.log2(self.max_total_weight) + max(0.0, math.log2(self.limit))
        return 2.0 ** (self.bits - 2 - math.ceil(most))

    @property
    def max_error(self) -> float:
        """Upper bound on the error of a mean of clipped values, not including float64 rounding."""
        return 0.5 / self.scale

    @property
    def dtype(self) -> np.dtype[Any]:
        return np.dtype(f"<u{self.bits // 8}")

    @staticmethod
    def check(values: Values, num_values: int) -> None:
        """Raises ValueError if the values can't be encoded."""
        if values.shape != (num_values,):
            raise ValueError(f"an update has the shape {values.shape}, not ({num_values},)")
        if not np.isfinite(values).all():
            raise ValueError("an update contains values that are not finite")

    def encode(self, values: Values, weight: int) -> Ring:
        """Encode (num_values,) values, validated with `check`, as (num_values + 1,) numbers."""
        whole = np.empty(self.num_values + 1, np.int64)
        exact = np.clip(values.astype(np.float64), -self.limit, self.limit)
        exact *= self.scale
        whole[:-1] = np.rint(exact, out=exact)
        whole[:-1] *= weight
        whole[-1] = weight
        return whole.astype(self.dtype)  # modulo 2**bits

    def decode(self, total: Ring, clients: tuple[str, ...]) -> Aggregate:
        signed = total.view(self.dtype.str.replace("u", "i")).astype(np.int64)
        return Aggregate(signed[:-1] / self.scale, int(signed[-1]), clients)

    def read(self, masked: bytes) -> Ring:
        """Return the numbers in a masked_input message."""
        return np.frombuffer(masked, self.dtype)

    def zeros(self) -> Ring:
        return np.zeros(self.num_values + 1, self.dtype)

    def add_mask(self, total: Ring, seed: bytes, sign: Literal[1, -1]) -> None:
        """Generate a mask from `seed`, and add it to `total` or subtract it, in place."""
        apply = np.add if sign == 1 else np.subtract
        start = 0
        for piece in keystream(seed, total.nbytes):
            mask = np.frombuffer(piece, self.dtype)
            part = total[start : start + len(mask)]
            apply(part, mask, out=part)
            start += len(mask)
