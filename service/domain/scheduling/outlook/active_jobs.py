"""The jobs that hold slots in a simulation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from ray_workers.shared.slices import Slice
from service.domain.scheduling.elastic.resizing import spare
from service.domain.scheduling.outlook.forecast import LONGEST_S
from service.domain.scheduling.outlook.situation import Situation
from service.domain.scheduling.placement.slots import count
from service.domain.scheduling.policy import WaitingJob
from service.domain.scheduling.rules.eviction import RunningJob

LEAVING_S = 15.0
"""Seconds that a job takes to release its slots after it was asked to do so."""


@dataclass(frozen=True)
class ActiveJob:
    """A job that holds slots in the simulation."""

    job: RunningJob
    """The job as it was at `since`."""
    since: datetime
    ends_at: datetime
    is_assumed: bool = False
    """Whether the job's length is only an assumption."""
    goes_on: bool = False
    """Whether the job returns to the queue after it has released its slots."""
    shrinks_at: datetime | None = None
    """When the job will release its recalled slots."""

    def at(self, now: datetime) -> RunningJob:
        passed_s = (now - self.since).total_seconds()
        left_s = None if self.job.left_s is None else max(0.0, self.job.left_s - passed_s)
        lost_s = 0.0 if self.job.yields else self.job.lost_s + passed_s
        limit_s = self.job.ends_within_s
        return replace(
            self.job,
            held_s=self.job.held_s + passed_s,
            left_s=left_s,
            ends_within_s=None if limit_s is None else max(0.0, limit_s - passed_s),
            lost_s=lost_s,
        )

    def leaving(self, now: datetime, *, goes_on: bool) -> ActiveJob:
        """Return the job after it was asked to release its slots."""
        job = replace(self.at(now), is_leaving=True)
        return ActiveJob(job, now, now + timedelta(seconds=LEAVING_S), goes_on=goes_on)

    def moments(self, min_run_s: float) -> Iterator[datetime]:
        """Yield the times at which the job ends, shrinks, or can be asked to release its slots."""
        yield self.ends_at
        if self.shrinks_at is not None:
            yield self.shrinks_at
        for least_s in (min_run_s, self.job.earns_start_s):
            if self.job.held_s < least_s:
                yield self.since + timedelta(seconds=min(least_s - self.job.held_s, LONGEST_S))

    @classmethod
    def begun(cls, job: RunningJob, now: datetime, situation: Situation) -> ActiveJob:
        """Return the running job with its assumed end."""
        leaves_at = now + timedelta(seconds=LEAVING_S)
        if job.is_leaving:
            return cls(job, now, leaves_at, goes_on=job.job_id not in situation.cancelled)
        left_s = job.left_s
        if left_s is None:
            # If the job has run for longer than usual, assume that the remaining time equals the
            # time that the job has run so far.
            usual_s = situation.usual_s
            left_s = usual_s - job.held_s if job.held_s < usual_s else job.held_s
        # If a job has fewer workers, its remaining time increases, so without LONGEST_S `ends_at`
        # could exceed the largest `datetime`.
        limit_s = LONGEST_S if job.ends_within_s is None else job.ends_within_s
        left_s = min(left_s, limit_s, LONGEST_S)
        return cls(
            replace(job, left_s=left_s),
            now,
            now + timedelta(seconds=max(1.0, left_s)),
            is_assumed=job.left_s is None,
            shrinks_at=leaves_at if job.recalled else None,
        )


def started(job: WaitingJob, slices: tuple[Slice, ...]) -> RunningJob:
    """Return a waiting job that starts now on these slots."""
    number = count(slices)
    slower = job.request.num_ranks / min(number, job.request.num_ranks)
    return RunningJob(
        job_id=job.job_id,
        priority=job.priority,
        seq=job.seq,
        request=job.request.of_size(number),
        slices=slices,
        held_s=0.0,
        left_s=None if job.left_s is None else job.left_s * slower,
        ends_within_s=job.ends_within_s,
        ends_by=job.ends_by,
        waited_s=job.waited_s,
        yields=job.yields,
        place=job.place,
        queue=job.queue,
        owner=job.owner,
        project=job.project,
        reservation=job.reservation,
        spare=spare(
            *(slices, job.request.least_running, job.request.num_parts, job.request.num_ranks)
        ),
    )


def waiting_again(job: RunningJob) -> WaitingJob:
    """Return a job that was evicted and waits for its next start."""
    left_s = None if job.left_s is None else job.left_s + job.lost_s
    return WaitingJob(
        job_id=job.job_id,
        attempt=1,
        priority=job.priority,
        seq=job.seq,
        request=job.request,
        left_s=left_s,
        waited_s=job.waited_s,
        ends_within_s=job.ends_within_s,
        ends_by=job.ends_by,
        start_by=job.ends_by,
        yields=job.yields,
        queue=job.queue,
        owner=job.owner,
        place=job.place,
        project=job.project,
        reservation=job.reservation,
    )
