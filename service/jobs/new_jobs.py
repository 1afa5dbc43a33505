"""Submission of a job: checks its document against the cluster, and creates its first rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, NamedTuple

from sqlalchemy.orm import Session

from dray.functions import ENTRYPOINT
from dray.spec import JobSpec, Pretrained
from dray.views import JobState
from ray_workers.shared.memory_limit import COPIES_SHARE, human
from service.checkpoints import base_jobs, init_from
from service.code import entrypoints
from service.config.node_types import LABEL, label_resources
from service.config.settings import Settings
from service.db.models import JobRow
from service.db.repositories import jobs as repository
from service.db.repositories.submission import code as code_repository
from service.domain.attempts.group_traits import why_no_spares
from service.domain.errors import FunctionsRefused, InvalidDocument, OutOfMemory, Unsatisfiable
from service.domain.events import ACTOR, SYNC_PLAN
from service.domain.scheduling import policy
from service.domain.scheduling.placement import slots
from service.domain.scheduling.placement.topology import Topology
from service.domain.scheduling.rules.queues import Queue
from service.lifecycle import deadlines, resizing
from service.nodes import node_table
from service.nodes.node_table import refuse_missing_precision
from service.planning.service import Resolved
from service.queues import admission
from service.queues.admission import Coming
from service.sweeps import submitting


def without_sources(spec: JobSpec) -> tuple[JobSpec, list[str | None] | None]:
    """Return the document without the URLs of its silos' data, and a list of the removed URLs.
    Only the silos' own ranks may see the URLs. The list is None for a job without silos."""
    federated = spec.federated
    if federated is None or federated.silos is None:
        return spec, None
    silos = [silo.model_copy(update={"source": None}) for silo in federated.silos]
    bare = federated.model_copy(update={"silos": silos})
    return spec.model_copy(update={"federated": bare}), [one.source for one in federated.silos]


def refuse_functions(spec: JobSpec, settings: Settings) -> None:
    """Raise FunctionsRefused for a pickled function if the server does not accept any."""
    is_function = spec.script is not None and spec.script.entrypoint == ENTRYPOINT
    if is_function and not settings.takes_functions:
        raise FunctionsRefused(
            "this server does not accept pickled functions",
            pointer="/script/entrypoint",
            hint="submit a script; the operator can allow functions with DRAY_TAKES_FUNCTIONS",
        )


def with_pinned_nodes(request: policy.Request, spec: JobSpec) -> policy.Request:
    """Return the request, with each silo's worker pinned to nodes that have the silo's labels."""
    silos = None if spec.federated is None else spec.federated.silos
    homes = tuple(tuple(sorted(label_resources(silo.node_labels))) for silo in silos or ())
    return replace(request, homes=homes)


def use_code(session: Session, spec: JobSpec, owner: str, now: datetime) -> None:
    """Prevent the deletion of the job's code. Raises CodeUnfit if the code no longer exists."""
    code = spec.code
    if code is not None and code_repository.use(session, owner, code, now) is None:
        pointer = "/script/code" if spec.script else "/model/code"
        raise entrypoints.code_unfit(code, pointer)


class ScheduledRun(NamedTuple):
    """A run of a schedule, for which a job is submitted."""

    schedule_id: str
    name: str
    """The schedule's name."""
    at: str
    """The time of the run, in ISO 8601 with the schedule's offset from UTC."""


class Admitted(NamedTuple):
    """The result of the check of a document against its queue."""

    request: policy.Request
    queue: Queue
    limit_s: int | None
    """The limit of the running time: the job's own limit, or the queue's default."""


def admit(
    session: Session,
    resolved: Resolved,
    owner: str,
    settings: Settings,
    now: datetime,
    *,
    coming: Coming,
    checks_runtime: bool = True,
    used_s: float = 0.0,
    may_exceed_priority: bool = False,
) -> Admitted:
    """Check the document of a job against its queue and the cluster. With `checks_runtime`,
    `max_runtime_s` is compared with the queue's rules and the deadline; `used_s` is the time for
    which the job has already run. Submissions and changes of documents use the same checks.

    Raises InvalidDocument, OutOfMemory, UnknownQueue, QueueFull, RuntimeTooLong, Unsatisfiable, the
    errors of `deadlines.refuse_missed`, and PriorityTooHigh unless `may_exceed_priority` is set.
    """
    spec = resolved.spec
    if resolved.refusal is not None:
        raise resolved.refusal
    refuse_useless_spares(spec)
    request = with_pinned_nodes(slots.request_of_job(spec), spec)
    queue = admission.admit(session, spec.queue, owner, request, coming)
    if not may_exceed_priority:
        admission.refuse_priority(queue, spec.priority)
    limit_s = spec.max_runtime_s
    if checks_runtime:
        limit_s = admission.limit_in(queue, spec.max_runtime_s, used_s)
        deadlines.refuse_missed(spec, now, has_started=used_s > 0)
    refuse_impossible(session, spec, request, settings)
    refuse_large_copies(session, spec, request, resolved.copies_bytes, settings)
    for one in submitting.with_each_precision(spec):
        refuse_missing_precision(session, one)
    return Admitted(request, queue, limit_s)


