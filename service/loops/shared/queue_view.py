"""The loops' view of jobs: waiting jobs and live attempts.

Every round of the loops reads the jobs and attempts, so the queries fetch only the required columns
and create no ORM objects.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from sqlalchemy import Row
from sqlalchemy.orm import Session

from dray.drills import DrillKind
from dray.views import JobState
from ray_workers.shared.commands import Command, Drill, Leave, Limit, Stop
from ray_workers.shared.slices import RoleSlots, Slice
from service.db.repositories import attempts as attempts_repository
from service.db.repositories import faults as faults_repository
from service.db.repositories.scheduling import planned_jobs
from service.domain.scheduling import policy
from service.domain.scheduling.placement.slots import count
from service.lifecycle import resizing
from service.lifecycle.preemption import HOLDING
from service.lifecycle.transitions import runtime_left_s
from service.outlook.step_times import RunTimes
from service.outlook.waiting_jobs import guess_s, left_s, limit_left_s, waited_s, waiting_jobs

SLOW_START_S = 900.0
"""Number of seconds within which an attempt is expected to reach its first step. An attempt that
hangs before its first step can be preempted after this time plus the minimum run time."""


@dataclass(frozen=True)
class FollowedAttempt:
    """An attempt that is not known to have ended, and the commands for it."""

    job_id: str
    attempt: int
    cluster_session: str
    age_s: float
    """Seconds since the claim."""
    node_ids: tuple[str, ...]
    """Nodes that may have files or processes of the attempt, including nodes that it left."""
    commands: tuple[Command, ...]
    """Commands that the attempt has not confirmed yet."""

    @property
    def key(self) -> tuple[str, int]:
        return self.job_id, self.attempt


@dataclass(frozen=True)
class LiveAttempt:
    """An attempt that is not known to have ended, with the data that the plan needs."""

    job_id: str
    attempt: int
    job_state: JobState
    queue: str
    owner: str
    slices: tuple[Slice, ...]
    bundle: Mapping[str, float]
    roles: tuple[RoleSlots, ...]
    cluster_session: str
    age_s: float
    """Seconds since the claim."""
    started_at: datetime | None
    max_runtime_s: int | None
    runtime_used_s: float
    """Total running time of the job's earlier attempts."""
    node_ids: tuple[str, ...]
    """Nodes that may have files or processes of the attempt, including nodes that it left."""
    is_recall_unanswered: bool = False
    """Whether the attempt still holds slots although its time to release them has expired."""
    growing: policy.Growing | None = None
    """Set while the group could use more slots and can be granted slots."""
    running: policy.RunningJob | None = None
    """Set while the job could be asked to release its slots, or has been asked."""
    array_id: str | None = None
    is_past_deadline: bool = False
    """Whether the job's deadline has passed, and the attempt has not been asked to leave."""


def snapshot(
    session: Session, now: datetime, earlier: RunTimes | None = None
) -> tuple[tuple[policy.WaitingJob, ...], tuple[LiveAttempt, ...]]:
    """Return the waiting jobs, ordered by priority and submission, and every attempt that might
    still hold slots.

    `earlier` contains the run times of finished jobs; None if the remaining times are not needed.
    """
    jobs = planned_jobs.unfinished(session)
    runs = RunTimes() if earlier is None else earlier
    return waiting_jobs(session, jobs, runs, now), _live(session, now, jobs, runs)


def followed(session: Session, now: datetime) -> tuple[FollowedAttempt, ...]:
    """Return every attempt that might still hold slots. The cost doesn't depend on the number of
    waiting jobs."""
    attempts = attempts_repository.followed_columns(session)
    drills = _drills(session) if attempts else {}
    return tuple(
        FollowedAttempt(
            job_id=row.job_id,
            attempt=row.attempt,
            cluster_session=row.cluster_session,
            age_s=(now - row.created_at).total_seconds(),
            node_ids=resizing.carriers(row),
            commands=_commands(row, drills.get((row.job_id, row.attempt), ())),
        )
        for row in attempts
    )


def _commands(row: Row[Any], drills: Sequence[Drill]) -> tuple[Command, ...]:
    """Return the commands for the attempt of this row. A job that is being cancelled only gets
    `Stop`, and a group that is releasing all its slots is not resized."""
    if row.job_state is JobState.CANCELLING:
        return (Stop(),)
    others: tuple[Command, ...] = (*drills,)
    if row.limits:
        others = (Limit(row.limits, runtime_left_s(row)), *drills)
    if row.preempt_grace_s is not None:
        return Leave(row.preempt_grace_s), *others
    resize = resizing.granted(row) or resizing.recalled(row)
    return others if resize is None else (resize, *others)


