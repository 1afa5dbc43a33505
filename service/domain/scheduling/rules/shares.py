"""Computes the shares of queues from their quotas and weights, and the shares of users from their
weights.

Usage is measured in cluster-seconds: the seconds for which a job held slots, times its dominant
share of the cluster. Usage decays, so that old usage counts little. A queue or user is ahead once
it has used clearly more than its share. The share is a fraction, by weight, of the total usage of
all queues with the same parent, or of all users of a queue, counting only queues or users with jobs
that run or could run.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

from service.domain.scheduling.placement.gangs import WorkerKind
from service.domain.scheduling.placement.slots import EPSILON
from service.domain.scheduling.rules.queues import Queue
from service.domain.scheduling.rules.tree import Path, QueueTree

HALF_LIFE_S = 14 * 86400.0
"""Half-life of usage, in seconds."""
REMEMBERED_S = 4 * HALF_LIFE_S
"""Maximum age, in seconds, of the usage that a new leader reads. Older usage would have a weight of
less than one sixteenth."""
QUEUE_SLACK_S = 3600.0
"""A queue is ahead once it has used this many cluster-seconds more than its share."""
USER_SLACK_S = 4 * 3600.0
"""Maximum number of cluster-seconds by which a user's usage can differ from their share without
changing the order, in a queue that has the whole cluster. Without this slack, jobs could not be
ordered by their remaining work."""
SLACK_OF_SHARE_S = 10 * 3600.0
"""The slack is at most the amount to which the smallest share entitles a user in this many seconds,
so that it is small relative to the usage in a month."""

LEAST_USER_SLACK_S = 120.0
"""Minimum slack of a user in a queue that has the whole cluster, so that a user's standing doesn't
change whenever a job starts."""

Account = tuple[str, str]
"""A queue and one of its users."""


class Used:
    """Cluster-seconds that accounts have used. The values decay by half every `HALF_LIFE_S`."""

    def __init__(self) -> None:
        self._seconds: dict[Account, float] = {}
        self._at = 0.0

    def add(self, account: Account, seconds: float, at: float) -> None:
        """Add usage. `at` is the time of the usage. Usage doesn't have to be added in chronological
        order."""
        self._decay(at)
        weight = 0.5 ** ((self._at - at) / HALF_LIFE_S)
        self._seconds[account] = self._seconds.get(account, 0.0) + weight * seconds

    def seconds(self, at: float) -> dict[Account, float]:
        self._decay(at)
        return dict(self._seconds)

    def _decay(self, at: float) -> None:
        if at > self._at:
            left = 0.5 ** ((at - self._at) / HALF_LIFE_S)
            self._seconds = {account: left * s for account, s in self._seconds.items()}
            self._at = at


class Tier(IntEnum):
    """The tier of a job. Lower tiers come first."""

    QUOTA = 0
    """The job's slots are guaranteed by the queue's quota."""
    SHARE = 1
    AHEAD = 2
    """The queue has used more than its share."""


Tiers = tuple[Tier, ...]
"""The tiers of a job in the queues on its path, from the top of the tree to its queue, and then as
many more as make all tuples equally long: in those, the job ranks as in the only child of its
queue. Without a tree of queues, there is one tier."""


class UserStanding(IntEnum):
    """A user's usage relative to their share of the queue. Lower standings come first."""

    BEHIND = -1
    """The user has used less than their share."""
    EVEN = 0
    AHEAD = 1
    """The user has used more than their share."""


