"""The situation that a play begins with: what the scheduler saw, and what it need not know."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeVar

from service.domain.progress import TimeLeft
from service.domain.scheduling import policy
from service.domain.scheduling.outlook.lanes import Lanes
from service.domain.scheduling.placement.slots import Node
from service.domain.scheduling.placement.topology import Topology
from service.domain.scheduling.policy import WaitingJob
from service.domain.scheduling.rules.eviction import RunningJob
from service.domain.scheduling.rules.obstacles import Reason
from service.domain.scheduling.rules.shares import Account, Standings, Turn

UNKNOWN_S = 3600.0
"""How long a job is assumed to run where nothing tells, not even other jobs."""


@dataclass(frozen=True)
class Situation:
    """All that a play begins with."""

    snapshot: policy.Snapshot
    """Its queue is in the order in which the plan took it last, as far as that is known."""
    runtime_left_s: Mapping[str, float] = field(default_factory=dict)
    """Seconds after which a job is ended, by job, of those that have a `max_runtime_s`."""
    arrays: Mapping[str, str] = field(default_factory=dict)
    """The array of each unfinished job that is of one, by job."""
    others_of_arrays: Mapping[str, int] = field(default_factory=dict)
    """Number of other unfinished jobs, by array: they are not in the snapshot."""
    cancelled: frozenset[str] = frozenset()
    """Jobs that leave their slots and do not come back."""
    usual_s: float = UNKNOWN_S
    """How long a job is assumed to run of which nothing is known."""
    usual_range_s: TimeLeft | None = None
    """The range around `usual_s`; None where too few jobs have run to tell."""
    time_left: Mapping[str, TimeLeft] = field(default_factory=dict)
    """How long jobs have left that run or wait, by job, where their paces or earlier runs tell."""
    unmeasured: frozenset[str] = frozenset()
    """Running jobs of which neither does."""
    accounts: frozenset[Account] = frozenset()
    """Queues and users with jobs that run or could, also those whose jobs are left out."""
    left_out: Mapping[str, int] = field(default_factory=dict)
    """Number of waiting jobs that are not in the snapshot, by the job behind which they come: those
    behind it ask for the same under the same limits."""

    def first_jobs(self, of_each_kind: int = 20) -> Situation:
        """As it is, with the waiting jobs alone that come first of each kind."""
        snapshot = self.snapshot
        lanes = Lanes(snapshot.queue, snapshot.queues, snapshot.nodes)
        free = {node.id: node.available_to_us for node in snapshot.nodes if node.accepted}
        heads = {job.job_id for job in lanes.heads(free, of_each_kind)}
        queue = tuple(job for job in snapshot.queue if job.job_id in heads)
        holding = {holder.job_id for holder in snapshot.holders}
        there = heads | holding | {job.job_id for job in snapshot.running}
        others = Counter(array for job_id, array in self.arrays.items() if job_id not in there)
        return replace(
            self,
            snapshot=replace(snapshot, queue=queue),
            runtime_left_s=_of(there, self.runtime_left_s),
            arrays=_of(there, self.arrays),
            time_left=_of(there, self.time_left),
            others_of_arrays=others + Counter(self.others_of_arrays),
            accounts=self._accounts(),
            left_out=dict(lanes.left_out),
        )

    def paced(self, share: float) -> Situation:
        """As it is if all jobs take as long as this share of the way from the least to the most
        that they may have left. A running job of which nothing tells takes as long as usual."""
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
        """Those that are accepted."""
        return [node for node in self.snapshot.nodes if node.accepted]

    @functools.cached_property
    def topology(self) -> Topology:
        return Topology(self.snapshot.topology, self.nodes)

    @functools.cached_property
    def heads(self) -> list[WaitingJob]:
        """The jobs of the queue that matter to one plan."""
        lanes = Lanes(self.snapshot.queue, self.snapshot.queues, self.nodes)
        return lanes.heads({node.id: node.available_to_us for node in self.nodes})

    def without(self, job_id: str) -> Situation:
        """As it is, without a job of the queue."""
        queue = tuple(job for job in self.snapshot.queue if job.job_id != job_id)
        if len(queue) == len(self.snapshot.queue):
            return self
        return replace(self, snapshot=replace(self.snapshot, queue=queue))

    def _accounts(self) -> frozenset[Account]:
        could = (job for job in self.snapshot.queue if not job.held and not job.after)
        there: tuple[WaitingJob | RunningJob, ...] = (*self.snapshot.running, *could)
        return self.accounts | {(job.queue, job.owner) for job in there}

    def favoured(self, queue: str, owner: str) -> list[Reason]:
        """Rules by which jobs of others come before those of a user of a queue."""
        snapshot = self.snapshot
        accounts = self._accounts() | {(queue, owner)}
        standings = Standings(snapshot.queues, snapshot.used_s, accounts)
        there = {name for name, _ in accounts}
        found = []
        for other in snapshot.queues:
            if other.quota and other.name != queue and other.name in there:
                message = f"jobs within the quota of the queue {other.name!r} come first"
                found.append(Reason("other_quota", message))
        if standings.turn(queue) is Turn.AHEAD:
            message = f"the queue {queue!r} has used more than its share: others come first"
            found.append(Reason("queue_is_ahead", message))
        if standings.user_is_ahead(queue, owner):
            message = f"{owner} has used more than their share of the queue: others come first"
            found.append(Reason("user_is_ahead", message))
        return found


T = TypeVar("T")


def _of(job_ids: Collection[str], by_job: Mapping[str, T]) -> dict[str, T]:
    return {job_id: value for job_id, value in by_job.items() if job_id in job_ids}
