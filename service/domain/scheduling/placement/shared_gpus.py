"""Shared GPUs: counts how many GPUs of a node are not shared, and how many have room for another
fraction.

Ray does not report which GPU a fraction is on. It puts each fraction on the fullest GPU that has
room. dray therefore assumes that the fractions on a node are packed in the same way: the largest
first, followed by the fractions of the current plan, with workers of the same job on different
GPUs. If this packing needs more GPUs than the node has, a search looks for another packing. If Ray
packs the fractions differently, a job can fail to start; the start is then retried.
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
    gpus_fitting,
    is_part_of_gpu,
)

UNIT = 10_000
"""Number of Ray's smallest units in one GPU."""
MOST_TRIED = 2_000
"""Maximum number of steps of a search."""

Parts = Sequence[tuple[float, int]]
"""A pair (fraction of a GPU per worker, number of workers) for each job with fractions on a
node."""


def parts_on(node_id: str, holders: Sequence[Holder]) -> list[tuple[float, int]]:
    """Return the fractions that jobs hold on a node. The largest fractions come first, because
    fractions pack best in this order."""
    found = []
    for holder in holders:
        if is_part_of_gpu(holder.bundle):
            slices = by_bundle(holder.slices, holder.bundle, holder.roles)
            there = [part for part, own in slices if part.node_id == node_id and own.get("GPU")]
            found.append((holder.bundle["GPU"], count(there)))
    return sorted([each for each in found if each[1]], reverse=True)


def without_parts(parts: Parts, part: float, number: int, had: int = 0) -> list[tuple[float, int]]:
    """Return the fractions on a node without `number` workers of one job. `had` is the number of
    workers that the job had on the node, or 0 if unknown."""
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
    """Return the fractions on a node after a job that has `had` workers on it gets `more` workers.
    Workers of the same job do not share a GPU."""
    if not had:
        return [*parts, (part, more)]
    return sorted([*without_parts(parts, part, had, had), (part, had + more)], reverse=True)


def with_shared_gpus(free: Mapping[str, float], parts: Parts) -> dict[str, float]:
    """Return a node's free resources with `NUM_GPUS` and `WHOLE_GPUS` added. `parts` are the
    fractions on the node."""
    held = math.fsum(part * number for part, number in parts)
    not_whole = math.floor(free.get("GPU", 0.0) + held + EPSILON)
    left = packed(parts, not_whole)
    return {**free, NUM_GPUS: not_whole, WHOLE_GPUS: 0 if left is None else not_whole - len(left)}


def packed(parts: Parts, num_gpus: int) -> Sequence[float] | None:
    """Return the free share of each GPU that has some of these fractions; None if no packing on
    `num_gpus` was found. As in Ray, each fraction is put on the fullest GPU with room; workers of
    the same job are put on different GPUs."""
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
    """Like `packed`, but searches for a packing. The search starts with the largest fractions;
    among equal fractions, with the jobs that have the most workers."""
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
    """For each way to place `number` more workers of `size` units, yield the sorted free units that
    the GPUs would then have. The fullest GPUs are tried first."""
    fitting = [at for at, free in enumerate(left) if free >= size]
    for chosen in itertools.combinations(fitting, number):
        after = list(left)
        for at in chosen:
            after[at] -= size
        yield tuple(sorted(after))


class SharedGpus:
    """Computes the amounts in a resource vector that depend on the fractions of GPUs on the
    node."""

    def __init__(self, names: Sequence[str], parts: Sequence[float]) -> None:
        """`names` are the names of the amounts; `parts` are the fractions that jobs request."""
        self.gpu_at = names.index("GPU")
        self._number_at = names.index(NUM_GPUS)
        self._whole_at = names.index(WHOLE_GPUS)
        self._capacities = [(names.index(gpus_fitting(part)), part) for part in parts]
        self.indices = frozenset({self._whole_at, *(at for at, _ in self._capacities)})
        """Indices of the amounts that depend on the fractions."""

    def capacity_to_grow(
        self, amounts: Sequence[float], parts: Parts, part: float, had: int
    ) -> int:
        """Return how many more workers with fraction `part` a job can add on the node if it already
        has `had` workers there."""
        number = math.floor(amounts[self._number_at] + EPSILON)
        more = max(0, number - had)
        while more and packed(with_more(parts, part, had, more), number) is None:
            more -= 1
        return more

    def exact(self, amounts: Sequence[float], parts: Parts) -> tuple[float, ...]:
        """Return the amounts of a node on which jobs have these fractions of GPUs."""
        number = math.floor(amounts[self._number_at] + EPSILON)
        left, found = packed(parts, number), list(amounts)
        if left is None:  # Ray placed the fractions, but the search found no way to do so
            for at in self.indices:
                found[at] = 0.0
            return tuple(found)
        found[self._whole_at] = float(number - len(left))
        for at, part in self._capacities:
            found[at] = float(number - sum(each < part - EPSILON for each in left))
        return tuple(found)

    def changed(self, amounts: Sequence[float], before: Parts, after: Parts) -> tuple[float, ...]:
        """Return a node's amounts after its fractions have changed. Parts of these amounts may
        already be promised to jobs."""
        was, becomes = self.exact(amounts, before), self.exact(amounts, after)
        found = list(amounts)
        for at in self.indices:
            found[at] += becomes[at] - was[at]
        return tuple(found)
