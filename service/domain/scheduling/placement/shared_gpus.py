"""GPUs of which jobs have parts: how many are whole, and how many have room for another part.

Ray does not say on which GPU a part is, and puts it on the fullest one that has room. So the parts
on a node are taken to be packed like that, the largest first, and those of a plan after them;
workers of one job are on different GPUs. Where parts packed like that need more GPUs than there
are, a search finds GPUs for them. If Ray has them in another way, a start fails, and is tried
again.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence

from ray_workers.shared.contracts import by_bundle
from service.domain.scheduling.placement.slots import (
    EPSILON,
    NUM_GPUS,
    WHOLE_GPUS,
    Holder,
    count,
    is_part_of_gpu,
    room_for,
)

UNIT = 10_000
"""Ray counts a GPU in so many units."""
MOST_TRIED = 2_000
"""Steps of a search for GPUs."""

Parts = Sequence[tuple[float, int]]
"""Of each job that has parts of GPUs on a node, the part of a worker and their number."""


def parts_on(node_id: str, holders: Sequence[Holder]) -> list[tuple[float, int]]:
    """Of each holder that has parts of GPUs on a node, the part of a worker and their number; the
    largest parts first, so that they are packed well."""
    found = []
    for holder in holders:
        if is_part_of_gpu(holder.bundle):
            slices = by_bundle(holder.slices, holder.bundle, holder.roles)
            there = [part for part, own in slices if part.node_id == node_id and own.get("GPU")]
            found.append((holder.bundle["GPU"], count(there)))
    return sorted([each for each in found if each[1]], reverse=True)


def without_parts(parts: Parts, part: float, number: int, had: int = 0) -> list[tuple[float, int]]:
    """The parts on a node, without those of so many workers of one job. had: how many workers it
    had there, 0 where that is unknown."""
    left = list(parts)
    if (part, had) in left:
        left[left.index((part, had))] = (part, had - number)
        return [(size, there) for size, there in left if there]
    fitting = [at for at, (size, there) in enumerate(left) if size == part and there >= number]
    if fitting:
        at = min(fitting, key=lambda at: left[at][1])
        left[at] = (part, left[at][1] - number)
    return [(size, there) for size, there in left if there]


def with_more(parts: Parts, part: float, had: int, more: int) -> list[tuple[float, int]]:
    """The parts on a node after a job that has some workers there gets more: no two of all these
    are on one GPU."""
    if not had:
        return [*parts, (part, more)]
    return sorted([*without_parts(parts, part, had, had), (part, had + more)], reverse=True)


def with_shared_gpus(free: Mapping[str, float], parts: Parts) -> dict[str, float]:
    """The free resources of a node with `NUM_GPUS` and `WHOLE_GPUS`; parts: those on the node."""
    held = math.fsum(part * number for part, number in parts)
    not_whole = math.floor(free.get("GPU", 0.0) + held + EPSILON)
    left = packed(parts, not_whole)
    return {**free, NUM_GPUS: not_whole, WHOLE_GPUS: 0 if left is None else not_whole - len(left)}


def packed(parts: Parts, num_gpus: int) -> Sequence[float] | None:
    """The share that is left of each GPU with these parts; None if they were not found to fit on so
    many GPUs. In their order, each part goes to the fullest GPU that has room, as Ray has it, and
    workers of one job to different ones."""
    left: list[float] = []
    for part, number in parts:
        fitting = sorted((free, at) for at, free in enumerate(left) if free >= part - EPSILON)
        chosen = [at for _, at in fitting[:number]]
        for at in chosen:
            left[at] -= part
        left += [1.0 - part] * (number - len(chosen))
    return left if len(left) <= num_gpus else _searched(tuple(parts), num_gpus)


@functools.lru_cache(maxsize=1024)
def _searched(parts: tuple[tuple[float, int], ...], num_gpus: int) -> tuple[float, ...] | None:
    """The same by a search, which begins with the largest parts, and of equal ones with the jobs
    that have most of them."""
    in_units = ((round(part * UNIT), number) for part, number in parts)
    jobs = [(number, size) for size, number in sorted(in_units, reverse=True)]
    if sum(number * size for number, size in jobs) > num_gpus * UNIT:
        return None
    known: set[tuple[int, tuple[int, ...]]] = set()
    open_ = [_ways((UNIT,) * num_gpus, *jobs[0])]
    for _ in range(MOST_TRIED):
        left = next(open_[-1], None)
        if left is None:
            open_.pop()
            if not open_:
                return None
        elif len(open_) == len(jobs):
            return tuple(each / UNIT for each in left if each < UNIT)
        elif (len(open_), left) not in known:
            known.add((len(open_), left))
            open_.append(_ways(left, *jobs[len(open_)]))
    return None


def _ways(left: tuple[int, ...], number: int, size: int) -> Iterator[tuple[int, ...]]:
    """Yields what is left of the GPUs, in order, for each way to place so many workers more: the
    fullest GPUs first."""
    fitting = [at for at, free in enumerate(left) if free >= size]
    for chosen in itertools.combinations(fitting, number):
        after = list(left)
        for at in chosen:
            after[at] -= size
        yield tuple(sorted(after))


class SharedGpus:
    """Where vectors of amounts have what depends on the parts of a node."""

    def __init__(self, names: Sequence[str], parts: Sequence[float]) -> None:
        """names: of the amounts. parts: the sizes for which jobs ask."""
        self.gpu_at = names.index("GPU")
        self._number_at = names.index(NUM_GPUS)
        self._whole_at = names.index(WHOLE_GPUS)
        self._rooms = [(names.index(room_for(part)), part) for part in parts]
        self.places = frozenset({self._whole_at, *(at for at, _ in self._rooms)})
        """The places of the amounts that depend on the parts."""

    def room_to_grow(self, amounts: Sequence[float], parts: Parts, part: float, had: int) -> int:
        """How many GPUs may have another worker of a job that has this part of some GPUs of the
        node already."""
        number = math.floor(amounts[self._number_at] + EPSILON)
        more = max(0, number - had)
        while more and packed(with_more(parts, part, had, more), number) is None:
            more -= 1
        return more

    def exact(self, amounts: Sequence[float], parts: Parts) -> tuple[float, ...]:
        """The amounts of a node with these parts of GPUs."""
        number = math.floor(amounts[self._number_at] + EPSILON)
        left, found = packed(parts, number), list(amounts)
        if left is None:  # they are there, but were not found to be
            for at in self.places:
                found[at] = 0.0
            return tuple(found)
        found[self._whole_at] = float(number - len(left))
        for at, part in self._rooms:
            found[at] = float(number - sum(each < part - EPSILON for each in left))
        return tuple(found)

    def changed(self, amounts: Sequence[float], before: Parts, after: Parts) -> tuple[float, ...]:
        """The amounts of a node whose parts become others; some of the amounts may be promised."""
        was, becomes = self.exact(amounts, before), self.exact(amounts, after)
        found = list(amounts)
        for at in self.places:
            found[at] += becomes[at] - was[at]
        return tuple(found)
