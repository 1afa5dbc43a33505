"""Selects the waiting jobs of a long queue that can affect a plan.

Jobs with equal requests and the same limits form a class. On each node, a blocked job reserves
slots for all of its workers, or as many slots as the node has. Therefore, once the first jobs of a
class together request more workers than fit on the largest node, the jobs behind them don't affect
any other decision. A plan for the first jobs of all classes (the heads) makes the same decisions
about these jobs as a plan for the entire queue. Jobs with different limits on the running time can
share a class, because a shorter limit never allows a job to overtake a blocked job with an equal
request. If there are reservations, such jobs can't share a class, because a job with a shorter
limit might end before a reservation begins.
"""

from __future__ import annotations

import bisect
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime

from service.domain.scheduling.placement.slots import Kind, Node, fits, fits_pinned
from service.domain.scheduling.policy import WaitingJob
from service.domain.scheduling.rules.dependencies import Dependency
from service.domain.scheduling.rules.queues import Queue
from service.domain.scheduling.rules.tree import QueueTree

ClassKey = tuple[object, ...]
_Sort = tuple[Kind, bool]
"""A worker's bundle, and whether the worker is a silo."""


class JobClasses:
    """Groups the waiting jobs, except for held jobs, into classes."""

    def __init__(
        self,
        queue: Sequence[WaitingJob],
        queues: Iterable[Queue],
        nodes: Iterable[Node],
        *,
        has_reservations: bool = False,
    ) -> None:
        """queue: jobs in the order in which a plan considers them, as far as this order is
        known."""
        self._has_reservations = has_reservations
        self._tree = QueueTree(queues)
        self._alone: dict[str, tuple[bool, bool]] = {}
        self._nodes = list(nodes)
        self._positions: dict[str, int] = {}
        self._jobs: dict[str, WaitingJob] = {}
        self._timed: dict[str, WaitingJob] = {}
        """The jobs that can't start before a time, or after it."""
        self._classes: dict[ClassKey, list[tuple[int, str]]] = {}
        """(position, id) of the jobs that wait neither for other jobs nor for their begin times, in
        order of their positions."""
        self._largest: dict[_Sort, int] = {}
        self.left_out: dict[str, int] = {}
        """Numbers of jobs that `heads` left out, keyed by the id of the job just before them in
        their class."""
        for position, job in enumerate(queue):
            if job.held is None:
                self.add(job, position)

    def after(self, job_id: str) -> tuple[Dependency, ...]:
        """Return the jobs and arrays that a waiting job still waits for."""
        return self._jobs[job_id].after if job_id in self._jobs else ()

    def add(self, job: WaitingJob, position: int = 0) -> None:
        self._jobs[job.job_id] = job
        self._timed.pop(job.job_id, None)
        if job.not_before or job.begins_at or job.start_by:
            self._timed[job.job_id] = job
        self._positions[job.job_id] = position
        if not job.after and job.begins_at is None:
            bisect.insort(self._classes.setdefault(self._key_of(job), []), (position, job.job_id))

    def remove(self, job_id: str) -> WaitingJob:
        job = self._jobs.pop(job_id)
        self._timed.pop(job_id, None)
        if job.after or job.begins_at is not None:
            return job
        job_class = self._classes[self._key_of(job)]
        del job_class[bisect.bisect_left(job_class, (self._positions[job_id], job_id))]
        return job

    def resolve(self, ended: Collection[str], failed: Collection[str]) -> None:
        """Remove satisfied dependencies on ended jobs and arrays. Ended jobs that are not in
        `failed` succeeded, so jobs that wait for their failure never start."""

        def is_open(one: Dependency) -> bool:
            ended_as = "failure" if one.id in failed else "success"
            return one.id not in ended or one.on not in ("end", ended_as)

        for job in [job for job in self._jobs.values() if job.after]:
            left = tuple(filter(is_open, job.after))
            if len(left) < len(job.after):
                self.add(replace(job, after=left), self._positions[job.job_id])

    def never(self, failed: Collection[str]) -> dict[str, str]:
        """Return the waiting jobs that depend on the success of a job or array in `failed`, each
        with the job or array on which it depends."""
        return {
            job.job_id: one.id
            for job in self._jobs.values()
            for one in job.after
            if one.on == "success" and one.id in failed
        }

    def begin(self, since: datetime, now: datetime) -> None:
        """Allow jobs whose begin time has passed to start. The time between `since` and the begin
        time of such a job does not count as waiting time."""
        for job in list(self._timed.values()):
            if job.begins_at is not None and job.begins_at <= now:
                waited_s = job.waited_s - (job.begins_at - since).total_seconds()
                begun = replace(job, begins_at=None, waited_s=waited_s)
                self.add(begun, self._positions[job.job_id])

    def expired(self, now: datetime) -> list[WaitingJob]:
        """Return the jobs that can no longer start because of their deadlines."""
        timed = self._timed.values()
        return [job for job in timed if job.start_by is not None and job.start_by <= now]

    def begins_at(self, job_id: str) -> datetime | None:
        """Return the begin time of a waiting job, if it has not passed."""
        return self._jobs[job_id].begins_at if job_id in self._jobs else None

    def heads(self, free: Mapping[str, Mapping[str, float]], at_least: int = 2) -> list[WaitingJob]:
        """Return the first jobs of each class: all jobs that could start on the free resources, and
        all jobs that could block other jobs. free: free resources, keyed by node. at_least: minimum
        number of jobs per class."""
        found: list[WaitingJob] = []
        self.left_out = {}
        capacity: dict[_Sort, int] = {}
        for job_class in self._classes.values():
            if not job_class:
                continue
            request = self._jobs[job_class[0][1]].request
            sort = request.kind, bool(request.homes)
            if sort not in capacity:
                capacity[sort] = sum(_fits(sort, there) for there in free.values())
            found += self._first(job_class, capacity[sort] + self._largest_of(sort), at_least)
        return found

    def _first(
        self, job_class: Sequence[tuple[int, str]], num_workers: int, at_least: int
    ) -> Iterable[WaitingJob]:
        for number, (_, job_id) in enumerate(job_class, 1):
            job = self._jobs[job_id]
            yield job
            num_workers -= job.request.least
            if num_workers <= 0 and number >= at_least:
                if number < len(job_class):
                    self.left_out[job_id] = len(job_class) - number
                return

    def not_before(self) -> list[datetime]:
        """Return the times before which some of the jobs do not start."""
        times = (time for job in self._timed.values() for time in (job.not_before, job.begins_at))
        return [time for time in times if time is not None]

    def _largest_of(self, sort: _Sort) -> int:
        """Return how many workers of this kind fit on the largest node."""
        if sort not in self._largest:
            self._largest[sort] = max((_fits(sort, n.total) for n in self._nodes), default=0)
        return self._largest[sort]

    def _key_of(self, job: WaitingJob) -> ClassKey:
        request = job.request
        asks = (
            *(request.kind, request.num_workers, request.min_workers, request.required_level),
            *(request.num_spares, request.homes, request.role_kinds),
            *(request.num_parts, job.yields),
        )
        is_of_queue, is_of_user = self._counts_alone(job.queue)
        return (
            *asks,
            job.queue if is_of_queue or is_of_user else None,
            job.owner if is_of_user else None,
            None if job.array is None else job.array.array_id,
            *self._reserved_by(job),
        )

    def _reserved_by(self, job: WaitingJob) -> ClassKey:
        """Return the fields that decide which reserved nodes the job can use."""
        if not self._has_reservations and job.reservation is None:
            return ()
        claim = job.reservation, job.owner, job.queue, job.project
        return *claim, job.ends_within_s, job.attempt > 0

    def _counts_alone(self, name: str) -> tuple[bool, bool]:
        """Whether the jobs of the queue, and of each of its users, have limits or quotas of their
        own."""
        found = self._alone.get(name)
        if found is None:
            line = self._tree.upwards(name)
            of_queue = bool(self._tree.lent) or any(
                queue.quota or queue.limit or queue.max_running is not None for queue in line
            )
            of_user = any(
                queue.user_limit or queue.max_running_per_user is not None for queue in line
            )
            found = self._alone[name] = of_queue, of_user
        return found


def _fits(sort: _Sort, free: Mapping[str, float]) -> int:
    kind, is_of_silos = sort
    return (fits_pinned if is_of_silos else fits)(dict(kind), free)
