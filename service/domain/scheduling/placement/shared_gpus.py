"""GPUs of which jobs have parts: how many are whole, and how many have room for another part.

Ray does not say on which GPU a part is, and puts it on the fullest one that has room. So the parts
on a node are taken to be packed like that, the largest first, and those of a plan after them;
workers of one job are on different GPUs. If Ray has them on more GPUs, a start fails, and is tried
again.
"""

from __future__ import annotations

from collections.abc import Sequence

from service.domain.scheduling.placement.slots import EPSILON, NUM_GPUS, WHOLE_GPUS, Parts, packed

ROOM_FOR = "GPUs with room for "
"""The beginning of the name of a resource: how many GPUs have room for a part of this size."""


def room_for(part: float) -> str:
    return f"{ROOM_FOR}{part:g}"


class SharedGpus:
    """Where vectors of amounts have what depends on the parts of a node."""

    def __init__(self, names: Sequence[str], parts: Sequence[float]) -> None:
        """names: of the amounts. parts: the sizes for which jobs ask."""
        self._number_at = names.index(NUM_GPUS)
        self._whole_at = names.index(WHOLE_GPUS)
        self._rooms = [(names.index(room_for(part)), part) for part in parts]
        self.places = frozenset({self._whole_at, *(at for at, _ in self._rooms)})
        """The places of the amounts that depend on the parts."""

    def exact(self, amounts: Sequence[float], parts: Parts) -> tuple[float, ...]:
        """The amounts of a node with these parts of GPUs."""
        number, left = amounts[self._number_at], packed(parts)
        found = list(amounts)
        if len(left) > number + EPSILON:  # they are there, but not as they are packed here
            for at in self.places:
                found[at] = 0.0
            return tuple(found)
        found[self._whole_at] = number - len(left)
        for at, part in self._rooms:
            found[at] = number - sum(each < part - EPSILON for each in left)
        return tuple(found)

    def changed(self, amounts: Sequence[float], before: Parts, after: Parts) -> tuple[float, ...]:
        """The amounts of a node whose parts become others; some of the amounts may be set aside."""
        was, becomes = self.exact(amounts, before), self.exact(amounts, after)
        found = list(amounts)
        for at in self.places:
            found[at] += becomes[at] - was[at]
        return tuple(found)
