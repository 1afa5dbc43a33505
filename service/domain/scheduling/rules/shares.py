"""The turns of queues, by quota and weight, and of their users, by weight.

Use is counted in cluster-seconds: the seconds that a job held slots, times its dominant share of
the cluster. It decays, so that what was long ago counts little. A queue, or a user, is ahead once
it has used clearly more than its share, by weight, of what all have used that have unfinished jobs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from enum import IntEnum
from typing import NamedTuple

from service.domain.scheduling.placement.slots import EPSILON
from service.domain.scheduling.rules.queues import Queue

HALF_LIFE_S = 14 * 86400.0
"""After which use counts half."""
REMEMBERED_S = 4 * HALF_LIFE_S
"""How far a new leader looks back; of what is older a sixteenth would be left."""
QUEUE_SLACK_S = 600.0
"""Cluster-seconds beyond its share at which a queue is ahead."""
USER_SLACK_S = 4 * 3600.0
"""The same of a user, if all in its queue have equal weights and the queue has all of the cluster;
else it is less. It is long enough for the order by work left to be worth while."""

Account = tuple[str, str]
"""A queue and one of its users."""


class Used:
    """Cluster-seconds that accounts have used, of which half are forgotten each `HALF_LIFE_S`."""

    def __init__(self) -> None:
        self._seconds: dict[Account, float] = {}
        self._at = 0.0

    def add(self, account: Account, seconds: float, at: float) -> None:
        """at: when they were used; times need not come in their order."""
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


class Turn(IntEnum):
    """Which queues come first."""

    QUOTA = 0
    """It is guaranteed its slots by its queue."""
    SHARE = 1
    AHEAD = 2
    """Its queue has used more than its share."""


class Claim(NamedTuple):
    """A job's claim to its queue's quota."""

    job_id: str
    queue: str
    worker: Sequence[tuple[str, float]]
    """Resources of a worker, as rules count them."""
    num_workers: int


class Standings:
    """The accounts that have used more than their share, of those with jobs that run or could."""

    def __init__(
        self,
        queues: Iterable[Queue],
        used_s: Mapping[Account, float],
        active: Iterable[Account],
    ) -> None:
        named = {queue.name: queue for queue in queues}
        users: defaultdict[str, dict[str, float]] = defaultdict(dict)
        for queue, owner in active:
            users[queue][owner] = used_s.get((queue, owner), 0.0)
        of_queues: dict[str, float] = dict.fromkeys(users, 0.0)
        for (queue, _), seconds in used_s.items():
            if queue in of_queues:
                of_queues[queue] += seconds
        rules = {name: named.get(name, Queue(name)) for name in of_queues}
        weights = {name: queue.weight for name, queue in rules.items()}
        self._queues = _ahead(of_queues, weights, QUEUE_SLACK_S)
        whole = sum(weights.values())
        self._users = set()
        for name, of_users in users.items():
            of_each = {owner: rules[name].weight_of(owner) for owner in of_users}
            slack_s = _user_slack_s(of_each.values()) * weights[name] / whole
            self._users |= {(name, owner) for owner in _ahead(of_users, of_each, slack_s)}

    def turn(self, queue: str) -> Turn:
        """Of its jobs beyond its quota."""
        return Turn.AHEAD if queue in self._queues else Turn.SHARE

    def user_is_ahead(self, queue: str, owner: str) -> bool:
        return (queue, owner) in self._users


def _ahead(used_s: Mapping[str, float], weights: Mapping[str, float], slack_s: float) -> set[str]:
    used, weight = sum(used_s.values()), sum(weights.values())
    return {
        name
        for name, seconds in used_s.items()
        if seconds - used * weights[name] / weight > slack_s
    }


def _user_slack_s(weights: Collection[float]) -> float:
    """How far a user of a queue that has all of the cluster may be beyond its share. Another user
    lacks as much, and of the one with the least weight that would be a large part of its share."""
    return max(QUEUE_SLACK_S, USER_SLACK_S * min(weights) * len(weights) / sum(weights))


def within_quota(queues: Iterable[Queue], claims: Sequence[Claim]) -> set[str]:
    """The jobs that fit their queues' quotas, of claims in the order in which they count.

    A quota that does not name the memory, or the CPUs beside GPUs, does not count these.
    """
    left = {queue.name: dict(queue.quota) for queue in queues if queue.quota}
    found = set()
    for claim in claims:
        quota = left.get(claim.queue)
        if quota is None:
            continue
        number = claim.num_workers
        needed = [(name, number * each) for name, each in claim.worker if name in quota]
        main = "GPU" if any(name == "GPU" and each for name, each in claim.worker) else "CPU"
        counts = any(name == main for name, _ in needed)
        if counts and all(quota[name] + EPSILON >= amount for name, amount in needed):
            for name, amount in needed:
                quota[name] -= amount
            found.add(claim.job_id)
    return found
