"""What share of the time was of use: pure, from looks at the steps and at the job's ledger."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median


@dataclass(frozen=True)
class Look:
    """How many optimizer steps were committed, done again ones counted once."""

    at: float
    """Seconds by any clock, the same for all that is compared."""
    step: int


@dataclass(frozen=True)
class Entry:
    """What a job's ledger said."""

    at: float
    """When it was seen to say so."""
    slot_seconds: Mapping[str, float]
    """By class, since the job began."""

    @property
    def total(self) -> float:
        return sum(self.slot_seconds.values())


@dataclass(frozen=True)
class Stretch:
    """A time in which steps were taken."""

    began: float
    took_s: float
    num_steps: int

    @property
    def step_s(self) -> float:
        return self.took_s / self.num_steps


def undisturbed(
    looks: Sequence[Look], kills: Sequence[float], *, length_s: float, blind_s: float
) -> list[Stretch]:
    """Stretches of at least `length_s` in which nobody was killed, nor `blind_s` before.

    looks: in order of time.
    """
    found = []
    for first, last in _cut(looks, length_s):
        hit = any(first.at - blind_s <= kill <= last.at for kill in kills)
        if not hit and last.step > first.step:
            found.append(Stretch(first.at, last.at - first.at, last.step - first.step))
    return found


def _cut(looks: Sequence[Look], length_s: float) -> Iterator[tuple[Look, Look]]:
    first = looks[0]
    for look in looks:
        if look.at - first.at >= length_s:
            yield first, look
            first = look


def counted(
    looks: Sequence[Look], edges: Sequence[float], step_s: float
) -> list[tuple[float, float]]:
    """(seconds that its steps take where nobody is killed, seconds it had), between the edges.

    looks, edges: in order of time. step_s: of a step where nobody is killed.
    """
    times = [look.at for look in looks]
    at_edges = [looks[min(bisect_left(times, edge), len(looks) - 1)] for edge in edges]
    return [
        ((last.step - first.step) * step_s, last.at - first.at)
        for first, last in pairwise(at_edges)
    ]


def booked(entries: Sequence[Entry], edges: Sequence[float]) -> list[tuple[float, float]]:
    """(useful slot-seconds, all slot-seconds) by the ledger, between its entries at the edges."""
    return [
        (last.slot_seconds["useful"] - first.slot_seconds["useful"], last.total - first.total)
        for first, last in _between(entries, edges)
    ]


def classes(entries: Sequence[Entry], edges: Sequence[float]) -> dict[str, float]:
    """Slot-seconds by class from the first edge to the last."""
    ((first, last),) = _between(entries, [edges[0], edges[-1]])
    return {name: last.slot_seconds[name] - first.slot_seconds[name] for name in last.slot_seconds}


def _between(entries: Sequence[Entry], edges: Sequence[float]) -> list[tuple[Entry, Entry]]:
    """The ledger is told now and then: each edge is moved to the entry next to it."""
    at_edges = [min(entries, key=lambda entry: abs(entry.at - edge)) for edge in edges]
    return list(pairwise(at_edges))


def step_time(stretches: Sequence[Stretch], began: float, ended: float) -> float:
    """Seconds of one step, by the stretches that began in a time, so that a machine that slows
    down does not matter. ValueError if there is none."""
    taken = [each.step_s for each in stretches if began <= each.began < ended]
    if not taken:
        raise ValueError("nobody was left alone for long enough")
    return median(taken)
