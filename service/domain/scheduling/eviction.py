"""Which running jobs leave their slots for a job that waits: pure rules.

A job is asked to leave by a job of higher priority; or, if it saves its state when asked and goes
on from there, by one of the same priority that has clearly less work left. None leaves before it
has held its slots for `MIN_RUN_S`, so no two jobs push each other out in turn, and a job is pushed
out at most once in that time. Those that lose the least work leave first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ray_workers.shared.contracts import Slice
from service.domain.scheduling.order import Rank
from service.domain.scheduling.slots import Request, add, pack

MIN_RUN_S = 300.0
"""How long a job holds its slots before it may be asked to leave them."""
CLEARLY_LESS = 0.5
"""The work left of the job that comes, over that of the one that leaves for it."""


@dataclass(frozen=True)
class Running:
    """A job that holds slots."""

    job_id: str
    priority: int
    seq: int
    request: Request
    slices: tuple[Slice, ...]
    held_s: float
    """How long it has held them."""
    left_s: float | None = None
    """Seconds that it has left; None where nobody knows."""
    lost_s: float = 0.0
    """Seconds of its work that are done again after it has left."""
    yields: bool = False
    """It saves its state when it is asked to leave, and goes on from there."""
    is_leaving: bool = False
    """It was asked to leave."""


Pool = Mapping[str, dict[str, float]]
"""Free resources by node."""


def may_evict(coming: Rank, running: Running, rank: Rank) -> bool:
    """Whether a job of rank `coming` may have a running one leave; rank: of the running one."""
    if running.is_leaving or running.held_s < MIN_RUN_S or coming.priority < rank.priority:
        return False
    if coming.priority > rank.priority:
        return True
    return running.yields and coming.work < CLEARLY_LESS * rank.work


def victims(
    request: Request, pool: Pool, candidates: Sequence[tuple[Rank, Running]]
) -> list[Running]:
    """Those that leave so that the gang fits; none where it does not fit even without all.

    pool: what is free, or will be when those have left that were asked before.
    """
    cheapest = sorted(candidates, key=lambda c: (c[0].priority, c[1].lost_s, -c[0].work, -c[0].seq))
    trial = {node_id: dict(free) for node_id, free in pool.items()}
    chosen: list[Running] = []
    for _, running in cheapest:
        if not any(part.node_id in trial for part in running.slices):
            continue
        _return(trial, running, 1)
        chosen.append(running)
        if pack(request.bundle, request.least, trial) is not None:
            break
    else:
        return []
    for running in chosen[-2::-1]:  # the last is needed
        _return(trial, running, -1)
        if pack(request.bundle, request.least, trial) is None:
            _return(trial, running, 1)
        else:
            chosen.remove(running)
    return chosen


def _return(pool: Pool, running: Running, sign: int) -> None:
    for part in running.slices:
        if part.node_id in pool:
            add(pool[part.node_id], running.request.bundle, sign * part.num_workers)
