"""How many slots an attempt held at each point in time, and which share of the slot-seconds lies in
a period, or in each of several periods."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise


@dataclass(frozen=True)
class SlotHistory:
    """The slots of an attempt between two times. A group can change its number of slots."""

    since: datetime
    until: datetime
    sizes: Sequence[Sequence[float]] | None
    """Pairs of a time in seconds since 1970 and the number of slots from then on, in the order of
    time. The first number also applies to the time before it. None if the number is constant."""

    def share(self, since: datetime, until: datetime) -> float:
        """Return the fraction of the slot-seconds that lies between these times; 0 if there are no
        slot-seconds."""
        first, last = since.timestamp(), until.timestamp()
        total = inside = 0.0
        for begin, end, num in self._pieces():
            total += num * (end - begin)
            inside += num * max(0.0, min(end, last) - max(begin, first))
        return inside / total if total else 0.0

    def shares(self, bounds: Sequence[int]) -> dict[int, float]:
        """Return the fraction of the slot-seconds in each period between two consecutive bounds,
        keyed by the index of its first bound. Periods without slot-seconds are left out.

        bounds: Unix times in seconds, in ascending order.
        """
        pieces = list(self._pieces())
        total = sum(num * (end - begin) for begin, end, num in pieces)
        found: dict[int, float] = {}
        for begin, end, num in pieces:
            index = max(0, bisect_right(bounds, begin) - 1)
            while total and index < len(bounds) - 1 and bounds[index] < end:
                inside = min(end, bounds[index + 1]) - max(begin, bounds[index])
                found[index] = found.get(index, 0.0) + num * inside / total
                index += 1
        return {index: share for index, share in found.items() if share > 0}

    def elapsed_s(self, since: datetime, until: datetime) -> float:
        """Return how much of the time lies between these times, in seconds."""
        return max(0.0, (min(self.until, until) - max(self.since, since)).total_seconds())

    def _pieces(self) -> Iterator[tuple[float, float, float]]:
        """Yield (begin, end, number of slots) of each period in which slots were held."""
        sizes = self.sizes or [(0.0, 1)]
        changes = [self.since.timestamp(), *(at for at, _ in sizes[1:]), self.until.timestamp()]
        for (begin, end), (_, num) in zip(pairwise(changes), sizes, strict=True):
            yield begin, end, num
