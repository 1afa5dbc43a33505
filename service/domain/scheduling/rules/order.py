"""The order in which waiting and running jobs are considered.

Jobs within their queue's quota come first, and jobs of a queue that has used more than its share
(`shares`) come last. In a tree of queues, these tiers are compared at the top of the tree first,
and then at each level below. Within each tier, jobs with a higher priority come first. Among jobs
with the same priority, jobs of users who have used less than their share come first, and jobs of
users who have used more come last. Within each of these two groups, the jobs of the user who has
used the smallest part of their share come first. Among jobs that are still equal, the job that has
waited longest comes first if it is overdue. Then the job with the least work left comes first,
which keeps the mean completion time low. The time left is estimated from the job's progress, from
similar earlier jobs, and roughly from the owner's other jobs and the job's limit. The order of
submission is the tie-breaker. A job that was moved to the front, ahead of the jobs with the same
queue and priority, gets the rank of the first job that it passes. It also has this rank in
comparisons with jobs of other queues.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple

from service.domain.scheduling.rules.shares import Tier, Tiers, UserStanding
from service.domain.scheduling.rules.tree import Path

SETTLING_S = 300.0
"""Seconds added to the remaining time, so that differences much smaller than the cost of a start
don't matter."""
LONGEST_WAIT_S = 24 * 3600.0
"""Seconds after which a waiting job is overdue. Among overdue jobs that would otherwise be ordered
by their remaining work, the job that has waited longest comes first, and does not lend its reserved
slots to jobs that yield. Only one job comes first, because otherwise the queue of a cluster with a
permanent backlog would become first in, first out. A job that was overdue when it started can't be
evicted by jobs that have less work left."""
FORGIVING_S = 7 * 86400.0
"""Seconds after which a waiting job is forgiven its owner's usage: it ranks as if its owner had
used less than their share. Within each tier and priority, only one job is forgiven: the job that
has waited longest among the jobs that could start if enough running jobs ended and whose owners are
not behind."""
FORGIVEN_SHARE = 0.05
"""No job is forgiven while older forgiven jobs hold at least this fraction of the cluster, so that
the users' shares are kept."""

OVERDUE = -1.0
"""The value of `Rank.work` for an overdue job, which is less than the value for any other job."""


class Rank(NamedTuple):
    """A job's rank in the order. Lower ranks come first."""

    tiers: Tiers
    """Compared from the top of the tree of queues to its bottom."""
    falling_priority: int
    """The negative priority."""
    user: UserStanding
    of_share: float
    """The usage of a user who is behind or ahead, as a fraction of their share; 0 for other
    users."""
    work: float
    """The remaining work: the remaining seconds, multiplied by the share of the cluster raised to
    the power `gangs.SIZE_POWER`; `OVERDUE` for an overdue job."""
    seq: int
    place: int
    """Lower for jobs that were moved to the front; see `Fronts`."""
    path: Path = ()
    """The path of the job's queue. Not compared, because no two jobs of different queues are equal
    in the other fields."""
    far_ahead: tuple[bool, ...] = ()
    """Whether each queue on the path is far ahead of its share (`shares.FarAhead`). Not compared,
    for the same reason."""

    def level(self, other: Rank) -> int:
        """Return the index of the tiers that decide whether one of the jobs may take the slots of
        the other: the tiers of the queues at which their paths part. The queues above contain
        both jobs, and the queues below share the resources of different parents."""
        last = len(self.tiers) - 1
        for at in range(last):
            if self.path[at : at + 1] != other.path[at : at + 1]:
                return at
        return last

    def is_before(self, other: Rank, level: int) -> bool:
        """Whether the job ranks better, without regard to the tiers above this level."""
        if not level:
            return self < other
        return (self.tiers[level:], self[1:]) < (other.tiers[level:], other[1:])

    @property
    def standing(self) -> tuple[int, int, int]:
        """The part of the rank that is the same for all of a user's jobs with the same priority and
        tiers. The first number stands for the tiers."""
        tiers = 0
        for tier in self.tiers:
            tiers = tiers * len(Tier) + tier
        return tiers, self.falling_priority, self.user

    @property
    def priority(self) -> int:
        return -self.falling_priority

    @property
    def is_overdue(self) -> bool:
        return self.work < 0

    def may_less(self, other: Rank) -> bool:
        """Whether it is certain that this rank can evict at most as many jobs as the other rank.
        False for ranks of different tiers, because priorities are only comparable within a tier,
        and for ranks of different queues of a tree, because other tiers decide."""
        return (
            self.tiers == other.tiers
            and (len(self.tiers) == 1 or self.path == other.path)
            and self.falling_priority >= other.falling_priority
            and (self.user, self.of_share) >= (other.user, other.of_share)
            and self.work >= other.work
        )


class Fronts:
    """The pairs of queue and priority for which jobs were moved to the front."""

    def __init__(self, waiting: Iterable[tuple[str, Rank]]) -> None:
        """`waiting` contains the queue and the rank of each job that could start."""
        self._first: defaultdict[tuple[str, Tiers, int], dict[int, Rank]] = defaultdict(dict)
        """For each queue, tier and priority: the first rank with each `place`."""
        for queue, rank in waiting:
            of_place = self._first[queue, rank.tiers, rank.falling_priority]
            of_place[rank.place] = min(rank, of_place.get(rank.place, rank))

    def rank(self, queue: str, own: Rank) -> Rank:
        """Return the rank of a job. A job that was moved to the front comes just before the first
        job that it passes."""
        of_place = self._first.get((queue, own.tiers, own.falling_priority), {})
        passed = [rank for place, rank in of_place.items() if place > own.place]
        return min([own, *passed])._replace(place=own.place)


def work_left(left_s: float | None, weight: float) -> float:
    """Return the remaining work: lowest for jobs whose remaining time is unknown, because running
    such jobs shows how long they take. `left_s` is the remaining time in seconds on the job's
    slots, or None if unknown. `weight` is the job's share of the cluster to the power of
    `gangs.SIZE_POWER`."""
    return 0.0 if left_s is None else (left_s + SETTLING_S) * weight
