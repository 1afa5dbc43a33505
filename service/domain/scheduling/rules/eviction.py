"""Which running jobs leave their slots for a job that waits: pure rules.

A job is asked to leave by one of higher priority, and by one that its queue's quota guarantees its
slots. If it saves its state when asked and goes on from there, it is asked also by one whose queue
or user has used less than its share, and by one that has clearly less work left. None leaves before
it has held its slots for a minimum run time, so no two jobs push each other out in turn, and a job
is pushed out at most once in that time. Those that lose the least work leave first.

Before anybody leaves, elastic groups that have more than their least size give slots back.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from ray_workers.shared.contracts import Slice
from service.domain.scheduling.placement.gangs import Gangs, WorkerKind
from service.domain.scheduling.placement.pools import Pool
from service.domain.scheduling.placement.slots import Request
from service.domain.scheduling.placement.stock import Amounts
from service.domain.scheduling.rules.order import Rank
from service.domain.scheduling.rules.shares import Turn

MIN_RUN_S = 300.0
"""How long a job holds its slots before it may be asked for them, unless the operator says."""
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
    """How long it has had them to train: its start does not count, unless that takes very long."""
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
    spare: tuple[Slice, ...] = ()
    """Slots that it may be asked to give back, in this order, and goes on without."""
    recalled: tuple[Slice, ...] = ()
    """Slots that it was asked to give back."""
    same_batch_s: float = 0.0
    """How long its group trains with its batch, if it could change that now."""
    num_left: int = 0
    """How often it has left its slots when it was asked to."""
    grown_s: float = math.inf
    """Since its group was given more slots last."""
    shrunk_s: float = math.inf
    """Since it was asked for slots last because others gain more by them, and not to make room."""


def may_evict(coming: Rank, running: RunningJob, rank: Rank, min_run_s: float) -> bool:
    """Whether a job of rank `coming` may have a running one leave now; rank: of the running one."""
    if running.is_leaving or running.recalled or running.held_s < min_run_s:
        return False
    return has_right(coming, running, rank)


def has_right(coming: Rank, running: RunningJob, rank: Rank) -> bool:
    """Whether it may once the running one has held its slots for long enough."""
    if coming >= rank:
        return False
    if coming.turn is Turn.QUOTA and rank.turn is not Turn.QUOTA:
        return True
    if coming.turn == rank.turn and coming.priority > rank.priority:
        return True
    is_owed = coming.turn < rank.turn or coming.user_is_ahead < rank.user_is_ahead
    has_less = rank.work > 0 and coming.work < CLEARLY_LESS * rank.work
    return running.yields and (is_owed or has_less)


def may_shrink(coming: Rank, running: RunningJob, rank: Rank, min_run_s: float) -> bool:
    """Whether a job of rank `coming` may have a group give its spare slots back: a group keeps what
    it has beyond its least size from nobody who stands as well as it does."""
    if running.is_leaving or running.recalled or running.held_s < min_run_s or not running.spare:
        return False
    stands = coming.turn, coming.falling_priority, coming.user_is_ahead
    return stands <= (rank.turn, rank.falling_priority, rank.user_is_ahead)


def because(coming: Rank, rank: Rank) -> str:
    """Why a job leaves its slots to one that has a right to them; goes on from that one's name."""
    if coming.turn < rank.turn:
        if coming.turn is Turn.QUOTA:
            return "which is within its queue's quota"
        return "because its own queue has used more than its share"
    if coming.priority > rank.priority:
        return "which has a higher priority"
    if coming.user_is_ahead < rank.user_is_ahead:
        return "because its own user has used more than their share"
    if coming.place:  # it has the rank of a job that it passes
        return "which was moved to the front of its queue"
    if coming.work < 0:
        return "which has waited for more than a day"
    if not coming.work:
        return "which goes first until it is known how long it takes"
    return "which has less work left"


def cheapest_first(running: Iterable[RunningJob], ranks: Mapping[str, Rank]) -> list[RunningJob]:
    """The order in which they are asked."""

    def cost(job: RunningJob) -> tuple[int, int, float, float, int]:
        rank = ranks[job.job_id]
        return -rank.turn, rank.priority, job.lost_s, -rank.work, -rank.seq

    return sorted(running, key=cost)


class Ask(NamedTuple):
    """Slots that a running job may be asked for."""

    running: RunningJob
    slices: tuple[Slice, ...]
    is_all: bool
    """It leaves, with all that it has not been asked for before."""