def refuse_useless_spares(spec: JobSpec) -> None:
    """Raise InvalidDocument if the job has spares, but can't replace a lost worker while the other
    workers keep their state."""
    has_gpus = spec.resources.gpus_per_worker > 0
    why = why_no_spares(spec, has_gpus=has_gpus) if spec.num_spares else None
    if why is not None:
        raise InvalidDocument(
            f"this job can't use spares: {why}",
            pointer="/elastic/spares",
            hint="remove elastic.spares",
        )


def refuse_impossible(
    session: Session, spec: JobSpec, request: policy.Request, settings: Settings
) -> None:
    """Raise Unsatisfiable if the known cluster could not run the job even if the cluster were empty
    and the autoscaler had added all its nodes, or if the topology lacks the requested level."""
    has_labels = any(name.startswith(LABEL) for name in request.bundle)
    is_spread = bool(request.homes) or bool(request.roles)
    is_placed = has_labels or is_spread or request.required_level is not None
    known = node_table.usable if is_placed else node_table.totals
    usable = known(session, settings.autoscale_nodes)
    topology = Topology(settings.topology, (usable or ()) if is_placed else ())
    reason = policy.why_no_level(request, topology)
    if reason is None and usable is not None:
        reason = policy.can_ever_fit(request, usable, topology)
    if reason is not None:
        raise Unsatisfiable(
            f"this job could never start: {reason.message}",
            pointer=_pointer_of_lack(spec, request, usable or ()),
            hint=(
                "request fewer resources, or add nodes to the cluster; `dray cluster` shows the "
                "cluster's nodes"
            ),
        )


def refuse_large_copies(
    session: Session,
    spec: JobSpec,
    request: policy.Request,
    copies_bytes: int,
    settings: Settings,
) -> None:
    """Raise OutOfMemory if the copies of the state that the document asks for can't fit into the
    memory of the known nodes, even if nothing else used it. The memory of nodes that the autoscaler
    may add is unknown.

    copies_bytes: `Resolved.copies_bytes`.
    """
    asked = spec.checkpoint.in_memory
    if isinstance(asked, str) or not copies_bytes or settings.autoscale_nodes:
        return
    nodes = node_table.with_memory_for_copies(session)
    if nodes is None:
        return

    def fits(num_copies: int) -> bool:
        needed = copies_bytes * (1 + num_copies) / (1 + asked.copies)
        gang = replace(request, bundle={**request.bundle, node_table.COPIES: needed})
        return policy.can_ever_fit(gang.of_size(request.num_ranks), nodes) is None

    if fits(asked.copies):
        return
    fewer = next((number for number in range(asked.copies - 1, 0, -1) if fits(number)), None)
    worker = request.of_size(1)
    usable = [node for node in nodes if policy.can_ever_fit(worker, [node]) is None]
    sizes = [node.total[node_table.COPIES] for node in usable]
    raise OutOfMemory(
        f"the copies of this job's state in memory can't fit: they need {human(copies_bytes)} on "
        f"each of {request.num_ranks} workers, and at most {COPIES_SHARE:.0%} of a node's memory "
        f"can be used for them ({human(max(sizes))} on the largest node, {human(sum(sizes))} on "
        "all nodes that have the resources of a worker)",
        pointer="/checkpoint/in_memory",
        hint=(
            "set checkpoint.in_memory to off; the job then resumes from its newest checkpoint if "
            "it loses a worker"
            if fewer is None
            else f"set checkpoint.in_memory.copies to {fewer}"
        ),
    )


