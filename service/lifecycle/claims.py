"""Claims begin the next attempts of waiting jobs, with several jobs in one transaction.

A claim is a compare-and-set: the jobs are locked, and a job is skipped if it has changed since the
plan read it. The attempt's number is the fencing token of everything that is stored about the
attempt.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

from sqlalchemy import Row
from sqlalchemy.orm import Session

from dray.spec import JobSpec
from dray.train.checkpoints import CheckpointRef
from dray.views import JobState
from ray_workers.shared.contracts import WORKER_MTBF_S, AttemptSpec, Phase
from ray_workers.shared.node_needs import CodeRef, RemoteCodeRef
from ray_workers.shared.slices import RoleSlots, Slice
from service.checkpoints import base_jobs, init_from
from service.checkpoints.catalog import counting_checkpoints
from service.config import node_policies
from service.config.models_file import Catalogue
from service.config.node_types import without_labels
from service.config.settings import Settings
from service.db.models import CodeRow
from service.db.repositories import attempts as attempts_repository
from service.db.repositories import events as events_repository
from service.db.repositories import jobs as repository
from service.db.repositories.scheduling import cluster as cluster_repository
from service.db.repositories.scheduling import planned_jobs
from service.db.repositories.submission import code as code_repository
from service.db.repositories.submission import dependencies as dependencies_repository
from service.db.repositories.submission import sweeps as sweeps_repository
from service.db.session import measure
from service.domain import meter
from service.domain.attempts.group_traits import traits_of
from service.domain.attempts.retries import ROLLBACK_FACTOR
from service.domain.documents import CheckedDocument, DocumentRefused, checked
from service.domain.progress import without_rates
from service.domain.scheduling import policy
from service.domain.scheduling.placement.phrases import workers
from service.domain.scheduling.rules.times import latest_start
from service.domain.states import Trigger, transition
from service.lifecycle import held_slots, moves, node_checks, resizing, singletons, usage
from service.lifecycle.transitions import announce, changes_of, move, runtime_left_s, state_event


@dataclass(frozen=True)
class Wanted:
    """A waiting job in the state in which the plan read it, and the slots on which the job should
    start."""

    job_id: str
    attempt_seen: int
    queue_seen: str
    slices: tuple[Slice, ...]
    bundle: Mapping[str, float]
    roles: tuple[RoleSlots, ...] = ()
    request_seen: policy.Request | None = None
    """The request of the job's document. If it is None, neither the request, the limit of the array
    nor the reservation is compared."""
    array_limit_seen: int | None = None
    reservation_seen: str | None = None


@dataclass(frozen=True)
class Deployment:
    """The deployment in which attempts begin."""

    id: str
    cluster_session: str
    settings: Settings
    catalogue: Catalogue = field(default_factory=dict)
    """Models whose licences jobs must accept."""


@dataclass(frozen=True)
class _Startable:
    """A job that has not changed since the plan read it, and that can start."""

    wanted: Wanted
    row: Row[Any]
    checked: CheckedDocument


def claim(
    session: Session, wanted: Sequence[Wanted], deployment: Deployment, now: datetime
) -> list[AttemptSpec | None]:
    """Begin the next attempts of these jobs, and return the specs for their launches.

    The result contains None for a job that has changed since the plan read it, and for a trial that
    has no values yet. A job is marked as failed if it can no longer start.
    """
    rows = planned_jobs.lock_waiting(session, [one.job_id for one in wanted])
    in_arrays = [row.id for row in rows.values() if row.array_id is not None]
    parameters = sweeps_repository.parameters(session, in_arrays)
    units = {row.array_id or row.id for row in rows.values() if row.attempt == 0}
    waiters = dependencies_repository.waiters(session, units)
    tested = node_checks.nodes_without_work(
        session, {part.node_id for one in wanted for part in one.slices}
    )
    startable = []
    for one in wanted:
        row = rows.get(one.job_id)
        if row is None or row.attempt != one.attempt_seen:
            continue
        if any(part.node_id in tested for part in one.slices):
            continue
        if row.held_by is not None or row.queue != one.queue_seen:
            continue
        seen = one.request_seen, one.array_limit_seen, one.reservation_seen
        is_now = resizing.request_of(row), row.array_max_running, row.reservation
        if one.request_seen and seen != is_now:
            continue
        if row.singleton and singletons.runs(session, row.owner, row.name):
            continue
        if (row.array_id or row.id) in waiters:  # `after` was changed
            continue
        start_by = latest_start(row)
        if (row.begin_at and row.begin_at > now) or (start_by and start_by <= now):
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
    _begin(session, startable, deployment.cluster_session, now)
    used = {(each.row.owner, each.row.code) for each in startable if each.row.code is not None}
    codes = {of: code_repository.get(session, *of) for of in used}
    begun = {
        each.row.id: _spec_of(
            *(session, each, deployment),
            parameters=parameters.get(each.row.id),
            code=codes.get((each.row.owner, each.row.code)),
        )
        for each in startable
    }
    return [begun.get(one.job_id) for one in wanted]


def _check(row: Row[Any]) -> CheckedDocument | tuple[str, str]:
    """Return the document, or the code and message with which the job fails instead."""
    left_s = runtime_left_s(row)
    if left_s is not None and left_s <= 0:
        message = f"has run for {row.runtime_used_s:.0f} s; max_runtime_s is {row.max_runtime_s}"
        return "runtime_exceeded", message
    try:
        return checked(row.spec)
    except DocumentRefused as refused:
        return "document_refused", f"can't start: {refused}"


def _begin(
    session: Session, startable: Sequence[_Startable], cluster_session: str, now: datetime
) -> None:
    """Store the changes of state, their events and the attempts."""
    node_ids = {part.node_id for each in startable for part in each.wanted.slices}
    labels = cluster_repository.labels(session, sorted(node_ids))
    changes, events, attempts = [], [], []
    for each in startable:
        row, slices = each.row, each.wanted.slices
        change = _change(row, slices, now)
        changes.append({"job_id": row.id, **change})
        events.append(state_event(row, change, now))
        if row.attempt == 0:
            since = row.begin_at or row.created_at
            waited_s = max(0.0, (now - since).total_seconds())
            measure(session, meter.JOB_WAIT, waited_s)
        attempts.append(
            {
                "job_id": row.id,
                "attempt": change["attempt"],
                "queue": row.queue,
                "eligible_at": _eligible_at(row, change),
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
    usage.jobs_started(session, [e.row for e in startable if e.row.attempt == 0], now)
    for each in startable:
        announce(session, each.row)


def _eligible_at(row: Row[Any], change: Mapping[str, Any]) -> datetime:
    """Return the time since which the job could have started if there had been slots for it."""
    times = (row.created_at, change["eligible_at"], row.begin_at, row.not_before)
    latest: datetime = max(time for time in times if time is not None)
    return latest


def _change(row: Row[Any], slices: Sequence[Slice], now: datetime) -> dict[str, Any]:
    """Return the changed columns of a job that starts on these slots."""
    most = row.num_workers - row.num_spares
    num_slots = sum(part.num_workers for part in slices)
    world_size = min(num_slots, most)
    gang = f"{world_size} of {most} workers" if world_size < most else workers(world_size)
    if num_spares := num_slots - world_size:
        gang += f" and {num_spares} spare{'' if num_spares == 1 else 's'}"
    num_nodes = len({part.node_id for part in slices})
    nodes = f"{num_nodes} node{'' if num_nodes == 1 else 's'}"
    after = transition(JobState.QUEUED, Trigger.CLAIM, CLAIMED)
    return {
        **changes_of(row, after, CLAIMED, f"starts {gang} on {nodes}", now),
        "attempt": row.attempt + 1,
        "world_size": world_size,
        "spares_ready": 0,
        "memory_copies": None,
        "not_before": None,
        "started_at": row.started_at or now,
        "progress": without_rates(row.progress),
    }


CLAIMED = "claimed"


def _spec_of(
    session: Session,
    started: _Startable,
    deployment: Deployment,
    *,
    parameters: Mapping[str, Any] | None,
    code: CodeRow | None,
) -> AttemptSpec:
    """Return the spec for a launch. A first attempt needs few queries.

    `parameters` are the values of a trial. `code` is the uploaded code.
    """
    row, wanted, settings = started.row, started.wanted, deployment.settings
    refs: tuple[CheckpointRef, ...] = ()
    diverged = furthest_step = 0
    if row.attempt > 0:
        refs = tuple(
            CheckpointRef(one.url, one.step, one.manifest_sha256)
            for one in counting_checkpoints(session, row.id)
        )
        diverged = attempts_repository.num_diverged(session, row.id)
        furthest_step = attempts_repository.furthest_step(session, row.id)
    job = _rolled_back(started.checked, diverged)
    origin, older = _origin(session, row)
    return AttemptSpec(
        deployment_id=deployment.id,
        job_id=row.id,
        attempt=row.attempt + 1,
        spec=job.document,
        traits=traits_of(job, has_gpus=bool(wanted.bundle.get("GPU"))),
        slices=wanted.slices,
        bundle=without_labels(wanted.bundle),
        roles=tuple(replace(r, bundle=without_labels(r.bundle)) for r in wanted.roles),
        storage_url=settings.storage_url,
        resume_from=refs,
        init_from=origin,
        older_than_init_from=older,
        code=_code_of(job.spec, code, settings),
        data_policy=node_policies.data_policy(
            settings,
            job.spec,
            base_jobs.files_of(session, job.spec),
            deployment.catalogue,
        ),
        environment_policy=node_policies.environment_policy(settings, row.owner),
        start_timeout_s=settings.start_timeout_s,
        max_runtime_s=runtime_left_s(row),
        spool_limit_bytes=settings.spool_limit_bytes,
        output_limit_bytes=settings.output_limit_bytes,
        furthest_step=furthest_step,
        min_workers=row.min_workers,
        worker_mtbf_s=WORKER_MTBF_S,
        silence_limit_s=settings.silence_limit_s,
        system_metrics_s=settings.system_metrics_s or None,
        array_index=row.array_index,
        scheduled_at=row.scheduled_at,
        parameters=parameters or {},
        silo_sources=tuple(row.silo_sources or ()),
    )


def _code_of(
    spec: JobSpec, code: CodeRow | None, settings: Settings
) -> CodeRef | RemoteCodeRef | None:
    if spec.remote_code is not None:
        return node_policies.code_of(spec.remote_code, settings)
    if code is None:
        return None
    url = f"{settings.storage_url.rstrip('/')}/{code.manifest_key}"
    return CodeRef(code.id, url, code.manifest_sha256)


def _origin(
    session: Session, row: Row[Any]
) -> tuple[CheckpointRef | None, tuple[CheckpointRef, ...]]:
    if row.init_from is None:
        return None, ()
    job = repository.lock(session, row.id)
    return (None, ()) if job is None else init_from.current(session, job)


def _rolled_back(document: CheckedDocument, rollbacks: int) -> CheckedDocument:
    """Return the document for the next attempt, with the learning rate lowered once for each
    rollback."""
    if not rollbacks:
        return document
    spec = document.spec
    rate = spec.train.optimizer.lr * ROLLBACK_FACTOR**rollbacks
    optimizer = spec.train.optimizer.model_copy(update={"lr": rate})
    train = spec.train.model_copy(update={"optimizer": optimizer})
    return CheckedDocument.of(spec.model_copy(update={"train": train}))
