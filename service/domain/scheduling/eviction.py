"""Which running jobs leave their slots for a job that waits: pure rules.

A job is asked to leave by one of higher priority, and by one that its queue's quota guarantees its
slots. If it saves its state when asked and goes on from there, it is asked also by one whose queue
or user has used less than its share, and by one that has clearly less work left. None leaves before
it has held its slots for `MIN_RUN_S`, so no two jobs push each other out in turn, and a job is
pushed out at most once in that time. Those that lose the least work leave first.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ray_workers.shared.contracts import Slice
from service.domain.scheduling.order import Rank
from service.domain.scheduling.pools import Pool
from service.domain.scheduling.shares import Turn
from service.domain.scheduling.slots import Request, add, fits

MIN_RUN_S = 300.0
"""How long a job holds its slots before it may be asked to leave them."""
CLEARLY_LESS = 0.5
"""The work left of the job that comes, over that of the one that leaves for it."""


@dataclass(frozen=True)
class RunningJob:
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
    waited_s: float = 0.0
    """Since it was submitted, without the time in which it ran."""
    lost_s: float = 0.0
    """Seconds of its work that are done again after it has left."""
    yields: bool = False
    """It saves its state when it is asked to leave, and goes on from there."""
    is_leaving: bool = False
    """It was asked to leave."""
    place: int = 0
    """As of a waiting job."""
    queue: str = "default"
    owner: str = "default"


def may_evict(coming: Rank, running: RunningJob, rank: Rank) -> bool:
    """Whether a job of rank `coming` may have a running one leave; rank: of the running one."""
    if running.is_leaving or running.held_s < MIN_RUN_S or not coming.key < rank.key:
        return False
    if coming.turn is Turn.QUOTA and rank.turn is not Turn.QUOTA:
        return True
    if coming.turn == rank.turn and coming.priority > rank.priority:
        return True
    is_owed = coming.turn < rank.turn or coming.user_is_ahead < rank.user_is_ahead
    has_less = rank.work > 0 and coming.work < CLEARLY_LESS * rank.work
    return running.yields and (is_owed or has_less)


def because(coming: Rank, rank: Rank) -> str:
    """How the job that comes is ahead of the one that leaves; goes on from its name."""
    if coming.turn < rank.turn:
        is_quota = coming.turn is Turn.QUOTA
        return "is within its queue's quota" if is_quota else "is of a queue that has used less"
    if coming.priority > rank.priority:
        return "has a higher priority"
    if coming.user_is_ahead < rank.user_is_ahead:
        return "is of a user that has used less"
    return "has less work left"


def cheapest_first(running: Sequence[RunningJob], ranks: Mapping[str, Rank]) -> list[RunningJob]:
    """The order in which they are asked."""

    def cost(job: RunningJob) -> tuple[int, int, float, float, int]:
        rank = ranks[job.job_id]
        return -rank.turn, rank.priority, job.lost_s, -rank.work, -rank.seq

    return sorted(running, key=cost)


def victims(request: Request, pool: Pool, candidates: Iterable[RunningJob]) -> list[RunningJob]:
    """Those that leave so that the gang fits, of candidates in the order in which they are asked;
    none where it does not fit even without all.

    pool: what is free, or will be when those have left that were asked before.
    """
    lacking = request.least - pool.room(request)
    trial: dict[str, dict[str, float]] = {}
    chosen: list[RunningJob] = []
    for running in candidates:
        lacking -= _returned(request, pool, trial, running, 1)
        chosen.append(running)
        if lacking <= 0:
            break
    else:
        return []
    needed = []
    for running in reversed(chosen):
        lost = -_returned(request, pool, trial, running, -1)
        if lacking + lost > 0:
            _returned(request, pool, trial, running, 1)
            needed.append(running)
        else:
            lacking += lost
    return needed[::-1]


def _returned(
    request: Request, pool: Pool, trial: dict[str, dict[str, float]], running: RunningJob, sign: int
) -> int:
    """How many workers more have room on trial once the running job has returned its slots."""
    gained = 0
    for part in running.slices:
        there = pool.at(part.node_id)
        if not there:
            continue
        free = trial.setdefault(part.node_id, dict(there))
        before = fits(request.bundle, free)
        add(free, running.request.bundle, sign * part.num_workers)
        gained += fits(request.bundle, free) - before
    return gained
