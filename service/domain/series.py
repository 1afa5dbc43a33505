"""Metric series: chunks of a single series, rows of several series, and downsampling."""

from __future__ import annotations

import json
import math
import struct
import sys
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ray_workers.shared.frame_fields import TIMES as TIMES

CHUNK_POINTS = 1024
"""Maximum number of points in a chunk."""
BLOCK_POINTS = 64
"""Number of points per block. An outline contains the extremes of each block."""
_BLOCK = struct.Struct("<qdqdq")
"""Step and value of the minimum, step and value of the maximum, first step with a NaN. A step is -1
if there is no such value."""

Points = tuple[list[int], list[float]]
"""(steps, values), with equal lengths and increasing steps."""
Series = tuple[str, int]
"""(key, rank)"""


def times_at(steps: Sequence[int], known: Points) -> list[float]:
    """Return the Unix time of each step. `known` contains one or more points of the series `TIMES`.

    If a step is between two known steps, for example because the series was downsampled, its time
    is interpolated. A step outside the range of known steps gets the time of the nearest step.
    """
    there, times = known
    found = []
    for step in steps:
        at = min(bisect_left(there, step), len(there) - 1)
        if there[at] <= step or at == 0:
            found.append(times[at])
            continue
        share = (step - there[at - 1]) / (there[at] - there[at - 1])
        found.append(times[at - 1] + share * (times[at] - times[at - 1]))
    return found


