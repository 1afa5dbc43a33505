"""Chooses the target sizes in one plan for all elastic jobs whose speed is known or will be known
soon.

Jobs with a lower `Standing` choose first. Waiting jobs of a fixed size get what they request.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from service.domain.scheduling.elastic.sizing import ElasticJob, Sized, sizes
from service.domain.scheduling.placement.gangs import WorkerKind

Standing = tuple[int, int, int]
"""Sort key of a claim: (tier, negative priority, user standing). Lower standings choose
first."""


@dataclass(frozen=True)
class ElasticClaim:
    """An elastic job that has slots or wants slots."""

    job_id: str
    standing: Standing
    kind: WorkerKind
    elastic: ElasticJob
    held: int = 0
    stays: bool = False
    comes_first: bool = False
    has_grown: bool = False
    has_shrunk: bool = False


def targets(
    claims: Sequence[ElasticClaim],
    others: Mapping[tuple[Standing, WorkerKind], int],
    num_free: Callable[[WorkerKind], int],
    per_node: Callable[[WorkerKind], int],
) -> dict[str, int]:
    """Return the number of workers for each claim.

    others: number of workers that waiting jobs of a fixed size request. num_free: returns the
    number of workers that fit in addition to the workers that the claims hold. per_node: returns
    the number of workers that fit on the largest node.
    """
    chosen: dict[str, int] = {}
    by_standing: dict[tuple[Standing, WorkerKind], list[ElasticClaim]] = {}
    for claim in claims:
        by_standing.setdefault((claim.standing, claim.kind), []).append(claim)
    for standing, kind in sorted(by_standing, key=lambda key: key[0]):
        mine = by_standing[standing, kind]
        left = float(num_free(kind))
        for (other, of), asked in others.items():
            if other <= standing:
                left -= asked * _in_workers(of, kind)
        for claim in claims:
            if claim.job_id in chosen:
                used = chosen[claim.job_id] - claim.held
            elif claim.standing == standing and claim.kind is kind:
                used = -claim.held
            else:  # only the eviction rules can make this job leave
                used = min(0, claim.elastic.least - claim.held)
            left -= used * _in_workers(claim.kind, kind)
        capacity = max(math.floor(left), sum(c.held for c in mine if c.stays))
        sized = [
            Sized(
                *(c.job_id, c.elastic, c.held, c.stays, c.comes_first),
                has_grown=c.has_grown,
                has_shrunk=c.has_shrunk,
            )
            for c in mine
        ]
        chosen |= sizes(sized, capacity, max(1, per_node(kind)))
    return chosen


def in_vain(
    claims: Sequence[ElasticClaim],
    chosen: Mapping[str, int],
    others: Mapping[tuple[Standing, WorkerKind], int],
    num_free: Callable[[WorkerKind], int],
    per_node: Callable[[WorkerKind], int],
) -> set[str]:
    """Return the jobs that would leave in order to resume with more workers, but would not get more
    workers, because jobs that choose first could take their slots. The parameters are described in
    `targets`."""
    moving = [
        c
        for c in claims
        if c.held and not c.elastic.in_place and chosen[c.job_id] not in (0, c.held)
    ]
    growing = [c for c in moving if chosen[c.job_id] > c.held]
    first = min((c.standing for c in claims), default=None)
    if all(c.standing == first for c in growing):
        return set()

    def free_then(kind: WorkerKind) -> int:
        return math.floor(num_free(kind) + sum(c.held * _in_workers(c.kind, kind) for c in moving))

    names = {c.job_id for c in moving}
    then = [replace(c, held=0, stays=False) if c.job_id in names else c for c in claims]
    found = targets(then, others, free_then, per_node)
    return {c.job_id for c in growing if found[c.job_id] <= c.held and c.standing != first}


def _in_workers(of: WorkerKind, other: WorkerKind) -> float:
    """Return an upper bound for the number of workers of the kind `other` that fit in place of one
    worker of the kind `of`."""
    if of is other:
        return 1.0
    shares: Mapping[str, float] = other.bundle
    parts = [amount / shares[name] for name, amount in of.bundle.items() if shares.get(name)]
    return max(parts, default=0.0)
