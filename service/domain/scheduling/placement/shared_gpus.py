"""Shared GPUs: counts how many GPUs of a node are not shared, and on how many GPUs another fraction
fits.

Ray does not report which GPU a fraction is on, but puts each fraction on the fullest GPU that has
room. dray therefore assumes that the fractions on a node are packed in the same way: the largest
first, followed by the fractions of the current plan, with workers of the same job on different
GPUs. Workers that are asked to leave occupy their GPUs until jobs start in their place, so other
fractions are packed around them. If this packing needs more GPUs than the node has, a search looks
for another packing. If Ray packs the fractions differently, a job can fail to start, and the start
is retried.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from ray_workers.shared.slices import by_bundle
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
"""Number of units into which Ray divides one GPU."""
MOST_TRIED = 2_000
"""Maximum number of steps of a search."""


class Fractions(NamedTuple):
    """The fractions of GPUs that one job has on a node."""

    size: float
    """The fraction of a GPU per worker."""
    number: int
    """Number of workers."""
    num_leaving: int = 0
    """Number of these workers that were asked to leave."""
    is_later: bool = False
    """Whether the job starts only after the workers that were asked to leave have left."""
    job_id: str = ""


Parts = Sequence[Fractions]
"""The fractions on a node, in the order in which they are packed."""
Gpu = tuple[int, tuple[int, ...]]
"""The free units of a GPU, and the indices of the parts that use the rest."""


def sharing(holders: Iterable[Holder]) -> dict[str, list[Holder]]:
    """Return the jobs with fractions of GPUs on each node."""
    found: dict[str, list[Holder]] = {}
    for holder in holders:
        if is_part_of_gpu(holder.bundle):
            for node_id in {part.node_id for part in holder.slices}:
                found.setdefault(node_id, []).append(holder)
    return found


def parts_on(node_id: str, holders: Sequence[Holder]) -> list[Fractions]:
    """Return the fractions that jobs hold on a node. The largest fractions come first, because
    fractions pack best in this order."""
    found = []
    for holder in holders:
        if is_part_of_gpu(holder.bundle):
            slices = by_bundle(holder.slices, holder.bundle, holder.roles)
            there = [part for part, own in slices if part.node_id == node_id and own.get("GPU")]
            found.append(Fractions(holder.bundle["GPU"], count(there), job_id=holder.job_id))
    return sorted([each for each in found if each.number], reverse=True)


def asked_to_leave(parts: Parts, job_id: str, number: int) -> list[Fractions]:
    """Return the fractions on a node after `number` workers of a job are asked to leave. If
    `number` is negative, the request for that many workers is withdrawn."""
    return [
        part._replace(num_leaving=part.num_leaving + number) if part.job_id == job_id else part
        for part in parts
    ]


def with_more(parts: Parts, more: Fractions) -> list[Fractions]:
    """Return the fractions on a node after a job is given more workers. Workers of the same job do
    not share a GPU."""
    found = list(parts)
    for at, each in enumerate(found):
        if each.job_id == more.job_id:
            found[at] = each._replace(number=each.number + more.number)
            return found
    return [*found, more]


def with_shared_gpus(free: Mapping[str, float], parts: Parts) -> dict[str, float]:
    """Return a node's free resources with `NUM_GPUS` and `WHOLE_GPUS` added. `parts` are the
    fractions of GPUs that jobs have on the node."""
    held = math.fsum(part.size * part.number for part in parts)
    not_whole = math.floor(free.get("GPU", 0.0) + held + EPSILON)
    left = packed(parts, not_whole)
    return {**free, NUM_GPUS: not_whole, WHOLE_GPUS: 0 if left is None else not_whole - len(left)}


def packed(parts: Parts, num_gpus: int) -> Sequence[float] | None:
    """Return the free share of each GPU that has some of these fractions, after the workers that
    were asked to leave have left; None if no packing on `num_gpus` was found."""
    gpus: Sequence[Gpu] | None = _on_fullest([], parts, is_later=False)
    if gpus is not None and len(gpus) > num_gpus:
        gpus = _searched(tuple((p.size, 0 if p.is_later else p.number) for p in parts), num_gpus)
    if gpus is not None:
        gpus = _on_fullest(_without_leaving(gpus, parts), parts, is_later=True)
    if gpus is None or len(gpus) > num_gpus:  # assume that all that stay can be on any GPU
        gpus = _searched(tuple((p.size, max(0, p.number - p.num_leaving)) for p in parts), num_gpus)
    return None if gpus is None else [free / UNIT for free, _ in gpus]


def _on_fullest(gpus: Sequence[Gpu], parts: Parts, is_later: bool) -> list[Gpu]:
    """Return the GPUs after Ray has put fractions on them: each fraction is on the fullest GPU with
    room, and workers of the same job are on different GPUs."""
    found = list(gpus)
    for index, part in enumerate(parts):
        if part.is_later == is_later:
            size = round(part.size * UNIT)
            fitting = sorted((free, at) for at, (free, _) in enumerate(found) if free >= size)
            chosen = [at for _, at in fitting[: part.number]]
            for at in chosen:
                free, there = found[at]
                found[at] = free - size, (*there, index)
            found += [(UNIT - size, (index,))] * (part.number - len(chosen))
    return found


def _without_leaving(gpus: Sequence[Gpu], parts: Parts) -> list[Gpu]:
    """Return the GPUs that are still at least partly used after workers have left."""
    found = list(gpus)
    for index, part in enumerate(parts):
        if part.num_leaving:
            there = [at for at, (_, indices) in enumerate(gpus) if index in indices]
            for at in there[-part.num_leaving :]:
                free, indices = found[at]
                found[at] = free + round(part.size * UNIT), indices
    return [gpu for gpu in found if gpu[0] < UNIT]


@functools.lru_cache(maxsize=1024)
def _searched(sizes: tuple[tuple[float, int], ...], num_gpus: int) -> tuple[Gpu, ...] | None:
    """Return the GPUs of any packing of these pairs (fraction of a GPU, number of workers); None if
    no packing was found. The search starts with the largest fractions; among equal fractions, with
    the jobs that have the most workers."""
    in_units = [(round(size * UNIT), number, at) for at, (size, number) in enumerate(sizes)]
    jobs = sorted([each for each in in_units if each[1]], key=lambda each: (-each[0], -each[1]))
    if sum(size * number for size, number, _ in jobs) > num_gpus * UNIT:
        return None
    if not jobs:
        return ()
    known: set[tuple[int, tuple[int, ...]]] = set()
    open_ = [_ways(((UNIT, ()),) * num_gpus, *jobs[0])]
    for _ in range(MOST_TRIED):
        gpus = next(open_[-1], None)
        if gpus is None:
            open_.pop()
            if not open_:
                return None
        elif len(open_) == len(jobs):
            return tuple(gpu for gpu in gpus if gpu[0] < UNIT)
        elif (state := (len(open_), tuple(free for free, _ in gpus))) not in known:
            known.add(state)
            open_.append(_ways(gpus, *jobs[len(open_)]))
    return None


def _ways(gpus: tuple[Gpu, ...], size: int, number: int, index: int) -> Iterator[tuple[Gpu, ...]]:
    """For each way to place `number` workers of `size` units, yield the GPUs, sorted by their free
    units. The fullest GPUs are tried first."""
    fitting = [at for at, (free, _) in enumerate(gpus) if free >= size]
    for chosen in itertools.combinations(fitting, number):
        after = list(gpus)
        for at in chosen:
            free, there = after[at]
            after[at] = free - size, (*there, index)
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
        self, amounts: Sequence[float], parts: Parts, size: float, job_id: str
    ) -> int:
        """Return how many more workers with fraction `size` the job can add on the node."""
        number = math.floor(amounts[self._number_at] + EPSILON)
        more = max(0, number - sum(part.number for part in parts if part.job_id == job_id))
        while (
            more and packed(with_more(parts, Fractions(size, more, job_id=job_id)), number) is None
        ):
            more -= 1
        return more

    def exact(self, amounts: Sequence[float], parts: Parts) -> tuple[float, ...]:
        """Return a node's amounts, given the fractions of GPUs that jobs have on the node."""
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