def _live(
    session: Session, now: datetime, jobs: Sequence[Row[Any]], runs: RunTimes
) -> tuple[LiveAttempt, ...]:
    """Return the live attempts. `jobs` must include the jobs of these attempts."""
    by_id = {job.id: job for job in jobs}
    attempts = attempts_repository.live_columns(session)
    return tuple(
        LiveAttempt(
            job_id=row.job_id,
            attempt=row.attempt,
            job_state=by_id[row.job_id].state,
            queue=by_id[row.job_id].queue,
            owner=by_id[row.job_id].owner,
            slices=resizing.as_slices(row.slices),
            bundle=row.bundle,
            roles=resizing.as_roles(row.roles),
            cluster_session=row.cluster_session,
            age_s=max(0.0, (now - row.created_at).total_seconds()),
            started_at=row.started_at,
            max_runtime_s=by_id[row.job_id].max_runtime_s,
            runtime_used_s=by_id[row.job_id].runtime_used_s,
            node_ids=resizing.carriers(row),
            is_recall_unanswered=resizing.is_unanswered(row, now),
            growing=resizing.growing(by_id[row.job_id], row, now),
            running=_running(by_id[row.job_id], row, runs, now),
            array_id=by_id[row.job_id].array_id,
            is_past_deadline=_is_past_deadline(by_id[row.job_id], row, now),
        )
        for row in attempts
    )


def _running(job: Any, attempt: Any, runs: RunTimes, now: datetime) -> policy.RunningJob | None:
    """Return the running job of these rows; None if it holds no slots."""
    if job.state not in (*HOLDING, JobState.CANCELLING):
        return None
    slices = resizing.as_slices(attempt.slices)
    used_s = job.runtime_used_s
    started_at = attempt.started_at
    ran_s = 0.0 if started_at is None else max(0.0, (now - started_at).total_seconds())
    return policy.RunningJob(
        job_id=job.id,
        priority=job.priority,
        seq=job.number,
        request=replace(
            resizing.held_request(attempt.slices, attempt.bundle, attempt.roles),
            num_parts=job.num_parts,
            num_spares=max(0, count(slices) - (job.num_workers - job.num_spares)),
            required_level=job.required_topology,
        ),
        slices=slices,
        held_s=_held_s(job, attempt, now),
        start_s=_start_s(attempt),
        left_s=left_s(job, used_s + ran_s, runs),
        guess_s=guess_s(job, used_s + ran_s, runs),
        ends_within_s=limit_left_s(job, used_s + ran_s, now),
        ends_by=job.deadline,
        waited_s=waited_s(job, now) - ran_s,
        lost_s=0.0 if job.yields else ran_s,
        yields=job.yields,
        is_leaving=attempt.preempt_asked_at is not None or job.state is JobState.CANCELLING,
        place=job.rank,
        queue=job.queue,
        owner=job.owner,
        project=job.project,
        reservation=job.reservation,
        spare=resizing.spare(job, attempt, now),
        recalled=() if attempt.recalled is None else resizing.as_slices(attempt.recalled),
        same_batch_s=resizing.same_batch_s(job, attempt, now),
        num_left=job.preemptions,
        grown_s=_since(attempt.grown_at, now),
        shrunk_s=_since(attempt.shrunk_at, now),
    )


def _is_past_deadline(job: Any, attempt: Any, now: datetime) -> bool:
    if job.deadline is None or job.deadline > now or attempt.preempt_asked_at is not None:
        return False
    return job.state in HOLDING


def _since(at: datetime | None, now: datetime) -> float:
    return math.inf if at is None else max(0.0, (now - at).total_seconds())


def _start_s(attempt: Any) -> float:
    """Return the seconds from the assignment of the slots until the attempt could train; 0 until
    then."""
    if attempt.running_at is None:
        return 0.0
    took_s: float = (attempt.running_at - attempt.created_at).total_seconds()
    return max(0.0, took_s)


def _held_s(job: Any, attempt: Any, now: datetime) -> float:
    """Return for how many seconds the attempt has been able to use its slots for training. Up to
    `SLOW_START_S` seconds before the first step are not counted, because otherwise an attempt that
    starts slowly could be preempted before its first step each time."""
    is_starting = job.state is JobState.STARTING
    ran_at = None if is_starting else attempt.running_at
    since: datetime = ran_at or attempt.started_at or attempt.created_at
    held_s = (now - since).total_seconds()
    return max(0.0, held_s - SLOW_START_S if is_starting else held_s)


def _drills(session: Session) -> dict[tuple[str, int], list[Drill]]:
    """Return each attempt's drills whose fault has not been injected yet."""
    drills: dict[tuple[str, int], list[Drill]] = {}
    for drill in faults_repository.waiting_drills(session):
        asked = Drill(drill.id, DrillKind(drill.kind), drill.rank, drill.at_step)
        drills.setdefault((drill.job_id, drill.attempt), []).append(asked)
    return drills