@dataclass(frozen=True, slots=True)
class UsageShare:
    """The usage of an account, and the usage to which the account is entitled."""

    weight: float
    of_all: float
    """The fraction of the usage to which the weight entitles the account."""
    used_s: float
    due_s: float
    """The cluster-seconds to which the account is entitled."""
    slack_s: float
    """The account's usage can differ from `due_s` by this many cluster-seconds without changing
    the order."""

    @property
    def excess_s(self) -> float:
        """Cluster-seconds used in excess of the share; negative if less than the share was
        used."""
        return self.used_s - self.due_s

    @property
    def standing(self) -> UserStanding:
        if self.excess_s > self.slack_s:
            return UserStanding.AHEAD
        return UserStanding.BEHIND if -self.excess_s > self.slack_s else UserStanding.EVEN

    @property
    def of_share(self) -> float:
        """The usage as a fraction of `due_s`, by which users who are behind or ahead are ordered; 0
        for other users, so that their jobs are ordered by the remaining work."""
        return 0.0 if self.standing is UserStanding.EVEN else self.used_s / self.due_s

    @property
    def is_far_ahead(self) -> bool:
        """Whether the account's running jobs can be preempted for jobs of other accounts. If the
        usage only had to exceed the share by more than the slack, jobs would be preempted whenever
        this happens."""
        return self.excess_s > 2 * self.slack_s

    @property
    def even_in_s(self) -> float | None:
        """Seconds until the usage differs from the share by no more than the slack, assuming that
        no account uses slots, so that usage only decays; None if the difference is already within
        the slack."""
        if self.standing is UserStanding.EVEN:
            return None
        return HALF_LIFE_S * math.log2(abs(self.excess_s) / self.slack_s)


class FarAhead(NamedTuple):
    """Whether the queues on a running job's path and its user are far ahead of their shares, so
    that the job can be preempted for jobs of other queues or users."""

    queues: tuple[bool, ...]
    """For each queue, in the order of `Tiers`."""
    user: bool


class Standings:
    """Compares the usage of accounts that have active jobs to their shares."""

    def __init__(
        self,
        queues: Iterable[Queue],
        used_s: Mapping[Account, float],
        active: Iterable[Account],
    ) -> None:
        self._tree = tree = QueueTree(queues)
        users: defaultdict[str, dict[str, float]] = defaultdict(dict)
        for queue, owner in active:
            users[queue][owner] = used_s.get((queue, owner), 0.0)
        on_paths = (name for queue in users for name in tree.path(queue))
        of_queues: dict[str, float] = dict.fromkeys(on_paths, 0.0)
        for (queue, _), seconds in used_s.items():
            for name in tree.path(queue):
                if name in of_queues:
                    of_queues[name] += seconds
        siblings: defaultdict[Path, dict[str, float]] = defaultdict(dict)
        for name, seconds in of_queues.items():
            siblings[tree.path(name)[:-1]][name] = seconds
        self.of_queues: dict[str, UsageShare] = {}
        """The share of each queue that has active jobs, or active jobs under it, in the usage of
        the active queues with the same parent."""
        self.of_users: dict[Account, UsageShare] = {}
        """The share of each active account in its queue."""
        of_cluster: dict[Path, float] = {(): 1.0}
        for above, used_by in sorted(siblings.items(), key=lambda each: len(each[0])):
            weights = {name: tree.queue(name).weight for name in used_by}
            whole = sum(weights.values())
            self.of_queues |= _shares(used_by, weights, QUEUE_SLACK_S * of_cluster[above])
            for name, weight in weights.items():
                of_cluster[*above, name] = of_cluster[above] * weight / whole
                of_users = users.get(name)
                if of_users:
                    of_each = {owner: tree.queue(name).weight_of(owner) for owner in of_users}
                    slack_s = _user_slack_s(of_each.values()) * of_cluster[above] * weight / whole
                    found = _shares(of_users, of_each, slack_s)
                    self.of_users |= {(name, owner): share for owner, share in found.items()}
        self._tiers: dict[tuple[str, int], Tiers] = {}
        self._users: dict[Account, UserStanding] = {}
        self._far_ahead: dict[str, tuple[bool, ...]] = {}

    def tier(self, queue: str) -> Tier:
        """Return the tier of the queue's jobs beyond its quota, among the queues with the same
        parent."""
        share = self.of_queues.get(queue)
        is_ahead = share is not None and share.standing is UserStanding.AHEAD
        return Tier.AHEAD if is_ahead else Tier.SHARE

    def tiers(self, queue: str, num_within: int = 0) -> Tiers:
        """Return the tiers of a job that is within the quotas of the first `num_within` queues on
        its path."""
        found = self._tiers.get((queue, num_within))
        if found is None:
            path = self._tree.path(queue)
            beyond = [self.tier(name) for name in path[num_within:]]
            more = self._tree.depth - len(path)
            last = Tier.QUOTA if num_within == len(path) else Tier.SHARE
            found = (*[Tier.QUOTA] * num_within, *beyond, *[last] * more)
            self._tiers[queue, num_within] = found
        return found

    def path(self, queue: str) -> Path:
        return self._tree.path(queue)

    def user(self, queue: str, owner: str) -> UserStanding:
        found = self._users.get((queue, owner))
        if found is None:
            share = self.of_users.get((queue, owner))
            found = UserStanding.EVEN if share is None else share.standing
            self._users[queue, owner] = found
        return found

    def of_share(self, queue: str, owner: str) -> float:
        share = self.of_users.get((queue, owner))
        return 0.0 if share is None else share.of_share

    def far_ahead(self, queue: str, owner: str) -> FarAhead:
        of_user = self.of_users.get((queue, owner))
        is_far = of_user is not None and of_user.is_far_ahead
        return FarAhead(self.queues_far_ahead(queue), is_far)

    def queues_far_ahead(self, queue: str) -> tuple[bool, ...]:
        """Return the field `queues` of `FarAhead`."""
        of_queues = self._far_ahead.get(queue)
        if of_queues is None:
            shares = [self.of_queues.get(name) for name in self._tree.path(queue)]
            found = [share is not None and share.is_far_ahead for share in shares]
            of_queues = (*found, *[False] * (self._tree.depth - len(found)))
            self._far_ahead[queue] = of_queues
        return of_queues


