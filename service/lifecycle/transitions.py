"""Every change of a job's state: compare, set, and say so in an event.

The functions take the Session of a `Database.write`, so that each change and its event are one
transaction with whatever else the caller stores.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import Row
from sqlalchemy.orm import Session

from dray.spec import JobSpec
from dray.train.checkpoints import CheckpointRef
from dray.views import JobState
from ray_workers.shared.contracts import Phase, Slice
from service.checkpoints import init_from
from service.checkpoints.catalog import counting_checkpoints
from service.db.models import AttemptRow, CodeRow, EventRow, JobRow
from service.db.notifications import QUEUE, events_of
from service.db.repositories import arrays as arrays_repository
from service.db.repositories import attempts as attempts_repository
from service.db.repositories import code as code_repository
from service.db.repositories import dependencies as dependencies_repository
from service.db.repositories import faults as faults_repository
from service.db.repositories import jobs as repository
from service.db.repositories import sweeps as sweeps_repository
from service.db.session import notify, touch
from service.domain.attempts.retries import ROLLBACK_FACTOR
from service.domain.documents import DocumentRefused, read
from service.domain.progress import without_rates
from service.domain.scheduling import policy
from service.domain.scheduling.limits import BUDGET_USED_UP, HELD
from service.domain.scheduling.slots import workers
from service.domain.states import STOPPED_EARLY, Trigger, transition
from service.lifecycle import dependencies, held_slots, sweeps

KEPT_BACK = frozenset({HELD, BUDGET_USED_UP, "waiting_for_jobs", "array_limit"})
"""Why a job waits that could not start if all slots were free: it is not waiting for its turn."""


def move(
    session: Session,
    job: JobRow,
    trigger: Trigger,
    *,
    code: str,
    message: str,
    now: datetime,
    values: Mapping[str, Any] | None = None,
    data: Mapping[str, Any] | None = None,
) -> bool:
    """Move the job, unless it is no longer in the state and attempt that `job` shows.

    `values` are other columns that change with it. False means the race was lost and nothing was
    changed; IllegalTransition that the table has no such move or reason. `job` shows the row as it
    is afterwards.
    """
    before = job.state
    after = transition(before, trigger, code)
    changes: dict[str, Any] = {
        "reason_code": code,
        "reason_message": message,
        "position": None,
        "blocked_by": [],
        "held_by": None,
        **_not_kept_back(job, now),
        **(values or {}),
    }
    if after.is_terminal:
        changes["finished_at"] = now
    if not repository.compare_and_set(session, job, state=after, values=changes):
        return False
    repository.add_event(
        session,
        EventRow(
            job_id=job.id,
            seq=job.event_seq,
            time=now,
            type="state",
            from_state=before,
            to_state=after,
            attempt=job.attempt,
            code=code,
            message=message,
            data=dict(data or {}),
        ),
    )
    if after.is_terminal:
        message = "the job ended before it was seen to train on"
        faults_repository.fail_drills(session, job.id, message, now)
        if before is JobState.QUEUED:
            dependencies_repository.withdraw(session, [job.id])
        ended = dependencies.Ended(
            job.id, job.array_id, after, is_stopped_early=code == STOPPED_EARLY
        )
        dependencies.resolve(session, [ended], now)
        if after is JobState.FAILED:
            sweeps.trial_failed(session, job, now)
    notify(session, job.id, events_of(job.id), QUEUE)
    if job.array_id is not None:
        notify(session, events_of(job.array_id))
    return True


def remark(
    session: Session,
    job: JobRow,
    *,
    type_: str,
    code: str,
    message: str,
    now: datetime,
    data: Mapping[str, Any] | None = None,
) -> None:
    """An event that leaves the state as it is."""
    repository.add_event(
        session,
        EventRow(
            job_id=job.id,
            seq=repository.count_event(session, job),
            time=now,
            type=type_,
            attempt=job.attempt,
            code=code,
            message=message,
            data=dict(data or {}),
        ),
    )
    notify(session, job.id, events_of(job.id))


@dataclass(frozen=True)
class Claimed:
    """The attempt that a claim began, as a launch needs it."""

    job_id: str
    attempt: int
    spec: JobSpec
    resume_from: tuple[CheckpointRef, ...]
    """Committed checkpoints that still count, newest first."""
    max_runtime_s: float | None
    """Running time left to the job."""
    init_from: CheckpointRef | None
    """Another job's checkpoint to begin with, if none of its own loads."""
    furthest_step: int
    """Optimizer steps that an earlier attempt has done."""
    min_workers: int | None
    """The fewest workers with which an elastic group may go on."""
    code: CodeRow | None
    """The uploaded code that it runs."""
    owner: str
    array_index: int | None
    parameters: Mapping[str, Any]
    """Values of a sweep's trial, by name."""


