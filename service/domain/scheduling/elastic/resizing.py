"""The slots that a group holds after it has reported its size: pure rules on slices."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

from ray_workers.shared.contracts import Slice
from service.domain.scheduling.placement.slots import count

LACKING_PAUSE = timedelta(seconds=2)
"""Before a group that stands by is granted slots again, if it could not take the last ones."""
GROWING_PAUSE = timedelta(seconds=30)
"""The same of one that trains: others may be using the cluster for long."""
RECALL_LIMIT = timedelta(minutes=2)
"""For a group to report what it holds after it was asked for slots. It takes seconds, and more than
this only where processes can't be ended or nobody listens."""
KEEPING_PAUSE = timedelta(minutes=10)
"""Before a group is asked for slots again that kept all of the last ones, or did not answer."""


class NotItsOwn(ValueError):
    """A group reports slots that it was never given."""


@dataclass(frozen=True)
class Holding:
    """The slots that an attempt has, as the service records them."""

    slices: tuple[Slice, ...]
    """With those of the newest grant."""
    grants: int = 0
    """Number of the newest grant."""
    granted: tuple[Slice, ...] | None = None
    """Slices of the newest grant, until the group has reported which of them it took."""


@dataclass(frozen=True)
class Resized:
    holding: Holding
    pause: timedelta | None
    """Before the next grant; None for none."""


def resized(holding: Holding, kept: Sequence[Slice], known: int, lacking: int) -> Resized:
    """The holding after a group reported that it holds `kept` and nothing else.

    known: the newest grant that the group knew of then. The slots of a newer one are on their way
    to the group, and some may be among the kept: all of them stay its own, or two attempts would
    be given the same slots. NotItsOwn if the report can't be true.
    """
    if known > holding.grants:
        raise NotItsOwn(f"it knows grant {known}, and there were {holding.grants}")
    free = _by_node(holding.slices)
    free.subtract(_by_node(kept))
    for node_id, number in free.items():
        if number < 0:
            raise NotItsOwn(f"it holds {-number} slots of {node_id} more than it was given")
    granted = holding.granted
    if granted is not None and known < holding.grants:
        coming = (Slice(p.node_id, min(p.num_workers, free[p.node_id])) for p in granted)
        slices = (*kept, *(part for part in coming if part.num_workers))
        return Resized(Holding(slices, holding.grants, granted), None)
    after = Holding(tuple(kept), holding.grants)
    if granted is None or count(kept) > count(holding.slices) - count(granted):
        return Resized(after, None)
    return Resized(after, LACKING_PAUSE if lacking else GROWING_PAUSE)


def spare(slices: Sequence[Slice], least: int) -> tuple[Slice, ...]:
    """The slices without which a group still has so many workers, the newest first. A slice is
    given back as a whole: its workers are one placement group, which can't be resized."""
    left, found = count(slices), []
    for part in reversed(slices):
        if left - part.num_workers >= least:
            left -= part.num_workers
            found.append(part)
    return tuple(found)


def _by_node(slices: Sequence[Slice]) -> Counter[str]:
    total: Counter[str] = Counter()
    for part in slices:
        total[part.node_id] += part.num_workers
    return total
