"""The sizes that one plan aims at, for all elastic jobs whose speed is known or soon will be.

Jobs of higher standing choose first. Those that are not sized, and wait, keep what they ask for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from service.domain.scheduling.elastic.sizing import ElasticJob, Sized, sizes
from service.domain.scheduling.placement.gangs import WorkerKind

Standing = tuple[int, int, bool]
"""(turn, falling priority, whether the user is ahead): lower ones choose first."""


@dataclass(frozen=True)
class ElasticClaim:
    """An elastic job that has slots or wants some."""

    job_id: str
    standing: Standing
    kind: WorkerKind
    elastic: ElasticJob
    held: int = 0
    stays: bool = False
    comes_first: bool = False


def targets(
    claims: Sequence[ElasticClaim],
    others: Mapping[tuple[Standing, WorkerKind], int],
    room: Callable[[WorkerKind], int],
    per_node: Callable[[WorkerKind], int],
) -> dict[str, int]:
    """Workers of each claim.

    others: workers of the jobs that wait and have no choice. room: for workers besides those that
    the claims hold. per_node: workers of the largest node.
    """
    chosen: dict[str, int] = {}
    by_standing: dict[tuple[Standing, WorkerKind], list[ElasticClaim]] = {}
    for claim in claims:
        by_standing.setdefault((claim.standing, claim.kind), []).append(claim)
    for standing, kind in sorted(by_standing, key=lambda key: key[0]):
        mine = by_standing[standing, kind]
        left = float(room(kind))
        for (other, of), asked in others.items():
            if other <= standing:
                left -= asked * _in_workers(of, kind)
        for claim in claims:
            if claim.job_id in chosen:
                used = chosen[claim.job_id] - claim.held
            elif claim.standing == standing and claim.kind is kind:
                used = -claim.held
            else:  # it leaves for others by the rules of eviction only
                used = min(0, claim.elastic.least - claim.held)
            left -= used * _in_workers(claim.kind, kind)
        capacity = max(math.floor(left), sum(c.held for c in mine if c.stays))
        sized = [Sized(c.job_id, c.elastic, c.held, c.stays, c.comes_first) for c in mine]
        chosen |= sizes(sized, capacity, max(1, per_node(kind)))
    return chosen


def _in_workers(of: WorkerKind, other: WorkerKind) -> float:
    """How many workers of the other kind have room where one of this kind is, at most."""
    if of is other:
        return 1.0
    shares: Mapping[str, float] = other.bundle
    parts = [amount / shares[name] for name, amount in of.bundle.items() if shares.get(name)]
    return max(parts, default=0.0)