def claim(
    session: Session,
    job_id: str,
    attempt_seen: int,
    slices: Sequence[Slice],
    bundle: Mapping[str, float],
    cluster_session: str,
    now: datetime,
    *,
    queue_seen: str,
) -> Claimed | None:
    """Begin the next attempt on these slots; None if the job is no longer as it was seen.

    The number of the attempt is the fencing token of everything that is recorded of it.
    """
    job = repository.lock(session, job_id)
    if job is None or job.state != JobState.QUEUED or job.attempt != attempt_seen:
        return None
    if job.held_by is not None or job.queue != queue_seen:
        return None
    left_s = runtime_left_s(job)
    if left_s is not None and left_s <= 0:
        message = f"has run for {job.runtime_used_s:.0f} s, max_runtime_s is {job.max_runtime_s}"
        move(session, job, Trigger.FAIL, code="runtime_exceeded", message=message, now=now)
        return None
    try:
        spec = read(job.spec)
    except DocumentRefused as refused:
        message = f"can't start: {refused}"
        move(session, job, Trigger.FAIL, code="document_refused", message=message, now=now)
        return None
    world_size = sum(part.num_workers for part in slices)
    nodes = f"{len(slices)} node{'' if len(slices) == 1 else 's'}"
    smaller = world_size < job.num_workers
    gang = f"{world_size} of {job.num_workers} workers" if smaller else workers(world_size)
    moved = move(
        session,
        job,
        Trigger.CLAIM,
        code="claimed",
        message=f"starts {gang} on {nodes}",
        now=now,
        values={
            "attempt": attempt_seen + 1,
            "world_size": world_size,
            "not_before": None,
            "started_at": job.started_at or now,
            "progress": without_rates(job.progress),
        },
    )
    assert moved, "the row is locked, so nobody changed it meanwhile"
    attempts_repository.insert(
        session,
        AttemptRow(
            job_id=job_id,
            attempt=job.attempt,
            phase=Phase.ACQUIRING,
            slices=[{"node_id": s.node_id, "num_workers": s.num_workers} for s in slices],
            held=held_slots.on_nodes(session, slices),
            bundle=dict(bundle),
            world_size=world_size,
            cluster_session=cluster_session,
            cursor={},
            num_errors=0,
            created_at=now,
        ),
    )
    refs = tuple(
        CheckpointRef(row.url, row.step, row.manifest_sha256)
        for row in counting_checkpoints(session, job_id)
    )
    spec = _rolled_back(spec, attempts_repository.num_diverged(session, job_id))
    origin = init_from.current(session, job)
    furthest = attempts_repository.furthest_step(session, job_id)
    code = None if job.code is None else code_repository.get(session, job.owner, job.code)
    return Claimed(
        *(job_id, job.attempt, spec, refs, left_s, origin, furthest),
        min_workers=job.min_workers,
        code=code,
        owner=job.owner,
        array_index=job.array_index,
        parameters=_parameters(session, job),
    )


def _parameters(session: Session, job: JobRow) -> Mapping[str, Any]:
    trial = None if job.array_id is None else sweeps_repository.trial(session, job.id)
    return {} if trial is None else trial.parameters or {}


