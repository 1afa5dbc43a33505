"""Pure rules that decide which running jobs release their slots for a waiting job.

A running job is asked to release its slots for a job with a higher priority, or for a job whose
slots are guaranteed by its queue's quota. In a tree of queues, the comparison is between the queues
at which the paths of the two jobs part: a queue takes back its quota from the queues with the same
parent, and never from a queue within its quota. A job that saves its state on request and resumes
from it is also asked to release its slots for a job that clearly has less work left. It is also
asked if its queue is far ahead of its share, and the waiting job's queue ranks better. Within one
queue, it is asked if its user is far ahead of their share, and the waiting job's user ranks better.
No job is evicted before it has held its slots for a minimum run time. A job is therefore evicted at
most once in this time, which limits how often two jobs can alternately evict each other. Jobs that
lose the least work are evicted first.

Before any job leaves, elastic groups above their minimum size release slots.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import NamedTuple

from ray_workers.shared.slices import Slice
from service.domain.scheduling.elastic.resizing import released_together
from service.domain.scheduling.placement.gangs import Gangs, WorkerKind
from service.domain.scheduling.placement.node_kinds import Amounts
from service.domain.scheduling.placement.pools import Pool
from service.domain.scheduling.placement.shared_gpus import Fractions
from service.domain.scheduling.placement.slots import Holder, Request, count
from service.domain.scheduling.placement.stock import When
from service.domain.scheduling.rules.lending import Lending
from service.domain.scheduling.rules.order import Rank
from service.domain.scheduling.rules.shares import FarAhead, Tier, UserStanding

MIN_RUN_S = 300.0
"""Default number of seconds for which a job holds its slots before it can be asked to release
them."""
RUNS_PER_START = 20.0
"""Minimum time for which a job trains before it is preempted for a user's or queue's share or for a
shorter job, relative to the time that its start took."""
CLEARLY_LESS = 0.5
"""Upper bound for the waiting job's remaining work, relative to the running job's remaining
work."""


@dataclass(frozen=True)
class RunningJob:
    """A job that holds slots."""

    job_id: str
    priority: int
    seq: int
    request: Request
    slices: tuple[Slice, ...]
    held_s: float
    """Seconds for which the job could train. The startup of the job counts only if it takes very
    long."""
    left_s: float | None = None
    """Remaining seconds of the job; None if unknown."""
    guess_s: float | None = None
    """See `policy.WaitingJob.guess_s`."""
    ends_within_s: float | None = None
    """Maximum remaining seconds, according to the job's limit."""
    ends_by: datetime | None = None
    """The deadline, which `ends_within_s` includes."""
    waited_s: float = 0.0
    """Seconds since the job was submitted, excluding the time in which it ran."""
    lost_s: float = 0.0
    """Seconds of work that have to be repeated if the job leaves now."""
    yields: bool = False
    """Whether the job saves its state when asked to release its slots, and later resumes from this
    state."""
    is_leaving: bool = False
    """Whether the job was asked to release its slots."""
    place: int = 0
    """See `policy.WaitingJob.place`."""
    queue: str = "default"
    owner: str = "default"
    project: str = "default"
    reservation: str | None = None
    """The reservation that the job's document names."""
    spare: tuple[Slice, ...] = ()
    """Slots that the job can be asked to release, in this order, without stopping."""
    recalled: tuple[Slice, ...] = ()
    """Slots that the job was asked to release."""
    same_batch_s: float = 0.0
    """Seconds for which the group has used its current batch size; 0 if the batch size can't change
    now."""
    num_left: int = 0
    """Number of times that the job has released its slots on request."""
    grown_s: float = math.inf
    """Seconds since the group was last granted additional slots."""
    shrunk_s: float = math.inf
    """Seconds since the job was last asked to release slots because others gain more from them."""
    start_s: float = 0.0
    """Seconds from the assignment of the slots until the job could train; 0 if unknown."""

    @property
    def spare_together(self) -> list[tuple[Slice, ...]]:
        """The spare slots, in groups that can be released together."""
        size = count(self.slices), self.request.num_parts, self.request.num_ranks
        return released_together(self.spare, *size)

    @property
    def has_earned_start(self) -> bool:
        """Whether the job has held its slots for so long that another start costs little in
        comparison."""
        return self.held_s >= self.earns_start_s

    @property
    def earns_start_s(self) -> float:
        return RUNS_PER_START * self.start_s


