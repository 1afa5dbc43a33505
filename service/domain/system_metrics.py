"""Samples of system metrics: many series with common times. Packing, joining and downsampling."""

from __future__ import annotations

import json
import math
import struct
import sys
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from service.domain.series import Series

RANKS_OF_ROW = 64
"""Number of ranks whose metrics are stored in the same rows. To read the metrics of one rank, only
the rows that it shares are read."""
LONE_SAMPLES = 64
"""Number of samples that are first stored in separate rows, and then joined into one row."""
MAX_SAMPLES = 1024
"""Maximum number of samples stored for a job. If this number is exceeded, each pair of samples is
replaced by its mean."""
SAMPLES_OF_ROW = 128


@dataclass(frozen=True)
class SystemSamples:
    """`times` are increasing Unix times in seconds. `columns` contains, for each series, a value or
    NaN for each time."""

    times: Sequence[int]
    columns: Mapping[Series, Sequence[float]]

    def of(self, start: int, stop: int) -> SystemSamples:
        """Return the samples from index `start` to `stop`, exclusive."""
        columns = {series: values[start:stop] for series, values in self.columns.items()}
        return SystemSamples(self.times[start:stop], columns)


def first_rank(rank: int) -> int:
    """Return the lowest rank that shares rows with `rank`."""
    return rank - rank % RANKS_OF_ROW


def pack(samples: SystemSamples) -> bytes:
    """Encode the samples as a line of JSON that lists the series, followed by the times as int64
    and the values as float32, both little-endian."""
    keys: dict[int, list[str]] = {}
    for key, rank in samples.columns:
        keys.setdefault(rank, []).append(key)
    alike: dict[tuple[str, ...], list[int]] = {}
    for rank, of_rank in keys.items():
        alike.setdefault(tuple(of_rank), []).append(rank)
    head = json.dumps([len(samples.times), list(alike.items())], separators=(",", ":"))
    values = array("f")
    for names, ranks in alike.items():
        for rank in ranks:
            for key in names:
                values.extend(samples.columns[key, rank])
    if sys.byteorder == "big":
        values.byteswap()
    times = struct.pack(f"<{len(samples.times)}q", *samples.times)
    return b"".join((head.encode(), b"\n", times, values.tobytes()))


def unpack(row: bytes, rank: int | None = None) -> SystemSamples:
    """Return the samples of a row, for all ranks or for one rank."""
    head, _, data = row.partition(b"\n")
    num_samples, alike = json.loads(head)
    times = struct.unpack_from(f"<{num_samples}q", data)
    values = array("f")
    values.frombytes(data[8 * num_samples :])
    if sys.byteorder == "big":
        values.byteswap()
    columns: dict[Series, Sequence[float]] = {}
    at = 0
    for names, ranks in alike:
        for each in ranks:
            for key in names:
                if rank is None or each == rank:
                    columns[key, each] = values[at : at + num_samples].tolist()
                at += num_samples
    return SystemSamples(times, columns)


def joined(parts: Iterable[SystemSamples]) -> SystemSamples:
    """Return all samples in the order of their times, regardless of the order of the parts, because
    the clocks of attempts can differ. If several samples have the same time, the first sample is
    kept."""
    columns: dict[Series, list[float]] = {}
    times: list[int] = []
    for part in parts:
        for series, values in part.columns.items():
            column = columns.setdefault(series, [])
            column += [math.nan] * (len(times) - len(column))
            column += values
        times += part.times
    for column in columns.values():
        column += [math.nan] * (len(times) - len(column))
    if all(earlier < later for earlier, later in pairwise(times)):
        return SystemSamples(times, columns)
    first: dict[int, int] = {}
    for index, time in enumerate(times):
        first.setdefault(time, index)
    ordered = sorted(first)
    indices = [first[time] for time in ordered]
    return SystemSamples(
        ordered, {s: [column[p] for p in indices] for s, column in columns.items()}
    )


def thinned(samples: SystemSamples, count: int) -> SystemSamples:
    """Replace every `count` consecutive samples with their mean, at the time of the last sample."""
    if count == 1:
        return samples
    starts = range(0, len(samples.times), count)
    return SystemSamples(
        [samples.times[start : start + count][-1] for start in starts],
        {
            series: [_mean(values[start : start + count]) for start in starts]
            for series, values in samples.columns.items()
        },
    )


def _mean(values: Sequence[float]) -> float:
    mean = sum(values) / len(values)
    if mean == mean:
        return mean
    known = [value for value in values if value == value]
    return sum(known) / len(known) if known else math.nan


def of_report(
    time: int, columns: Iterable[tuple[Sequence[int], Mapping[str, Sequence[float]]]]
) -> dict[int, SystemSamples]:
    """Return one sample for each row, keyed by the row's first rank. Each item of `columns` is
    (ranks, values), where `values` maps each metric to one value for each rank."""
    found: dict[int, dict[Series, list[float]]] = {}
    for ranks, values in columns:
        for index, rank in enumerate(ranks):
            of_row = found.setdefault(first_rank(rank), {})
            of_row.update({(key, rank): [column[index]] for key, column in values.items()})
    return {rank: SystemSamples([time], found[rank]) for rank in sorted(found)}
