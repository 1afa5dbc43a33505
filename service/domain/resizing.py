"""The slots that a group holds after it has reported its size: pure rules on slices."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

from service.domain.slots import Slice, count

LACKING_PAUSE = timedelta(seconds=2)
"""Before a group that stands by is granted slots again, if it could not take the last ones."""
GROWING_PAUSE = timedelta(seconds=30)
"""The same of one that trains: others may be using the cluster for long."""


class NotItsOwn(ValueError):
    """A group says that it holds what nobody gave it."""


@dataclass(frozen=True)
class Books:
    """What an attempt holds by our books."""

    slices: tuple[Slice, ...]
    """With those of the newest grant."""
    grants: int = 0
    """Number of the newest grant."""
    granted: tuple[Slice, ...] | None = None
    """Its slices, until the group has said what became of them."""


@dataclass(frozen=True)
class Resized:
    books: Books
    pause: timedelta | None
    """Before the next grant; None for none."""


def resized(books: Books, kept: Sequence[Slice], known: int, lacking: int) -> Resized:
    """The books after a group said that it holds `kept` and nothing else.

    `known`: the newest grant that it knew of then. The slots of a newer one are on their way to
    it, and some may be among the kept: all of them stay its own, or they would be given to two.
    NotItsOwn if it can't be so.
    """
    if known > books.grants:
        raise NotItsOwn(f"it knows grant {known}, and there were {books.grants}")
    free = _by_node(books.slices)
    free.subtract(_by_node(kept))
    for node_id, number in free.items():
        if number < 0:
            raise NotItsOwn(f"it holds {-number} slots of {node_id} more than it was given")
    if books.granted is not None and known < books.grants:
        coming = (Slice(p.node_id, min(p.num_workers, free[p.node_id])) for p in books.granted)
        slices = (*kept, *(part for part in coming if part.num_workers))
        return Resized(Books(slices, books.grants, books.granted), None)
    after = Books(tuple(kept), books.grants)
    if books.granted is None or count(kept) > count(books.slices) - count(books.granted):
        return Resized(after, None)
    return Resized(after, LACKING_PAUSE if lacking else GROWING_PAUSE)


def _by_node(slices: Sequence[Slice]) -> Counter[str]:
    total: Counter[str] = Counter()
    for part in slices:
        total[part.node_id] += part.num_workers
    return total
