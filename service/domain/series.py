"""Series of metric values: how a chunk of one is packed, and how many become few."""

from __future__ import annotations

import math
import sys
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

CHUNK_POINTS = 1024
"""Points after which a chunk is closed and the next one begun."""

Points = tuple[list[int], list[float]]
"""(steps, values), equally long, steps rising."""


def pack(steps: Iterable[int], values: Iterable[float]) -> bytes:
    """All steps as little-endian int64, then all values as little-endian IEEE doubles.

    Exact for every double, NaN and the infinities included. Steps must fit 63 bits.
    """
    packed_steps, packed_values = array("q", steps), array("d", values)
    if len(packed_steps) != len(packed_values):
        raise ValueError("steps and values differ in length")
    if sys.byteorder == "big":
        packed_steps.byteswap()
        packed_values.byteswap()
    return packed_steps.tobytes() + packed_values.tobytes()


def unpack(blob: bytes) -> Points:
    half = len(blob) // 2
    steps, values = array("q"), array("d")
    steps.frombytes(blob[:half])
    values.frombytes(blob[half:])
    if sys.byteorder == "big":
        steps.byteswap()
        values.byteswap()
    return steps.tolist(), values.tolist()


@dataclass(frozen=True)
class Summary:
    """What a reader of a long series needs of a chunk without its values."""

    count: int
    first: tuple[int, float]
    last: tuple[int, float]
    low: tuple[int, float] | None
    """Step and value of the minimum; None if every value is NaN."""
    high: tuple[int, float] | None
    nan_step: int | None
    """The first step whose value is NaN."""

    def points(self) -> list[tuple[int, float]]:
        """The extremes in order of steps, each step once."""
        chosen = {self.first[0]: self.first[1], self.last[0]: self.last[1]}
        if self.nan_step is not None:
            chosen[self.nan_step] = math.nan
        for extreme in (self.low, self.high):
            if extreme is not None:
                chosen[extreme[0]] = extreme[1]
        return sorted(chosen.items())


def summarise(steps: Sequence[int], values: Sequence[float]) -> Summary:
    """Summary of at least one point. A NaN is no extreme, an infinity is."""
    nan_at = next((i for i, value in enumerate(values) if value != value), None)
    numbers = [i for i, value in enumerate(values) if value == value]
    low = min(numbers, key=values.__getitem__, default=None)
    high = max(numbers, key=values.__getitem__, default=None)
    return Summary(
        count=len(steps),
        first=(steps[0], values[0]),
        last=(steps[-1], values[-1]),
        low=None if low is None else (steps[low], values[low]),
        high=None if high is None else (steps[high], values[high]),
        nan_step=None if nan_at is None else steps[nan_at],
    )


def downsample(steps: Sequence[int], values: Sequence[float], max_points: int) -> Points:
    """At most `max_points` (1 or more) of the points, with the first, the last and the extremes.

    The points between the first and the last are cut into equal buckets by index; each gives its
    minimum and its maximum and, if it has one, its first NaN.
    """
    count = len(steps)
    if count <= max_points:
        return list(steps), list(values)
    if max_points == 1:
        return [steps[-1]], [values[-1]]
    has_nan = any(value != value for value in values)
    buckets = (max_points - 2) // (3 if has_nan else 2)
    chosen = {0, count - 1}
    inner = count - 2
    for bucket in range(buckets):
        begin = 1 + bucket * inner // buckets
        end = 1 + (bucket + 1) * inner // buckets
        numbers: Sequence[int] = range(begin, end)
        if has_nan:
            numbers = [i for i in numbers if values[i] == values[i]]
            chosen.update([i for i in range(begin, end) if values[i] != values[i]][:1])
        if numbers:
            chosen.add(min(numbers, key=values.__getitem__))
            chosen.add(max(numbers, key=values.__getitem__))
    kept = sorted(chosen)
    return [steps[i] for i in kept], [values[i] for i in kept]