class Candidates:
    """The slots that running jobs may be asked for, in the order in which they are."""

    def __init__(
        self, running: Iterable[RunningJob], ranks: Mapping[str, Rank], min_run_s: float
    ) -> None:
        """running: the cheapest first."""
        self._min_run_s = min_run_s
        self._all = [(job, ranks[job.job_id]) for job in running]
        self._first: Rank | None = None
        self._shrinking: list[RunningJob] = []
        self._leaving: list[tuple[RunningJob, Rank]] = []

    def of(self, coming: Rank, but: Container[str]) -> Iterator[Ask]:
        """All that may be asked for a job of this rank, and of no job in `but`: spare slots before
        anybody leaves."""
        # Of ranks that differ in their work alone, one with more of it may ask fewer.
        if self._first is None or coming < self._first or coming[:-3] != self._first[:-3]:
            self._first = coming
            every, least_s = self._all, self._min_run_s
            self._shrinking = [job for job, rank in every if may_shrink(coming, job, rank, least_s)]
            self._leaving = [each for each in every if may_evict(coming, *each, least_s)]
        shrinking = [job for job in self._shrinking if job.job_id not in but]
        for job in shrinking:
            yield from (Ask(job, (part,), False) for part in job.spare)
        asked = {job.job_id for job in shrinking}
        for job, rank in self._leaving:
            if job.job_id not in but and may_evict(coming, job, rank, self._min_run_s):
                yield Ask(job, _rest(job) if job.job_id in asked else job.slices, True)


def _rest(job: RunningJob) -> tuple[Slice, ...]:
    """Without its spare slots."""
    rest = list(job.slices)
    for part in job.spare:
        rest.remove(part)
    return tuple(rest)


class Asked(NamedTuple):
    """The slots that running jobs are asked for so that a gang fits."""

    asks: tuple[Ask, ...]
    """Empty where it does not fit even with all."""
    room: int
    """Workers that there would be room for with all that were tried."""


def victims(
    kind: WorkerKind, least: int, pool: Pool, candidates: Iterable[Ask], gangs: Gangs
) -> Asked:
    """The candidates that are asked so that so many workers fit, tried in their order.

    pool: what is free, or will be when those have left that were asked before.
    """
    trial = SlotCheck(kind, pool, gangs)
    chosen: list[Ask] = []
    for ask in candidates:
        trial.give_back(ask)
        chosen.append(ask)
        if trial.room >= least:
            break
    else:
        return Asked((), trial.room)
    needed: list[Ask] = []
    leaving = set()
    for ask in reversed(chosen):
        name = ask.running.job_id
        # A job that leaves gives its spare slots back as well.
        if name not in leaving:
            trial.give_back(ask, -1)
            if trial.room >= least:
                continue
            trial.give_back(ask)
        needed.append(ask)
        if ask.is_all:
            leaving.add(name)
    return Asked(tuple(reversed(needed)), trial.room)


class SlotCheck:
    """A pool to which some slots were returned."""

    def __init__(self, kind: WorkerKind, pool: Pool, gangs: Gangs) -> None:
        self._kind = kind
        self._pool = pool
        self._gangs = gangs
        self._nodes: dict[str, tuple[Amounts, Amounts, int] | None] = {}
        """The free resources of a node, those of them that are set aside, and the room."""
        self._parts: dict[str, list[tuple[float, int]]] = {}
        """The parts of GPUs that jobs have on a node then."""
        self._had: dict[str, Counter[str]] = {}
        """By job and node, its workers then."""
        self._rooms = pool.rooms(kind)

    @property
    def room(self) -> int:
        """How many workers have room where they may be together."""
        return max(self._rooms.values(), default=0)

    def give_back(self, ask: Ask, sign: int = 1) -> None:
        """Return these slots, or take them again if `sign` is -1."""
        kind = self._gangs.of(ask.running.request).kind
        name = ask.running.job_id
        if name not in self._had:
            self._had[name] = kind.by_node(ask.running.slices)
        had = self._had[name]
        for part, vector in kind.vectors(ask.slices):
            if part.node_id not in self._nodes:
                at = self._pool.at(part.node_id)
                self._nodes[part.node_id] = None if at is None else (*at, self._kind.fits(*at))
                self._parts[part.node_id] = self._pool.parts_soon(part.node_id)
            there = self._nodes[part.node_id]
            if there:
                (free, aside, before), parts = there, self._parts[part.node_id]
                there_before = had[part.node_id]
                had[part.node_id] -= sign * part.num_workers * (vector is kind.vector)
                free, left = self._pool.given_back(free, vector, part, parts, sign, there_before)
                fitting = self._kind.fits(free, aside)
                place = self._pool.place_of(self._kind, part.node_id)
                self._rooms[place] = self._rooms.get(place, 0) + fitting - before
                self._nodes[part.node_id] = free, aside, fitting
                self._parts[part.node_id] = left
