"""Convert waiting jobs to the policy's representation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import Row
from sqlalchemy.orm import Session

from dray.views import JobState
from service.db.repositories.submission import dependencies as dependencies_repository
from service.domain.scheduling import policy
from service.domain.scheduling.outlook import forecast
from service.domain.scheduling.rules.dependencies import ArrayLimit, Dependency, Prerequisite
from service.domain.scheduling.rules.times import latest_start
from service.lifecycle import resizing, singletons
from service.outlook.resubmitting import NEWEST_SEQ
from service.outlook.step_times import Kind, RunTimes


def waiting_jobs(
    session: Session, jobs: Sequence[Row[Any]], runs: RunTimes, now: datetime
) -> tuple[policy.WaitingJob, ...]:
    """Return the waiting jobs of these rows. `jobs` contains all unfinished jobs."""
    after, earlier = _dependencies(session, jobs), singletons.earlier(jobs)
    return tuple(
        waiting_job(job, _each_once(*after.of(job), *earlier.get(job.id, ())), runs, now)
        for job in jobs
        if job.state is JobState.QUEUED
    )


def _each_once(*found: Dependency) -> tuple[Dependency, ...]:
    """Return the first dependency on each job."""
    return tuple({one.id: one for one in reversed(found)}.values())[::-1]


def waiting_job(
    job: Any, after: tuple[Dependency, ...], runs: RunTimes, now: datetime
) -> policy.WaitingJob:
    """Return the job of a row. The row can also describe a job that has not been submitted.

    `job` is the job's row, or the columns that `planned_jobs.in_state` returns. `after` contains
    the job's dependencies.
    """
    limit = job.array_max_running
    return policy.WaitingJob(
        job_id=job.id,
        attempt=job.attempt,
        priority=job.priority,
        seq=job.number or NEWEST_SEQ,
        request=resizing.request_of(job),
        not_before=job.not_before if job.not_before and job.not_before > now else None,
        left_s=left_s(job, job.runtime_used_s, runs),
        guess_s=guess_s(job, job.runtime_used_s, runs),
        waited_s=waited_s(job, now),
        yields=job.yields,
        ends_within_s=limit_left_s(job, job.runtime_used_s, now),
        ends_by=job.deadline,
        queue=job.queue,
        owner=job.owner,
        held=job.held_by,
        place=job.rank or 0,
        after=after,
        array=None if limit is None else ArrayLimit(job.array_id, limit),
        start_by=latest_start(job),
        begins_at=job.begin_at if job.begin_at and job.begin_at > now else None,
        project=job.project,
        reservation=job.reservation,
    )


def waited_s(job: Any, now: datetime) -> float:
    """Return the seconds since the job was submitted, not counting the time during which the job
    ran or was not allowed to start."""
    since = job.kept_back_since
    kept_back_s = float(job.kept_back_s)
    if since is not None:
        kept_back_s += (now - since).total_seconds()
    age_s: float = (now - job.created_at).total_seconds()
    return age_s - float(job.runtime_used_s) - kept_back_s


def left_s(job: Any, ran_s: float, runs: RunTimes) -> float | None:
    """Return the expected remaining run time in seconds of a job that has run for `ran_s`; None if
    unknown."""
    progress = job.progress or {}
    total = progress.get("total_steps")
    share_done = min(1.0, progress.get("step", 0) / total) if total else None
    earlier_s = runs.get(Kind(job.owner, job.name, job.num_workers), ())
    return forecast.seconds_left(share_done, ran_s, earlier_s)


def limit_left_s(job: Any, ran_s: float, now: datetime) -> float | None:
    """Return the seconds until a job that has run for `ran_s` reaches its limit or its deadline if
    it continues now; None if it has neither."""
    return time_left_s(job.max_runtime_s, job, ran_s, now)


def time_left_s(max_runtime_s: int | None, job: Any, ran_s: float, now: datetime) -> float | None:
    """Like `limit_left_s`, with another limit."""
    left = [] if max_runtime_s is None else [max_runtime_s - ran_s]
    left += [] if job.deadline is None else [(job.deadline - now).total_seconds()]
    return max(0.0, min(left)) if left else None


def guess_s(job: Any, ran_s: float, runs: RunTimes) -> float | None:
    """Return a rough estimate of the remaining run time in seconds (`policy.WaitingJob.guess_s`);
    None for a job that releases its slots on request."""
    if job.yields:
        return None
    return forecast.guessed_s(ran_s, runs.of_owners.get(job.owner, ()), job.max_runtime_s)


@dataclass(frozen=True)
class _Dependencies:
    """The dependencies of all waiting jobs."""

    of_units: Mapping[str, Sequence[Dependency]]
    """Keyed by the id of the waiting job or array."""
    of_each: Mapping[str, Sequence[Prerequisite]]
    """Arrays whose jobs are awaited one by one, keyed by the waiting array."""
    unfinished: Mapping[tuple[str, int], Row[Any]]
    """The unfinished jobs of the arrays in `of_each`, keyed by array and index."""

    def of(self, job: Row[Any]) -> tuple[Dependency, ...]:
        found = tuple(self.of_units.get(job.array_id or job.id, ()))
        for one in self.of_each.get(job.array_id, ()):
            other = self.unfinished.get((one.id, job.array_index))
            if other is not None:
                found = (*found, Dependency(other.id, one.on, str(other.state)))
        return found


def _dependencies(session: Session, jobs: Sequence[Row[Any]]) -> _Dependencies:
    """Return the dependencies of all waiting jobs. `jobs` contains all unfinished jobs."""
    rows = dependencies_repository.all_open(session)
    if not rows:
        return _Dependencies({}, {}, {})
    states = {job.id: str(job.state) for job in jobs}
    unfinished = Counter(job.array_id for job in jobs)
    of_units: dict[str, list[Dependency]] = {}
    of_each: dict[str, list[Prerequisite]] = {}
    for waiter, one in rows:
        if one.each:
            of_each.setdefault(waiter, []).append(one)
            continue
        is_now = states.get(one.id) or f"{unfinished[one.id]} of its jobs have not ended"
        of_units.setdefault(waiter, []).append(Dependency(one.id, one.on, is_now))
    awaited = {one.id for some in of_each.values() for one in some}
    by_index = {(j.array_id, j.array_index): j for j in jobs if awaited and j.array_id in awaited}
    return _Dependencies(of_units, of_each, by_index)
