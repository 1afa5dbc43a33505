"""Singletons: jobs that wait for their owner's other jobs with the same name.

The jobs that a singleton waits for are determined again in each round of the scheduler, so they
need not be stored, and a running job that returns to the queue keeps its position.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy.orm import Session

from dray.views import JobState
from service.db.repositories.scheduling import planned_jobs
from service.domain.scheduling.rules.dependencies import MAX_NAMED, Dependency


def earlier(jobs: Sequence[Any]) -> Mapping[str, tuple[Dependency, ...]]:
    """Return the jobs for which each waiting singleton waits, keyed by the singleton's id. `jobs`
    contains all unfinished jobs."""
    singletons = [job for job in jobs if job.singleton and job.state is JobState.QUEUED]
    if not singletons:
        return {}
    namesakes: dict[tuple[str, str], list[Any]] = {(job.owner, job.name): [] for job in singletons}
    for job in jobs:
        if (job.owner, job.name) in namesakes:
            namesakes[job.owner, job.name].append(job)
    found = {}
    for same in namesakes.values():
        running = [job for job in same if job.state is not JobState.QUEUED]
        waiting = None
        for job in sorted(same, key=lambda job: job.number):
            if job.state is not JobState.QUEUED:
                continue
            if job.singleton:
                found[job.id] = _named([*running, *([] if waiting is None else [waiting])])
            waiting = job
    return found


def runs(session: Session, owner: str, name: str) -> bool:
    """Whether a job of this owner with this name runs."""
    same = planned_jobs.unfinished_named(session, owner, name)
    return any(job.state is not JobState.QUEUED for job in same)


def of_new_job(session: Session, owner: str, name: str) -> tuple[Dependency, ...]:
    """Return the jobs for which a singleton would wait if it were submitted now."""
    same = planned_jobs.unfinished_named(session, owner, name)
    running = [job for job in same if job.state is not JobState.QUEUED]
    return _named([*running, *[job for job in same if job.state is JobState.QUEUED][-1:]])


def _named(jobs: Sequence[Any]) -> tuple[Dependency, ...]:
    """Return dependencies on the latest of these jobs. A job waits as long as it has any
    dependency, so dependencies on a few of these jobs suffice."""
    return tuple(
        Dependency(job.id, "end", f"{job.state}, with the same name") for job in jobs[-MAX_NAMED:]
    )