def pack(steps: Iterable[int], values: Iterable[float]) -> bytes:
    """Return all steps as little-endian int64, then all values as little-endian IEEE doubles.

    Every double, including NaN and infinities, is encoded exactly. Steps must fit in 63 bits.
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


def append(blob: bytes, steps: Sequence[int], values: Sequence[float]) -> bytes:
    """Return `blob` with the given points appended."""
    half = len(blob) // 2
    more = pack(steps, values)
    return b"".join((blob[:half], more[: len(more) // 2], blob[half:], more[len(more) // 2 :]))


def tail(blob: bytes, begin: int) -> Points:
    """Return the points in `blob` starting with index `begin`."""
    half = len(blob) // 2
    return unpack(blob[8 * begin : half] + blob[half + 8 * begin :])


def outline(steps: Sequence[int], values: Sequence[float]) -> bytes:
    """Return the extremes of each block of `BLOCK_POINTS` points. Outlines of consecutive blocks
    can be concatenated."""
    blocks = []
    for begin in range(0, len(steps), BLOCK_POINTS):
        end = begin + BLOCK_POINTS
        part = values[begin:end]
        if not math.isnan(sum(part)):  # no NaN, as in most blocks
            least, greatest = min(part), max(part)
            low_at, high_at = begin + part.index(least), begin + part.index(greatest)
            blocks.append(_BLOCK.pack(steps[low_at], least, steps[high_at], greatest, -1))
            continue
        summary = summarise(steps[begin:end], part)
        low, high = summary.low or (-1, 0.0), summary.high or (-1, 0.0)
        nan_step = -1 if summary.nan_step is None else summary.nan_step
        blocks.append(_BLOCK.pack(*low, *high, nan_step))
    return b"".join(blocks)


def whole_blocks(blob: bytes | None, count: int) -> tuple[bytes, int]:
    """Return the complete blocks of the outline of `count` points, and the number of points in
    these blocks. Returns `(b"", 0)` if there is no outline."""
    full = 0 if blob is None else count // BLOCK_POINTS
    return (blob or b"")[: full * _BLOCK.size], full * BLOCK_POINTS


def outlined(blob: bytes) -> list[tuple[int, float]]:
    """Return the points of an outline in the order of their steps, without duplicates."""
    points: list[tuple[int, float]] = []
    for low_step, low, high_step, high, nan_step in _BLOCK.iter_unpack(blob):
        if nan_step < 0 and low_step >= 0:
            if low_step < high_step:
                points += ((low_step, low), (high_step, high))
            elif high_step < low_step:
                points += ((high_step, high), (low_step, low))
            else:
                points.append((low_step, low))
            continue
        chosen = {} if low_step < 0 else {low_step: low, high_step: high}
        chosen[nan_step] = math.nan
        points += sorted(chosen.items())
    return points


@dataclass(frozen=True)
class Summary:
    """The extremes of a chunk, so that long series can be read without loading all values."""

    count: int
    first: tuple[int, float]
    last: tuple[int, float]
    low: tuple[int, float] | None
    """Step and value of the minimum; None if every value is NaN."""
    high: tuple[int, float] | None
    nan_step: int | None
    """First step whose value is NaN; None if there is no such step."""

    def then(self, later: Summary) -> Summary:
        """Return the summary of these points followed by the later points. If extremes are equal,
        the first one is kept."""
        lows = [one for one in (self.low, later.low) if one is not None]
        highs = [one for one in (self.high, later.high) if one is not None]
        return Summary(
            count=self.count + later.count,
            first=self.first,
            last=later.last,
            low=min(lows, key=lambda point: point[1], default=None),
            high=max(highs, key=lambda point: point[1], default=None),
            nan_step=later.nan_step if self.nan_step is None else self.nan_step,
        )

    def points(self) -> list[tuple[int, float]]:
        """Return the extremes in the order of their steps, without duplicate steps."""
        chosen = {self.first[0]: self.first[1], self.last[0]: self.last[1]}
        if self.nan_step is not None:
            chosen[self.nan_step] = math.nan
        for extreme in (self.low, self.high):
            if extreme is not None:
                chosen[extreme[0]] = extreme[1]
        return sorted(chosen.items())


def summarise(steps: Sequence[int], values: Sequence[float]) -> Summary:
    """Summarise the points of a series, which must not be empty. Infinities count as extremes, but
    NaN does not."""
    nan_at = _first_nan(values)
    if nan_at is None:
        low = values.index(min(values))
        high = values.index(max(values))
        return Summary(
            count=len(steps),
            first=(steps[0], values[0]),
            last=(steps[-1], values[-1]),
            low=(steps[low], values[low]),
            high=(steps[high], values[high]),
            nan_step=None,
        )
    numbers = [i for i, value in enumerate(values) if value == value]
    return Summary(
        count=len(steps),
        first=(steps[0], values[0]),
        last=(steps[-1], values[-1]),
        low=min(((steps[i], values[i]) for i in numbers), key=lambda p: p[1], default=None),
        high=max(((steps[i], values[i]) for i in numbers), key=lambda p: p[1], default=None),
        nan_step=steps[nan_at],
    )


def _first_nan(values: Sequence[float]) -> int | None:
    """Return the index of the first NaN, if any. The search runs only if the sum is NaN, which also
    happens with infinities of both signs."""
    if not math.isnan(sum(values)):
        return None
    return next((i for i, value in enumerate(values) if value != value), None)


def downsample(steps: Sequence[int], values: Sequence[float], max_points: int) -> Points:
    """Return at most `max_points` of the points, including the first, the last and the extremes.

    The points between the first and the last are divided into equal buckets by index. Each bucket
    contributes its minimum, its maximum and, if any, its first NaN. `max_points` must be at least
    1.
    """
    count = len(steps)
    if count <= max_points:
        return list(steps), list(values)
    if max_points == 1:
        return [steps[-1]], [values[-1]]
    has_nan = _first_nan(values) is not None
    buckets = (max_points - 2) // (3 if has_nan else 2)
    chosen = {0, count - 1}
    inner = count - 2
    for bucket in range(buckets):
        begin = 1 + bucket * inner // buckets
        end = 1 + (bucket + 1) * inner // buckets
        part = values[begin:end]
        if has_nan and _first_nan(part) is not None:
            numbers = [i for i in range(begin, end) if values[i] == values[i]]
            chosen.update([i for i in range(begin, end) if values[i] != values[i]][:1])
            if numbers:
                chosen.add(min(numbers, key=values.__getitem__))
                chosen.add(max(numbers, key=values.__getitem__))
        elif part:
            chosen.add(begin + part.index(min(part)))
            chosen.add(begin + part.index(max(part)))
    kept = sorted(chosen)
    return [steps[i] for i in kept], [values[i] for i in kept]


# A row consists of a line of JSON that names the series, followed by little-endian int64 steps and
# IEEE doubles. If several series of a rank have points at the same steps, these steps are stored
# only once.


def pack_row(points: Mapping[Series, Points]) -> bytes:
    """Pack the points into a row, which encodes every double exactly. Series must not be empty."""
    groups: dict[tuple[int, tuple[int, ...]], dict[str, list[float]]] = {}
    for (key, rank), (steps, values) in points.items():
        groups.setdefault((rank, tuple(steps)), {})[key] = values
    head = [[rank, len(steps), list(columns)] for (rank, steps), columns in groups.items()]
    parts = [json.dumps(head, separators=(",", ":")).encode(), b"\n"]
    for (_, at), columns in groups.items():
        numbers = [value for values in columns.values() for value in values]
        parts.append(struct.pack(f"<{len(at)}q{len(numbers)}d", *at, *numbers))
    return b"".join(parts)


def unpack_row(row: bytes, rank: int | None = None) -> dict[Series, Points]:
    """Return the points of a row, for all ranks or for one rank."""
    found: dict[Series, Points] = {}
    head, _, _ = row.partition(b"\n")
    at = len(head) + 1
    for of_rank, num_steps, keys in json.loads(head):
        layout = struct.Struct(f"<{num_steps}q{num_steps * len(keys)}d")
        if rank is None or of_rank == rank:
            numbers = layout.unpack_from(row, at)
            for number, key in enumerate(keys, 1):
                values = numbers[number * num_steps : (number + 1) * num_steps]
                found[key, of_rank] = list(numbers[:num_steps]), list(values)
        at += layout.size
    return found


def join(earlier: dict[Series, Points], later: Mapping[Series, Points]) -> None:
    """Append the points of `later` to `earlier` in place."""
    for series, (steps, values) in later.items():
        before = earlier.setdefault(series, ([], []))
        before[0].extend(steps)
        before[1].extend(values)
