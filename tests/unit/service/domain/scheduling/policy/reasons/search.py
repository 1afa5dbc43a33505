"""Finds slots for gangs, and checks whether workers fit on GPUs, by search."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence

from ray_workers.shared.slices import Slice
from service.domain.scheduling.policy import Request

Amounts = Mapping[str, float]


def runs_of(request: Request) -> list[tuple[int, Amounts]]:
    """Return groups of ranks with equal slots, in rank order."""
    return [(len(list(same)), b) for b, same in itertools.groupby(bundles_of(request), key=dict)]


def bundles_of(request: Request) -> list[Amounts]:
    """Return the slot of each rank."""
    found: list[Amounts] = [request.bundle] * request.num_workers
    for role in request.roles:
        found[role.first_rank : role.first_rank + role.number] = [role.bundle] * role.number
    return found


def slots_of(request: Request, slices: Iterable[Slice]) -> list[tuple[str, Amounts, int]]:
    """Return (node, bundle, number) of the slots of a gang. Slots added by growth come last."""
    found, rank = [], 0
    bundles = bundles_of(request)
    for part in slices:
        bundle = bundles[rank] if request.roles else request.bundle
        found.append((part.node_id, bundle, part.num_workers))
        rank += part.num_workers
    return found


def packs(gpus: int, parts: Sequence[tuple[float, int]] | None) -> bool:
    """Whether the workers fit on this number of GPUs without two workers of a job on the same GPU,
    by search."""
    if parts is None:
        return False
    workers = sorted(
        ((size, job) for job, (size, number) in enumerate(parts) for _ in range(number)),
        reverse=True,
    )
    left, jobs = [1.0] * gpus, [set[int]() for _ in range(gpus)]

    def search(at: int) -> bool:
        if at == len(workers):
            return True
        size, job = workers[at]
        if size >= 1:
            chosen = [n for n in range(gpus) if left[n] == 1.0][: int(size)]
            if len(chosen) < size:
                return False
            for n in chosen:
                left[n] = 0.0
            if search(at + 1):
                return True
            for n in chosen:
                left[n] = 1.0
            return False
        tried = set()
        for n in range(gpus):
            state = left[n], tuple(sorted(jobs[n]))
            if left[n] + 1e-9 < size or job in jobs[n] or state in tried:
                continue
            tried.add(state)
            left[n] -= size
            jobs[n].add(job)
            if search(at + 1):
                return True
            left[n] += size
            jobs[n].discard(job)
        return False

    return search(0)