def leftover(holder: Holder) -> RunningJob:
    """Return the job of an attempt that has ended and is about to release its slots."""
    return RunningJob(
        *(holder.job_id, 0, 0, holder.request, holder.slices, 0.0),
        ends_within_s=0.0,
        is_leaving=True,
        queue=holder.queue,
        owner=holder.owner,
    )


def may_evict(
    coming: Rank,
    running: RunningJob,
    rank: Rank,
    ahead: FarAhead,
    min_run_s: float,
    *,
    of_any_queue: bool = False,
) -> bool:
    """Whether a job with the rank `coming` may evict a running job now. `rank` is the running job's
    rank, and `ahead` states whether its queues and user are far ahead. `of_any_queue` is set if the
    coming job might belong to a queue other than the queue that the rank states."""
    if running.is_leaving or running.recalled or running.held_s < min_run_s:
        return False
    at = coming.level(rank)
    # If the waiting job did not come first once the slots are free, another job would take them.
    if not (coming < rank and coming.is_before(rank, at)):
        return False
    ours, theirs = coming.tiers[at], rank.tiers[at]
    if ours is Tier.QUOTA and theirs is not Tier.QUOTA:
        return True
    # Otherwise, the running job's queue would soon be within its share and take the slots back.
    if ours is Tier.AHEAD and coming.far_ahead[at] and not (of_any_queue or ahead.queues[at]):
        return False
    if ours == theirs and coming.priority > rank.priority:
        return True
    if not running.yields or not running.has_earned_start:
        return False
    # The standings of users in different queues are relative to different usages.
    is_same_queue = of_any_queue or coming.path == rank.path
    user_is_owed = is_same_queue and ahead.user and coming.user < rank.user
    is_owed = user_is_owed or (ahead.queues[at] and ours < theirs)
    has_less = rank.work > 0 and coming.work < CLEARLY_LESS * rank.work
    has_less = has_less and coming.priority == rank.priority
    return is_owed or has_less


def may_shrink(coming: Rank, running: RunningJob, rank: Rank, min_run_s: float) -> bool:
    """Whether a group must release its spare slots for a job with the rank `coming`. The group need
    not release slots if it precedes the job by tier, priority and user."""
    if running.is_leaving or running.recalled or running.held_s < min_run_s or not running.spare:
        return False
    at = coming.level(rank)
    stands = coming.tiers[at], coming.falling_priority, coming.user
    return stands <= (rank.tiers[at], rank.falling_priority, rank.user)


def because(coming: Rank, rank: Rank) -> str:
    """Return why a job releases its slots for another job, as a clause that follows the other job's
    name."""
    at = coming.level(rank)
    if coming.tiers[at] < rank.tiers[at]:
        if coming.tiers[at] is Tier.QUOTA:
            is_above = at + 1 < len(coming.path)
            whose = f"the quota of {coming.path[at]!r}" if is_above else "its queue's quota"
            return f"which is within {whose}"
        is_above = at + 1 < len(rank.path)
        queue = f"the queue {rank.path[at]!r}" if is_above else "this job's queue"
        return f"because {queue} has used more than its share"
    if coming.priority > rank.priority:
        return "which has a higher priority"
    is_same_queue = coming.path == rank.path
    if is_same_queue and rank.user is UserStanding.AHEAD and coming.user < rank.user:
        return "because this job's user has used more than their share"
    if coming.place:  # the coming job has the rank of a job that it passes
        return "which was moved to the front of its queue"
    if coming.work < 0:
        return "which has waited for more than a day"
    if not coming.work:
        return "which comes first until its duration is known"
    return "which has less work left"


def cheapest_first(running: Iterable[RunningJob], ranks: Mapping[str, Rank]) -> list[RunningJob]:
    """Return the running jobs in the order in which they are asked to leave."""

    def cost(job: RunningJob) -> tuple[int, int, float, float, int]:
        rank = ranks[job.job_id]
        return -rank.standing[0], rank.priority, job.lost_s, -rank.work, -rank.seq

    return sorted(running, key=cost)


