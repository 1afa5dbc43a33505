"""Claims: waiting jobs begin their next attempts, all that start in one transaction.

A claim is a compare-and-set: the jobs are locked, and those that are no longer as the plan saw them
are left as they are. The number of the attempt is the fencing token of all that is recorded of it.
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
from ray_workers.shared.contracts import Phase, RoleSlots, Slice
from service.checkpoints import init_from
from service.checkpoints.catalog import counting_checkpoints
from service.db.models import CodeRow
from service.db.repositories import attempts as attempts_repository
from service.db.repositories import events as events_repository
from service.db.repositories import jobs as repository
from service.db.repositories.scheduling import cluster as cluster_repository
from service.db.repositories.scheduling import planned_jobs
from service.db.repositories.submission import code as code_repository
from service.db.repositories.submission import sweeps as sweeps_repository
from service.db.session import measure
from service.domain import meter
from service.domain.attempts.retries import ROLLBACK_FACTOR
from service.domain.documents import CheckedDocument, DocumentRefused, checked
from service.domain.progress import without_rates
from service.domain.scheduling.placement.slots import workers
from service.domain.states import Trigger, transition
from service.lifecycle import held_slots, moves, resizing
from service.lifecycle.transitions import changes_of, move, runtime_left_s, state_event, tell_moved


@dataclass(frozen=True)
class Wanted:
    """A waiting job as the plan saw it, and the slots on which it is to start."""

    job_id: str
    attempt_seen: int
    queue_seen: str
    slices: tuple[Slice, ...]
    bundle: Mapping[str, float]
    roles: tuple[RoleSlots, ...] = ()


@dataclass(frozen=True)
class Claimed:
    """The attempt that a claim began, as a launch needs it."""

    wanted: Wanted
    attempt: int
    spec: JobSpec
    document: Mapping[str, Any]
    """`spec` as JSON."""
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
    silo_sources: tuple[str | None, ...]
    """As `AttemptSpec.silo_sources`."""

    @property
    def job_id(self) -> str:
        return self.wanted.job_id


@dataclass(frozen=True)
class _Startable:
    """A job that is as it was seen, and can start."""

    wanted: Wanted
    row: Row[Any]
    checked: CheckedDocument


def claim(
    session: Session, wanted: Sequence[Wanted], cluster_session: str, now: datetime
) -> list[Claimed | None]:
    """Begin the next attempts of these jobs; None for one that is no longer as it was seen, and for
    a trial that has no values yet. A job that can't start any more fails."""
    rows = planned_jobs.lock_waiting(session, [one.job_id for one in wanted])
    in_arrays = [row.id for row in rows.values() if row.array_id is not None]
    parameters = sweeps_repository.parameters(session, in_arrays)
    startable = []
    for one in wanted:
        row = rows.get(one.job_id)
        if row is None or row.attempt != one.attempt_seen:
            continue
        if row.held_by is not None or row.queue != one.queue_seen:
            continue
        if parameters.get(row.id, {}) is None:
            continue
        found = _check(row)
        if isinstance(found, CheckedDocument):
            startable.append(_Startable(one, row, found))
        else:
            code, message = found
            job = repository.lock(session, row.id)
            assert job is not None, "it is locked"
            move(session, job, Trigger.FAIL, code=code, message=message, now=now)
    if not startable:
        return [None] * len(wanted)
    _begin(session, startable, cluster_session, now)
    claimed = {each.job_id: each for each in _claimed(session, startable, parameters)}
    return [claimed.get(one.job_id) for one in wanted]


def _check(row: Row[Any]) -> CheckedDocument | tuple[str, str]:
    """The document; or why the job fails instead of starting: a code and a message."""
    left_s = runtime_left_s(row)
    if left_s is not None and left_s <= 0:
        message = f"has run for {row.runtime_used_s:.0f} s, max_runtime_s is {row.max_runtime_s}"
        return "runtime_exceeded", message
    try:
        return checked(row.spec)
    except DocumentRefused as refused:
        return "document_refused", f"can't start: {refused}"


