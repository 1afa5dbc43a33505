"""Pure rules that determine which slices a group holds after it has reported its size."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

from ray_workers.shared.slices import Slice
from service.domain.scheduling.placement.slots import count, rounded_down

LACKING_PAUSE = timedelta(seconds=2)
"""Pause before the next grant to a waiting group that could not use the last grant."""
GROWING_PAUSE = timedelta(seconds=30)
"""Pause before the next grant to a training group that could not use the last grant. Longer than
`LACKING_PAUSE`, because other programs may use the cluster for a long time."""
RECALL_LIMIT = timedelta(minutes=2)
"""Time limit for a group to report its slots after a recall. A group usually reports within a few
seconds, unless processes can't be ended or the supervisor doesn't respond."""
KEEPING_PAUSE = timedelta(minutes=10)
"""Pause before more slots are recalled from a group that kept all recalled slots or did not
respond."""


class NotItsOwn(ValueError):
    """Raised if a group reports slots that it was never granted."""


@dataclass(frozen=True)
class Holding:
    """The slots that an attempt has, as the service records them."""

    slices: tuple[Slice, ...]
    """All slices, including the newest grant."""
    resize_number: int = 0
    """Number of the newest grant."""
    granted: tuple[Slice, ...] | None = None
    """Slices of the newest grant; None once the group has reported which of these slices it
    uses."""


@dataclass(frozen=True)
class Resized:
    holding: Holding
    pause: timedelta | None
    """Pause before the next grant; None for no pause."""


def resized(holding: Holding, kept: Sequence[Slice], known: int, lacking: int) -> Resized:
    """Return the holding after a group has reported that it holds exactly `kept`.

    known: number of the newest grant that the group had received when it reported. The slots of a
    newer grant are on their way to the group, and some of these slots may already be in `kept`. All
    of these slots remain assigned to the group; otherwise, two attempts could get the same slots.
    Raises NotItsOwn if the report can't be true.
    """
    if known > holding.resize_number:
        raise NotItsOwn(
            f"the report refers to grant {known}, but only {holding.resize_number} grants were made"
        )
    free = _by_node(holding.slices)
    free.subtract(_by_node(kept))
    for node_id, number in free.items():
        if number < 0:
            raise NotItsOwn(
                f"the report contains {-number} more slots on node {node_id} than the "
                "group was granted"
            )
    granted = holding.granted
    if granted is not None and known < holding.resize_number:
        coming = (Slice(p.node_id, min(p.num_workers, free[p.node_id])) for p in granted)
        slices = (*kept, *(part for part in coming if part.num_workers))
        return Resized(Holding(slices, holding.resize_number, granted), None)
    after = Holding(tuple(kept), holding.resize_number)
    if granted is None or count(kept) > count(holding.slices) - count(granted):
        return Resized(after, None)
    return Resized(after, LACKING_PAUSE if lacking else GROWING_PAUSE)


def spare(
    slices: Sequence[Slice], least: int, num_parts: int = 1, num_ranks: int | None = None
) -> tuple[Slice, ...]:
    """Return the slices, newest first, that a group can release while keeping `least` workers.
    Slices are released as a whole, because a slice is one placement group, which can't be resized.

    num_parts: number of workers that hold one replica of the model. num_ranks: maximum number of
    workers that train; all others are spares. The slices must be released in the groups that
    `released_together` returns.
    """
    left, found = count(slices), []
    together: list[Slice] = []
    for part in reversed(slices):
        if left - count(together) - part.num_workers >= least:
            together.append(part)
            size = left - count(together)
            if rounded_down(size, num_parts, num_ranks) == size:
                left = size
                found += together
                together = []
    return tuple(found)


def released_together(
    spare: Sequence[Slice], num_workers: int, num_parts: int, num_ranks: int | None = None
) -> list[tuple[Slice, ...]]:
    """Return the smallest groups of spare slices that can be released so that the remaining
    workers, except for the spares, form complete replicas of the model. num_workers: number of
    workers before any release. For the other parameters, see `spare`."""
    found: list[tuple[Slice, ...]] = []
    first = 0
    for at, part in enumerate(spare):
        num_workers -= part.num_workers
        if rounded_down(num_workers, num_parts, num_ranks) == num_workers:
            found.append(tuple(spare[first : at + 1]))
            first = at + 1
    return found


def _by_node(slices: Sequence[Slice]) -> Counter[str]:
    total: Counter[str] = Counter()
    for part in slices:
        total[part.node_id] += part.num_workers
    return total