class Ask(NamedTuple):
    """A request to a running job to release slots."""

    running: RunningJob
    slices: tuple[Slice, ...]
    is_all: bool
    """Whether the job leaves. If the job leaves, `slices` contains the slots that it has not yet
    been asked to release."""


class Candidates:
    """The slots that running jobs can be asked to release, in the order of the requests."""

    def __init__(
        self,
        running: Iterable[RunningJob],
        ranks: Mapping[str, Rank],
        ahead: Mapping[str, FarAhead],
        min_run_s: float,
    ) -> None:
        """`running` contains jobs in the order of `cheapest_first`."""
        self._min_run_s = min_run_s
        self._all = [(job, ranks[job.job_id], ahead[job.job_id]) for job in running]
        self._first: Rank | None = None
        self._shrinking: list[RunningJob] = []
        self._leaving: list[tuple[RunningJob, Rank, FarAhead]] = []

    def of(self, coming: Rank, but: Container[str]) -> Iterator[Ask]:
        """Yield the requests that can be made for a job with the rank `coming`, except requests to
        the jobs in `but`. Requests for spare slots come before requests to leave."""
        # If two waiting jobs have the same tier, priority and user standing, the job with more
        # work can evict or shrink only jobs that the other job can also evict or shrink.
        first = self._first
        if first is None or coming < first or coming[:3] != first[:3] or _part(coming, first):
            self._first = coming
            every, least_s = self._all, self._min_run_s
            self._shrinking = [
                job for job, rank, _ in every if may_shrink(coming, job, rank, least_s)
            ]
            self._leaving = [
                each for each in every if may_evict(coming, *each, least_s, of_any_queue=True)
            ]
            if len(coming.tiers) > 1:  # the queues nearest in the tree release slots first
                self._leaving.sort(key=lambda each: _distance(coming, each[1]))
        shrinking = [job for job in self._shrinking if job.job_id not in but]
        for job in shrinking:
            yield from (Ask(job, slices, False) for slices in job.spare_together)
        asked = {job.job_id for job in shrinking}
        for job, rank, ahead in self._leaving:
            if job.job_id not in but and may_evict(coming, job, rank, ahead, self._min_run_s):
                yield Ask(job, _rest(job) if job.job_id in asked else job.slices, True)


def _part(coming: Rank, other: Rank) -> bool:
    """Whether different tiers may decide for the two jobs, because their queues are at different
    positions of a tree."""
    return len(coming.tiers) > 1 and coming.path != other.path


def _distance(coming: Rank, rank: Rank) -> tuple[int, int]:
    """Return the sort key of a running job: worse tiers first, then longer common paths."""
    pairs = zip(coming.path, rank.path, strict=False)
    return -rank.standing[0], -sum(ours == theirs for ours, theirs in pairs)


def _rest(job: RunningJob) -> tuple[Slice, ...]:
    """Return the job's slots, except for its spare slots."""
    rest = list(job.slices)
    for part in job.spare:
        rest.remove(part)
    return tuple(rest)


class Asked(NamedTuple):
    """The requests to running jobs to release the slots that a gang needs."""

    asks: tuple[Ask, ...]
    """The requests; empty if the gang does not fit even with all candidates."""
    capacity: int
    """Number of workers that fit once all candidates that were tried have released their slots."""


def victims(
    kind: WorkerKind,
    least: int,
    pool: Pool,
    candidates: Iterable[Ask],
    gangs: Gangs,
    lent: Lent | None = None,
) -> Asked:
    """Return the candidates that must release slots so that at least `least` workers fit.
    Candidates are tried in order.

    `pool` contains slots that are free, or will be free once the jobs that were already asked have
    released them.
    """
    trial = SlotCheck(kind, pool, gangs, lent)
    chosen: list[Ask] = []
    for ask in candidates:
        trial.release(ask)
        chosen.append(ask)
        if trial.capacity >= least:
            break
    else:
        return Asked((), trial.capacity)
    needed: list[Ask] = []
    not_needed: list[Ask] = []
    leaving = set()
    for ask in reversed(chosen):
        name = ask.running.job_id
        # A job that is evicted completely also releases its spare slots.
        if name not in leaving:
            trial.release(ask, -1)
            if trial.capacity >= least:
                not_needed.append(ask)
                continue
            trial.release(ask)
        needed.append(ask)
        if ask.is_all:
            leaving.add(name)
    for ask in reversed(not_needed):
        if ask.running.job_id not in leaving and not _leaves_a_size(ask.running, needed):
            trial.release(ask)
            needed.append(ask)
    kept = set(map(id, needed))
    return Asked(tuple(ask for ask in chosen if id(ask) in kept), trial.capacity)