def _begin(
    session: Session, startable: Sequence[_Startable], cluster_session: str, now: datetime
) -> None:
    """Store the moves, their events and the attempts."""
    node_ids = {part.node_id for each in startable for part in each.wanted.slices}
    labels = cluster_repository.labels(session, sorted(node_ids))
    changes, events, attempts = [], [], []
    for each in startable:
        row, slices = each.row, each.wanted.slices
        change = _change(row, slices, now)
        changes.append({"job_id": row.id, **change})
        events.append(state_event(row, change, now))
        if row.attempt == 0:
            waited_s = max(0.0, (now - row.created_at).total_seconds())
            measure(session, meter.JOB_WAIT, waited_s)
        attempts.append(
            {
                "job_id": row.id,
                "attempt": change["attempt"],
                "phase": Phase.ACQUIRING.value,
                "slices": [{"node_id": s.node_id, "num_workers": s.num_workers} for s in slices],
                "held": held_slots.on_nodes(slices, labels),
                "bundle": dict(each.wanted.bundle),
                "roles": resizing.role_rows(each.wanted.roles),
                "world_size": change["world_size"],
                "cluster_session": cluster_session,
                "cursor": {},
                "num_errors": 0,
                "created_at": now,
            }
        )
    planned_jobs.change_waiting(session, changes)
    attempts_repository.insert(session, attempts)
    events_repository.add_events(session, events)
    moves.note(session, events)
    for each in startable:
        tell_moved(session, each.row)


def _change(row: Row[Any], slices: Sequence[Slice], now: datetime) -> dict[str, Any]:
    """Columns of a job that starts on these slots."""
    world_size = sum(part.num_workers for part in slices)
    nodes = f"{len(slices)} node{'' if len(slices) == 1 else 's'}"
    smaller = world_size < row.num_workers
    gang = f"{world_size} of {row.num_workers} workers" if smaller else workers(world_size)
    after = transition(JobState.QUEUED, Trigger.CLAIM, CLAIMED)
    return {
        **changes_of(row, after, CLAIMED, f"starts {gang} on {nodes}", now),
        "attempt": row.attempt + 1,
        "world_size": world_size,
        "not_before": None,
        "started_at": row.started_at or now,
        "progress": without_rates(row.progress),
    }


CLAIMED = "claimed"


def _claimed(
    session: Session,
    startable: Sequence[_Startable],
    parameters: Mapping[str, Mapping[str, Any] | None],
) -> list[Claimed]:
    """All that the launches need; of the database, as little as a batch of first attempts asks.

    parameters: of those that are trials, by job."""
    codes = {
        (each.row.owner, each.row.code): code_repository.get(session, each.row.owner, each.row.code)
        for each in startable
        if each.row.code is not None
    }
    claimed = []
    for each in startable:
        row = each.row
        refs: tuple[CheckpointRef, ...] = ()
        diverged = furthest = 0
        if row.attempt > 0:
            refs = tuple(
                CheckpointRef(one.url, one.step, one.manifest_sha256)
                for one in counting_checkpoints(session, row.id)
            )
            diverged = attempts_repository.num_diverged(session, row.id)
            furthest = attempts_repository.furthest_step(session, row.id)
        ready = _rolled_back(each.checked, diverged)
        claimed.append(
            Claimed(
                each.wanted,
                row.attempt + 1,
                *(ready.spec, ready.document, refs, runtime_left_s(row)),
                init_from=_origin(session, row),
                furthest_step=furthest,
                min_workers=row.min_workers,
                code=codes.get((row.owner, row.code)),
                owner=row.owner,
                array_index=row.array_index,
                parameters=parameters.get(row.id) or {},
                silo_sources=tuple(row.silo_sources or ()),
            )
        )
    return claimed


def _origin(session: Session, row: Row[Any]) -> CheckpointRef | None:
    if row.init_from is None:
        return None
    job = repository.lock(session, row.id)
    return None if job is None else init_from.current(session, job)


def _rolled_back(document: CheckedDocument, rollbacks: int) -> CheckedDocument:
    """The document as the next attempt gets it: each earlier rollback has lowered the rate."""
    if not rollbacks:
        return document
    spec = document.spec
    rate = spec.train.optimizer.lr * ROLLBACK_FACTOR**rollbacks
    optimizer = spec.train.optimizer.model_copy(update={"lr": rate})
    train = spec.train.model_copy(update={"optimizer": optimizer})
    return CheckedDocument.of(spec.model_copy(update={"train": train}))
