"""Points of many series in one row, until there are enough of them to append to each chunk.

A row is a line of JSON, which names the series, and their numbers after it, little-endian: int64
steps and IEEE doubles. Series of one rank that have points at the same steps share these.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping

from service.domain.series import Points

Series = tuple[str, int]
"""(key, rank)"""


def pack_row(points: Mapping[Series, Points]) -> bytes:
    """The row of these points; exact for every double. Each series has one point at least."""
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
    """The points in a row, of all ranks or of one."""
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
    """Append the later points to the earlier ones, in place."""
    for series, (steps, values) in later.items():
        before = earlier.setdefault(series, ([], []))
        before[0].extend(steps)
        before[1].extend(values)