def _leaves_a_size(running: RunningJob, asks: Iterable[Ask]) -> bool:
    """Whether the workers that the job keeps form complete replicas of its model, except for its
    spares."""
    if running.request.num_parts == 1:
        return True
    going = sum(count(ask.slices) for ask in asks if ask.running.job_id == running.job_id)
    left = count(running.slices) - going
    return running.request.rounded_down(left) == left


class Lent(NamedTuple):
    """The workers of a queue's job that fit without the slots that other queues keep."""

    lending: Lending
    """A trial, which is changed."""
    queue: str
    kind: WorkerKind

    def workers(self) -> int:
        found = self.lending.workers(self.queue, self.kind, soon=True)
        return 1 << 40 if found is None else found[0]


class SlotCheck:
    """Computes how many workers would fit if some slots were returned to a pool."""

    def __init__(
        self,
        kind: WorkerKind,
        pool: Pool,
        gangs: Gangs,
        lent: Lent | None = None,
        closed: Iterable[str] = (),
    ) -> None:
        """`closed` contains nodes on which no workers fit."""
        self._kind = kind
        self._lent = lent
        self._pool = pool
        self._gangs = gangs
        self._nodes: dict[str, tuple[Amounts, Amounts, int] | None] = {}
        """(free resources, the part of the free resources that is set aside, number of workers that
        fit), keyed by node."""
        self._parts: dict[str, list[Fractions]] = {}
        """The fractions of GPUs that jobs still have on each node once the slots are released."""
        self._capacities = pool.capacities(kind)
        self._closed: dict[str, Amounts] = {}
        """No free resources, for each closed node."""
        for node_id in closed:
            self._nodes[node_id] = None
            if (at := pool.at(node_id)) is not None:
                self._closed[node_id] = (0.0,) * len(at[0])
                place = pool.place_of(kind, node_id)
                self._capacities[place] = self._capacities.get(place, 0) - kind.fits(*at)

    @property
    def capacity(self) -> int:
        """Largest number of workers that fit into one of the domains in which a gang must be
        placed."""
        if self._lent is not None:
            return min(self._lent.workers(), max(self._capacities.values(), default=0))
        if self._kind.is_whole:
            free = {node_id: there[0] for node_id, there in self._nodes.items() if there}
            return self._pool.whole_capacity(self._kind, {**free, **self._closed})
        return max(self._capacities.values(), default=0)

    def release(self, ask: Ask, sign: int = 1) -> None:
        """Add these slots to the pool's free slots, or remove them again if `sign` is -1."""
        kind = self._gangs.of(ask.running.request).kind
        if self._lent is not None:
            self._lent.lending.leave(ask.running.queue, kind, ask.slices, sign)
        for part, vector in kind.vectors(ask.slices):
            if part.node_id not in self._nodes:
                at = self._pool.at(part.node_id)
                self._nodes[part.node_id] = None if at is None else (*at, self._kind.fits(*at))
                self._parts[part.node_id] = self._pool.stock.parts(When.SOON, part.node_id)
            there = self._nodes[part.node_id]
            if there:
                (free, aside, before), parts = there, self._parts[part.node_id]
                name = ask.running.job_id
                free, left = self._pool.stock.left(name, free, vector, part, parts, sign)
                fitting = self._kind.fits(free, aside)
                place = self._pool.place_of(self._kind, part.node_id)
                self._capacities[place] = self._capacities.get(place, 0) + fitting - before
                self._nodes[part.node_id] = free, aside, fitting
                self._parts[part.node_id] = left
