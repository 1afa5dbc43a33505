"""The numbers of workers that the rules of the queues allow each job in one round, regardless of
the number of free slots: their limits (`limits`) and lending limits (`lending`)."""

from __future__ import annotations

from collections.abc import Sequence

from ray_workers.shared.slices import Slice
from service.domain.scheduling.placement.gangs import Gang, Gangs, WorkerKind
from service.domain.scheduling.placement.slots import count
from service.domain.scheduling.policy.emptied import Emptied
from service.domain.scheduling.policy.ranking import limits_of
from service.domain.scheduling.policy.records import Growing, Snapshot, WaitingJob
from service.domain.scheduling.policy.windows import Windows
from service.domain.scheduling.rules import order
from service.domain.scheduling.rules.limits import UNLIMITED, AccountLimits, Headroom
from service.domain.scheduling.rules.shares import Tier


class Allowances:
    """Counts the workers that jobs get, and the workers for which jobs wait."""

    def __init__(
        self, snapshot: Snapshot, gangs: Gangs, windows: Windows, emptied: Emptied
    ) -> None:
        lends = any(queue.lending_limit for queue in snapshot.queues)
        self._limits = limits_of(snapshot, gangs, windows.lendable() if lends else None)
        self._emptied = emptied
        self.lending = self._limits.lending
        """None if no queue has a lending limit."""

    def headroom(self, job: WaitingJob | Growing, kind: WorkerKind, least: int) -> Headroom:
        """Return how many additional workers the limits allow the job. `least` is the number of
        workers that the job needs."""
        limits = self._of(job)
        return UNLIMITED if limits is None else limits.headroom(job.job_id, kind, least)

    def claim(self, job: WaitingJob, gang: Gang, *, may_ever: bool = True) -> Headroom:
        """Like `headroom`, for a waiting job, which counts towards the limits if they allow too
        few workers. `may_ever` states whether the job can ever start under the other rules."""
        headroom = self.headroom(job, gang.kind, gang.least)
        if headroom.workers < gang.least and may_ever:
            self.reserve(job, gang, gang.least, headroom)
        return headroom

    def lent(
        self, job: WaitingJob | Growing, gang: Gang, rank: order.Rank | None = None
    ) -> tuple[Headroom, Headroom]:
        """Return how many workers fit now, and how many fit once the jobs that were asked to leave
        have left. Slots that other queues keep for themselves, or that are promised to other jobs,
        are not counted. `rank` is the rank of a waiting job, which borrows nothing if it is within
        its queue's quota."""
        limits = self._of(job)
        if limits is None or self.lending is None:
            return UNLIMITED, UNLIMITED
        now, soon = limits.lent(gang.kind), limits.lent(gang.kind, soon=True)
        now = min(now, soon, key=lambda each: each.workers)
        if rank is not None and rank.tiers[-1] is Tier.QUOTA:
            least = Headroom(gang.least)
            now, soon = (max(each, least, key=lambda one: one.workers) for each in (now, soon))
        return now, soon

    def reserve(
        self, job: WaitingJob, gang: Gang, num_workers: int, under: Headroom = UNLIMITED
    ) -> None:
        """Count, towards the limits, the workers that a job is waiting for
        (`AccountLimits.reserve`)."""
        limits = self._of(job)
        if limits is not None and self._emptied.lets_claim(gang):
            limits.reserve(job.job_id, gang.kind, num_workers, under)

    def unreserve(self, group: Growing, kind: WorkerKind) -> None:
        """Stop counting the workers that the group lacks (`limits_of`), because it gets them."""
        limits = self._of(group)
        if limits is not None:
            limits.reserve(group.job_id, kind, -group.lacking)

    def take(self, job: WaitingJob | Growing, kind: WorkerKind, slices: Sequence[Slice]) -> None:
        """Count slots that a job gets."""
        limits = self._of(job)
        if limits is not None:
            limits.take(job.job_id, kind, count(slices))
        if self.lending is not None:
            self.lending.take(job.queue, kind, slices)

    def _of(self, job: WaitingJob | Growing) -> AccountLimits | None:
        return self._limits.of((job.queue, job.owner))