def _pointer_of_lack(spec: JobSpec, request: policy.Request, usable: Sequence[policy.Node]) -> str:
    """Return the pointer to the field of a request that these nodes could never satisfy."""
    if (unplaceable := policy.unplaceable_worker(request, usable)) is not None:
        is_silo = unplaceable < len(request.homes)
        return f"/federated/silos/{unplaceable}/node_labels" if is_silo else "/resources"
    alike = replace(request, num_workers=request.num_alike, roles=())
    if request.roles and policy.can_ever_fit(alike, usable) is None:
        role = policy.lacking_role(request, usable)
        if spec.script is None:
            return "/sync/server_resources"
        return "/script/roles" if role is None else f"/script/roles/{role.role}/resources"
    alone = request.of_size(request.least_running)
    if request.least > alone.least and policy.can_ever_fit(alone, usable) is None:
        return "/elastic/spares"
    anywhere = replace(request, required_level=None)
    if request.required_level and (not usable or policy.can_ever_fit(anywhere, usable) is None):
        return "/resources/required_topology"
    lacking = policy.lacking_resource(request, usable)
    has_roles = spec.script is not None and spec.script.roles
    number = "/script/roles" if has_roles else "/resources/num_workers"
    pointers = {
        None: "/elastic/min_workers" if request.min_workers else number,
        "CPU": "/resources/cpus_per_worker",
        "GPU": "/resources/gpus_per_worker",
        "memory": "/resources/memory_bytes",
    }
    of_label = lacking is not None and lacking.startswith(LABEL)
    other = "/resources/node_labels" if of_label else "/resources/accelerator"
    return pointers.get(lacking, other)


def columns_of(spec: JobSpec, admitted: Admitted) -> dict[str, Any]:
    """Return the columns of a job that are derived from those fields of the document that can be
    changed while the job waits. `queue` and `priority` are not included."""
    request, limit_s = admitted.request, admitted.limit_s
    return {
        "name": spec.name,
        "spec": spec.model_dump(mode="json"),
        "num_workers": request.num_workers,
        "num_spares": request.num_spares,
        "min_workers": request.min_workers,
        "bundle": dict(request.bundle),
        "required_topology": request.required_level,
        "homes": [list(labels) for labels in request.homes] or None,
        "roles": resizing.role_rows(request.roles),
        "max_user_retries": spec.max_retries,
        "max_runtime_s": limit_s,
        "is_runtime_of_queue": limit_s is not None and spec.max_runtime_s is None,
        "reservation": spec.reservation,
    }


def new_row(
    job_id: str,
    spec: JobSpec,
    admitted: Admitted,
    origin: init_from.InitFromCheckpoint | None,
    owner: str,
    project: str,
    settings: Settings,
    now: datetime,
    *,
    run: ScheduledRun | None = None,
) -> JobRow:
    return repository.unstored(
        **columns_of(spec, admitted),
        id=job_id,
        owner=owner,
        project=project,
        queue=spec.queue,
        priority=spec.priority,
        spec_version=spec.version,
        init_from=origin.as_row() if origin else None,
        init_from_job=origin.job if origin else base_jobs.job_of(spec),
        code=spec.code,
        schedule_id=run and run.schedule_id,
        scheduled_at=run and run.at,
        state=JobState.QUEUED,
        reason_code="submitted",
        reason_message="waits for the scheduler's first round",
        blocked_by=[],
        kept_back_s=0.0,
        attempt=0,
        world_size=admitted.request.num_ranks,
        spares_ready=0,
        memory_copies=None,
        yields=spec.script is None,
        event_seq=1,
        user_failures=0,
        infra_failures=0,
        free_requeues=0,
        preemptions=0,
        max_infra_retries=settings.infra_retries,
        begin_at=spec.begin_at.astimezone(UTC) if spec.begin_at and spec.begin_at > now else None,
        deadline=spec.deadline and spec.deadline.astimezone(UTC),
        singleton=spec.singleton,
        runtime_used_s=0.0,
        recoveries=0,
        summary={},
        num_metric_keys=0,
        log_bytes=0,
        log_limit_bytes=settings.log_limit_bytes,
        log_lines_dropped=0,
        created_at=now,
    )


def first_event(
    row: JobRow, resolved: Resolved, actor: str, now: datetime, run: ScheduledRun | None = None
) -> dict[str, Any]:
    message = f"submitted to the queue {row.queue!r}"
    if run is not None:
        message = f"{message} by the schedule {run.name!r} for {run.at}"
    data: dict[str, Any] = {ACTOR: actor}
    if row.is_runtime_of_queue:
        message = f"{message}, whose default for max_runtime_s is {row.max_runtime_s}"
    model = resolved.spec.model
    if isinstance(model, Pretrained) and (licences := model.licences):
        licensed = model.catalogue or model.base
        names = " and ".join(map(repr, licences))
        message = f"{message}; accepted the licence {names} of {licensed}"
        data["accepted"] = {"model": licensed, "licence": model.accept_licence}
    if resolved.explanation is not None:
        message = f"{message}; {resolved.explanation}"
        data["planned"] = row.spec["parallel"]
    if resolved.sync is not None:
        data[SYNC_PLAN] = resolved.sync.model_dump(mode="json")
    return {
        "job_id": row.id,
        "seq": row.event_seq,
        "time": now,
        "type": "state",
        "from_state": None,
        "to_state": JobState.QUEUED,
        "attempt": 0,
        "code": "submitted",
        "message": message,
        "data": data,
    }
