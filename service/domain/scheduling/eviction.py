"""Which running jobs leave their slots for a job that waits: pure rules.

A job is asked to leave by one of higher priority, and by one that its queue's quota guarantees its
slots. If it saves its state when asked and goes on from there, it is asked also by one whose queue
or user has used less than its share, and by one that has clearly less work left. None leaves before
it has held its slots for `MIN_RUN_S`, so no two jobs push each other out in turn, and a job is
pushed out at most once in that time. Those that lose the least work leave first.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from ray_workers.shared.contracts import Slice
from service.domain.scheduling.gangs import Gangs, WorkerKind
from service.domain.scheduling.order import Rank
from service.domain.scheduling.pools import Pool
from service.domain.scheduling.shares import Turn
from service.domain.scheduling.slots import Request

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
    if running.is_leaving or running.held_s < MIN_RUN_S or coming >= rank:
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


def cheapest_first(running: Iterable[RunningJob], ranks: Mapping[str, Rank]) -> list[RunningJob]:
    """The order in which they are asked."""

    def cost(job: RunningJob) -> tuple[int, int, float, float, int]:
        rank = ranks[job.job_id]
        return -rank.turn, rank.priority, job.lost_s, -rank.work, -rank.seq

    return sorted(running, key=cost)


class Candidates:
    """The running jobs that may be asked, in the order in which they are."""

    def __init__(self, running: Iterable[RunningJob], ranks: Mapping[str, Rank]) -> None:
        """running: the cheapest first."""
        self._all = [(job, ranks[job.job_id]) for job in running]
        self._first: Rank | None = None
        self._of_first: list[tuple[RunningJob, Rank]] = []

    def of(self, coming: Rank) -> Iterator[RunningJob]:
        """Those that may be asked to leave for a job of this rank, also those that were asked."""
        # Of ranks that differ in their work alone, one with more of it may ask fewer.
        if self._first is None or coming < self._first or coming[:-2] != self._first[:-2]:
            self._first = coming
            self._of_first = [each for each in self._all if may_evict(coming, *each)]
        return (job for job, rank in self._of_first if may_evict(coming, job, rank))


@dataclass(frozen=True)
class Leavers:
    """Those that are to leave for a gang."""

    jobs: tuple[RunningJob, ...]
    """Empty where the gang does not fit even without all."""
    room: int
    """Workers that there would be room for without all that were tried."""


def victims(
    kind: WorkerKind, least: int, pool: Pool, candidates: Iterable[RunningJob], gangs: Gangs
) -> Leavers:
    """Those that leave so that so many workers fit, of candidates in the order in which they are
    asked.

    pool: what is free, or will be when those have left that were asked before.
    """
    trial = _Trial(kind, pool, gangs)
    room = pool.room(kind)
    chosen: list[RunningJob] = []
    for running in candidates:
        gained = trial.leave(running, 1)
        room += gained
        chosen.append(running)
        if room >= least:
            break
    else:
        return Leavers((), room)
    needed = []
    for running in reversed(chosen):
        lost = trial.leave(running, -1)
        if room + lost >= least:
            room += lost
        else:
            trial.leave(running, 1)
            needed.append(running)
    return Leavers(tuple(reversed(needed)), room)


class _Trial:
    """A pool of which some jobs have left their slots."""

    def __init__(self, kind: WorkerKind, pool: Pool, gangs: Gangs) -> None:
        self._kind = kind
        self._pool = pool
        self._gangs = gangs
        self._nodes: dict[str, tuple[list[float], int] | None] = {}
        """What is free on a node, and the room that it has."""

    def leave(self, running: RunningJob, sign: int) -> int:
        """How many workers more have room once the job has left, or come back if `sign` is -1."""
        vector = self._gangs.of(running.request).kind.vector
        gained = 0
        for part in running.slices:
            if part.node_id not in self._nodes:
                free = self._pool.at(part.node_id)
                self._nodes[part.node_id] = free and (free, self._kind.fits(free))
            there = self._nodes[part.node_id]
            if there:
                times = sign * part.num_workers
                free = [a + times * b for a, b in zip(there[0], vector, strict=True)]
                fitting = self._kind.fits(free)
                gained += fitting - there[1]
                self._nodes[part.node_id] = free, fitting
        return gained
