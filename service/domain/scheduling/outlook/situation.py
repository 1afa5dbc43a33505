"""The initial state of a simulation: the scheduler's snapshot and additional data about jobs."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import TypeVar

from service.domain.progress import TimeLeft
from service.domain.scheduling import policy
from service.domain.scheduling.outlook.job_classes import JobClasses
from service.domain.scheduling.placement.slots import Node
from service.domain.scheduling.placement.topology import Topology
from service.domain.scheduling.policy import WaitingJob
from service.domain.scheduling.policy.ranking import active_accounts
from service.domain.scheduling.policy.windows import Windows
from service.domain.scheduling.rules.eviction import RunningJob
from service.domain.scheduling.rules.obstacles import Reason
from service.domain.scheduling.rules.shares import Account, Standings, Tier, UserStanding
from service.domain.scheduling.rules.tree import QueueTree

UNKNOWN_S = 3600.0
"""Assumed running time of a job, in seconds, if nothing is known about this job or other jobs."""


@dataclass(frozen=True)
class Situation:
    """The initial state of a simulation."""

    snapshot: policy.Snapshot
    """The snapshot, whose queue is in the order of the last plan, as far as this order is known."""
    arrays: Mapping[str, str] = field(default_factory=dict)
    """The array of each unfinished job that belongs to an array, keyed by job id."""
    others_of_arrays: Mapping[str, int] = field(default_factory=dict)
    """Number of unfinished jobs that are not in the snapshot, keyed by array."""
    cancelled: frozenset[str] = frozenset()
    """Jobs that release their slots and don't return to the queue."""
    usual_s: float = UNKNOWN_S
    """Assumed running time of a job of unknown length, in seconds."""
    usual_range_s: TimeLeft | None = None
    """The range around `usual_s`; None if too few jobs have run."""
    time_left: Mapping[str, TimeLeft] = field(default_factory=dict)
    """Remaining time of each running or waiting job for which it can be estimated from the job's
    speed or from earlier runs, keyed by job."""
    unmeasured: frozenset[str] = frozenset()
    """Running jobs whose remaining time is unknown."""
    accounts: frozenset[Account] = frozenset()
    """Each pair of a queue and a user that has running jobs, or jobs that could run, including jobs
    that were left out of the snapshot."""
    left_out: Mapping[str, int] = field(default_factory=dict)
    """For jobs of the snapshot, keyed by id: the number of waiting jobs with the same request and
    limits that are left out of the snapshot because they wait behind the job."""
    made_at: datetime | None = None
    """The time of the snapshot; None if it is not needed, because the shares are not computed."""

    def first_jobs(self, of_each_kind: int = 20) -> Situation:
        """Return the situation reduced to the first waiting jobs of each kind."""
        snapshot = self.snapshot
        classes = snapshot_classes(snapshot, snapshot.nodes)
        free = {node.id: node.available_to_us for node in snapshot.nodes if node.accepted}
        heads = {job.job_id for job in classes.heads(free, of_each_kind)}
        queue = tuple(job for job in snapshot.queue if job.job_id in heads)
        holding = {holder.job_id for holder in snapshot.holders}
        there = heads | holding | {job.job_id for job in snapshot.running}
        others = Counter(array for job_id, array in self.arrays.items() if job_id not in there)
        return replace(
            self,
            snapshot=replace(snapshot, queue=queue),
            arrays=_of(there, self.arrays),
            time_left=_of(there, self.time_left),
            others_of_arrays=others + Counter(self.others_of_arrays),
            accounts=self.active_accounts(),
            left_out=dict(classes.left_out),
        )

    def paced(self, share: float) -> Situation:
        """Return the situation in which the remaining time of each job is set to a point in its
        range: `share` is 0 for the minimum and 1 for the maximum. A running job of unknown length
        takes `usual_s`."""
        snapshot = self.snapshot

        def left_s(job: WaitingJob | RunningJob) -> float | None:
            found = self.time_left.get(job.job_id)
            if found is not None:
                return found.at(share)
            return None if job.job_id in self.unmeasured else job.left_s

        return replace(
            self,
            snapshot=replace(
                snapshot,
                queue=tuple(replace(job, left_s=left_s(job)) for job in snapshot.queue),
                running=tuple(replace(job, left_s=left_s(job)) for job in snapshot.running),
            ),
            usual_s=self.usual_s if self.usual_range_s is None else self.usual_range_s.at(share),
        )

    @functools.cached_property
    def nodes(self) -> list[Node]:
        """The accepted nodes."""
        return [node for node in self.snapshot.nodes if node.accepted]

    @functools.cached_property
    def topology(self) -> Topology:
        return Topology(self.snapshot.topology, self.nodes)

    @functools.cached_property
    def heads(self) -> list[WaitingJob]:
        """The jobs in the queue that can affect the next plan."""
        classes = snapshot_classes(self.snapshot, self.nodes)
        return classes.heads({node.id: node.available_to_us for node in self.nodes})

    def without(self, job_id: str) -> Situation:
        """Return the situation without this job in the queue."""
        queue = tuple(job for job in self.snapshot.queue if job.job_id != job_id)
        if len(queue) == len(self.snapshot.queue):
            return self
        return replace(self, snapshot=replace(self.snapshot, queue=queue))

    def active_accounts(self) -> frozenset[Account]:
        snapshot = self.snapshot
        if self.made_at is not None:  # jobs that wait for their reservation don't count
            snapshot = Windows(snapshot, self.made_at).apply()
        return self.accounts | active_accounts(snapshot)

    def favoured(self, queue: str, owner: str) -> list[Reason]:
        """Return the reasons why other jobs come before this user's jobs in this queue."""
        snapshot = self.snapshot
        accounts = self.active_accounts() | {(queue, owner)}
        standings = Standings(snapshot.queues, snapshot.used_s, accounts)
        there = {name for name, _ in accounts}
        found = []
        tree = QueueTree(snapshot.queues)
        path = tree.path(queue)
        there = {above for name in there for above in tree.path(name)}
        for other in snapshot.queues:
            if other.quota and other.name not in path and other.name in there:
                message = f"jobs within the quota of the queue {other.name!r} come first"
                found.append(Reason("other_quota", message))
        for name in path:
            if standings.tier(name) is Tier.AHEAD:
                message = (
                    f"the queue {name!r} has used more than its share: other queues come first"
                )
                found.append(Reason("queue_is_ahead", message))
        standing = standings.user(queue, owner)
        if standing is UserStanding.AHEAD:
            message = f"{owner} has used more than their share of the queue: other users come first"
            found.append(Reason("user_is_ahead", message))
        elif any(standings.user(*each) < standing for each in accounts if each[0] == queue):
            message = "users who have used less than their share of the queue come first"
            found.append(Reason("others_are_behind", message))
        return found


def snapshot_classes(snapshot: policy.Snapshot, nodes: Iterable[Node]) -> JobClasses:
    """Return the classes of the waiting jobs."""
    has_reservations = bool(snapshot.reservations)
    queue, queues = snapshot.queue, snapshot.queues
    return JobClasses(queue, queues, nodes, has_reservations=has_reservations)


T = TypeVar("T")


def _of(job_ids: Collection[str], by_job: Mapping[str, T]) -> dict[str, T]:
    return {job_id: value for job_id, value in by_job.items() if job_id in job_ids}