def _shares(
    used_s: Mapping[str, float], weights: Mapping[str, float], slack_s: float
) -> dict[str, UsageShare]:
    used, weight = sum(used_s.values()), sum(weights.values())
    return {
        name: UsageShare(
            weights[name],
            weights[name] / weight,
            seconds,
            used * weights[name] / weight,
            slack_s,
        )
        for name, seconds in used_s.items()
    }


def _user_slack_s(weights: Collection[float]) -> float:
    """Return a user's slack in a queue that has the whole cluster. The smaller the smallest share,
    the smaller the slack, because even a small excess of one user can be a large part of that
    share."""
    slack_s = min(USER_SLACK_S, SLACK_OF_SHARE_S * min(weights) / sum(weights))
    return max(LEAST_USER_SLACK_S, slack_s)


class Quotas:
    """Tracks the unclaimed parts of the queues' quotas while jobs claim them in order.

    Resources that a quota doesn't name are not counted. For example, a quota that names only GPUs
    counts neither memory nor CPUs.
    """

    def __init__(
        self, quotas: Mapping[str, Mapping[str, float]], kinds: Iterable[WorkerKind]
    ) -> None:
        """`quotas` contains the unclaimed resources of each queue, and `kinds` all kinds of workers
        that will be claimed."""
        self._left = {name: dict(quota) for name, quota in quotas.items() if quota}
        self._open = {
            (queue, kind)
            for queue in self._left
            for kind in kinds
            if kind is kind.anywhere and self._has(queue, kind, 1)
        }
        """(queue, kind) pairs for which another worker might still be within the quota. Fences
        don't matter for quotas."""

    @property
    def are_spent(self) -> bool:
        """Whether no further claims can be granted."""
        return not self._open

    def grant(self, queue: str, kind: WorkerKind, num_workers: int) -> bool:
        """Claim workers from the quota. Returns whether the workers are within the quota."""
        kind = kind.anywhere
        if (queue, kind) not in self._open:
            return False
        if self._has(queue, kind, num_workers):
            left = self._left[queue]
            for name, each in kind.counted:
                if name in left:
                    left[name] -= num_workers * each
            return True
        if not self._has(queue, kind, 1):
            self._open.remove((queue, kind))
        return False

    def _has(self, queue: str, kind: WorkerKind, num_workers: int) -> bool:
        left = self._left[queue]
        main = "GPU" if any(name == "GPU" and each for name, each in kind.counted) else "CPU"
        needed = [(name, num_workers * each) for name, each in kind.counted if name in left]
        counts = any(name == main for name, _ in needed)
        return counts and all(left[name] + EPSILON >= amount for name, amount in needed)