def _rolled_back(spec: JobSpec, rollbacks: int) -> JobSpec:
    """The document as the next attempt gets it: each earlier rollback has lowered the rate."""
    if not rollbacks:
        return spec
    rate = spec.train.optimizer.lr * ROLLBACK_FACTOR**rollbacks
    optimizer = spec.train.optimizer.model_copy(update={"lr": rate})
    train = spec.train.model_copy(update={"optimizer": optimizer})
    return spec.model_copy(update={"train": train})


def runtime_left_s(job: JobRow) -> float | None:
    return None if job.max_runtime_s is None else job.max_runtime_s - job.runtime_used_s


def note_waiting(session: Session, waits: Sequence[policy.Wait], now: datetime) -> int:
    """Store why each job waits and at which place; answers how many changed.

    Neither a move nor an event, since plans are made often; a budget that is used up is an event,
    since it keeps jobs back for long. A row that would not change is not written.
    """
    stopped: dict[str, str] = {}
    queued = {row.id: row for row in repository.in_state(session, (JobState.QUEUED,))}
    notes: list[dict[str, Any]] = []
    for wait in waits:
        row = queued.get(wait.job_id)
        # A job that was held or released since the plan saw it has told why by itself.
        if row is None or (row.held_by is None) == (wait.reason.code == HELD):
            continue
        is_kept_back = wait.reason.code in KEPT_BACK
        kept_back = _kept_back(row, now) if is_kept_back else _not_kept_back(row, now)
        shown = (row.reason_code, row.reason_message, row.position, tuple(row.blocked_by))
        is_as_shown = shown == (
            wait.reason.code,
            wait.reason.message,
            wait.position,
            wait.blocked_by,
        )
        if is_as_shown and is_kept_back == (row.kept_back_since is not None):
            continue
        if wait.reason.code == BUDGET_USED_UP != row.reason_code:
            stopped[wait.job_id] = wait.reason.message
        note = {
            "reason_code": wait.reason.code,
            "reason_message": wait.reason.message,
            "position": wait.position,
            "blocked_by": list(wait.blocked_by),
            **kept_back,
        }
        new = {f"new_{name}": value for name, value in note.items()}
        notes.append({"job_id": wait.job_id, **new})
    repository.note_waiting(session, notes)
    _tell_stopped(session, stopped, now)
    touch(session, *(note["job_id"] for note in notes))
    return len(notes)


def _tell_stopped(session: Session, messages: Mapping[str, str], now: datetime) -> None:
    """An event for each of these waiting jobs: the budget of its queue is used up."""
    told = {
        "time": now,
        "type": "budget",
        "from_state": None,
        "to_state": None,
        "code": BUDGET_USED_UP,
        "data": {},
    }
    changed = repository.count_events_of_waiting(session, list(messages), BUDGET_USED_UP)
    rows = [
        {
            **told,
            "job_id": row.id,
            "seq": row.event_seq,
            "attempt": row.attempt,
            "message": messages[row.id],
        }
        for row in changed
    ]
    arrays_repository.add_events(session, rows)
    notify(session, *(topic for row in changed for topic in (row.id, events_of(row.id))))


def _kept_back(job: JobRow | Row[Any], now: datetime) -> dict[str, Any]:
    """Columns of a job that could not start now, were all slots free."""
    return {"kept_back_s": job.kept_back_s, "kept_back_since": job.kept_back_since or now}


def _not_kept_back(job: JobRow | Row[Any], now: datetime) -> dict[str, Any]:
    """Columns of one that could."""
    since = job.kept_back_since
    more_s = 0.0 if since is None else max(0.0, (now - since).total_seconds())
    return {"kept_back_s": job.kept_back_s + more_s, "kept_back_since": None}


def fail_impossible(
    session: Session,
    job_id: str,
    reason: policy.Reason,
    now: datetime,
    *,
    attempt_seen: int | None = None,
) -> bool:
    """Fail a waiting job that the cluster can never run; False if it is no longer waiting."""
    job = repository.lock(session, job_id)
    if job is None or job.state != JobState.QUEUED:
        return False
    if attempt_seen is not None and job.attempt != attempt_seen:
        return False
    return move(session, job, Trigger.IMPOSSIBLE, code=reason.code, message=reason.message, now=now)
