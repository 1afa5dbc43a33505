"""Compute the useful share of the time from samples of the steps and of the job's ledger."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median


@dataclass(frozen=True)
class Sample:
    """The number of committed optimizer steps at a time. Repeated steps count once."""

    at: float
    """Seconds on any clock, which must be the same for all samples."""
    step: int


@dataclass(frozen=True)
class Entry:
    """The state of a job's ledger at a time."""

    at: float
    """When it was read."""
    slot_seconds: Mapping[str, float]
    """Slot-seconds by class since the job started."""

    @property
    def total(self) -> float:
        return sum(self.slot_seconds.values())


@dataclass(frozen=True)
class Stretch:
    """A period and the number of steps completed in it."""

    began: float
    took_s: float
    num_steps: int

    @property
    def step_s(self) -> float:
        return self.took_s / self.num_steps


def undisturbed(
    samples: Sequence[Sample], kills: Sequence[float], *, length_s: float, blind_s: float
) -> list[Stretch]:
    """Return periods of at least `length_s` without a kill in them or in the `blind_s` before.

    samples: in chronological order.
    """
    found = []
    for first, last in _cut(samples, length_s):
        hit = any(first.at - blind_s <= kill <= last.at for kill in kills)
        if not hit and last.step > first.step:
            found.append(Stretch(first.at, last.at - first.at, last.step - first.step))
    return found


def _cut(samples: Sequence[Sample], length_s: float) -> Iterator[tuple[Sample, Sample]]:
    first = samples[0]
    for sample in samples:
        if sample.at - first.at >= length_s:
            yield first, sample
            first = sample


def counted(
    samples: Sequence[Sample], edges: Sequence[float], step_s: float
) -> list[tuple[float, float]]:
    """Return (seconds that the steps take without kills, elapsed seconds) between the edges.

    samples, edges: in chronological order. step_s: seconds per step without kills.
    """
    times = [sample.at for sample in samples]
    at_edges = [samples[min(bisect_left(times, edge), len(samples) - 1)] for edge in edges]
    return [
        ((last.step - first.step) * step_s, last.at - first.at)
        for first, last in pairwise(at_edges)
    ]


def booked(entries: Sequence[Entry], edges: Sequence[float]) -> list[tuple[float, float]]:
    """Return (useful slot-seconds, all slot-seconds) in the ledger, between its entries at the
    edges."""
    return [
        (last.slot_seconds["useful"] - first.slot_seconds["useful"], last.total - first.total)
        for first, last in _between(entries, edges)
    ]


def classes(entries: Sequence[Entry], edges: Sequence[float]) -> dict[str, float]:
    """Return slot-seconds by class from the first edge to the last."""
    ((first, last),) = _between(entries, [edges[0], edges[-1]])
    return {name: last.slot_seconds[name] - first.slot_seconds[name] for name in last.slot_seconds}


def _between(entries: Sequence[Entry], edges: Sequence[float]) -> list[tuple[Entry, Entry]]:
    """Return pairs of the entries nearest to the edges. The ledger is reported only every few
    seconds."""
    at_edges = [min(entries, key=lambda entry: abs(entry.at - edge)) for edge in edges]
    return list(pairwise(at_edges))


def step_time(stretches: Sequence[Stretch], began: float, ended: float) -> float:
    """Return the seconds per step, from the periods that began within the given time, to compensate
    for changes in the machine's speed. Raises ValueError if there are none."""
    taken = [each.step_s for each in stretches if began <= each.began < ended]
    if not taken:
        raise ValueError("no period without kills was long enough")
    return median(taken)
