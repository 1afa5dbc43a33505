"""Plan how a job could be divided on the known cluster."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from sqlalchemy.orm import Session

from dray import views
from dray.requests import PlanRequest
from dray.spec import AutoSync, JobSpec
from dray.spec.training.parallel import AXES
from ray_workers.shared.memory_limit import human
from ray_workers.shared.node_needs import DataPolicy
from service.db.session import Database
from service.domain.errors import NotPlannable, OutOfMemory
from service.nodes import node_table
from service.planning import base_config
from service.planning.calibration import calibrated
from service.planning.model.choice import (
    GIB,
    MEMORY_GIB,
    OVERHEAD_BYTES,
    Candidate,
    NoDivision,
    Plan,
    least_divided,
    plan_of,
    smallest_change,
)
from service.planning.model.cost import Machine, machine_of
from service.planning.model.memory import copies_bytes, memory_of, pieces_of
from service.planning.model.meshes import name_of
from service.planning.model.shapes import Shapes, shapes_of
from service.planning.model.sync_choice import SyncCandidate, SyncChoice, choose_sync
from service.planning.model.sync_costs import RankSpeeds
from service.planning.model.unknown import Unknown
from service.planning.sync_facts import Nodes, facts_of, nodes_for, speeds_of

TOLERANCE = 0.15
"""Maximum relative error of a plan's memory estimate, verified by tests. A job is rejected if it
needs more than the available memory plus this error."""

LEAST_LENGTH = 2
"""Number of tokens of the shortest possible example: one to predict, and the one before it."""


@dataclass(frozen=True)
class WorkerMemory:
    """The kind of the workers that the job could get, and their memory, if known."""

    least_bytes: int | None
    """Memory of the smallest worker."""
    most_bytes: int | None
    """Memory of the largest worker."""
    source: str
    accelerator: str | None = None


@dataclass(frozen=True)
class Resolved:
    """The document to store, and a description of the planner's changes."""

    spec: JobSpec
    explanation: str | None = None
    """A description of the choices; None if there was nothing to choose."""
    sync: views.SyncPlan | None = None
    """The choice for `sync: auto`, if the document has it."""
    refusal: OutOfMemory | None = None
    """The reason why the job can't be accepted."""
    copies_bytes: int = 0
    """Host memory that each worker needs at least for the copies of the state that the document
    asks for (`checkpoint.in_memory`); 0 if it is unknown."""


class Plans:
    """The use cases of the planner."""

    def __init__(self, database: Database, policy_of: Callable[[JobSpec], DataPolicy]) -> None:
        """policy_of: returns the folders from which the configuration of a job's base may be read.
        The server has looked up the base in the catalogue."""
        self._database = database
        self._policy_of = policy_of

    async def plan(self, request: PlanRequest) -> views.Plan:
        """Return the plan of a job. Raises NotPlannable if the document lacks information that a
        plan needs."""
        spec = request.job
        shapes = await self._shapes(spec)
        if isinstance(shapes, Unknown):
            raise NotPlannable(f"{shapes}")
        known, machine, around = await self._database.read(
            lambda session: (*self._look_up(session, spec, shapes), _look_around(session, spec))
        )
        if request.memory_bytes_per_rank is not None:
            given = request.memory_bytes_per_rank
            known = replace(
                known, least_bytes=given, most_bytes=given, source="given in the request"
            )
        return await asyncio.to_thread(_answer, request, spec, shapes, known, machine, around)

    async def _shapes(self, spec: JobSpec) -> Shapes | Unknown:
        """Return the shapes of the job's samples, or the reason why they are unknown."""
        config = await asyncio.to_thread(self._config_of, spec)
        try:
            return shapes_of(spec, config=config)
        except Unknown as unknown:
            return unknown

    def _config_of(self, spec: JobSpec) -> Mapping[str, Any] | None:
        return base_config.read(spec, self._policy_of(spec))

    async def resolve(self, spec: JobSpec) -> Resolved:
        """Replace each `auto` in the document with a choice. If the job certainly does not fit, the
        result contains a refusal. Raises NotPlannable if no choice is possible."""
        shapes = await self._shapes(spec)
        resolved = await self._resolve_parallelism(spec, shapes)
        if not isinstance(spec.checkpoint.in_memory, str):
            copies = await asyncio.to_thread(_copies_bytes, resolved.spec, shapes)
            resolved = replace(resolved, copies_bytes=copies)
        if not isinstance(spec.sync, AutoSync) or resolved.refusal is not None:
            return resolved
        spec = resolved.spec
        machine, around = await self._database.read(
            lambda session: (self._look_up(session, spec, shapes)[1], _look_around(session, spec))
        )
        choice = await asyncio.to_thread(_sync_choice, spec, shapes, machine, around)
        chosen = choice.chosen
        assert chosen.spec is not None
        became = f"sync: auto became {chosen.name}: {chosen.why}"
        explanation = "; ".join(filter(None, (resolved.explanation, became)))
        return replace(resolved, spec=chosen.spec, explanation=explanation, sync=_sync_plan(choice))

    async def _resolve_parallelism(self, spec: JobSpec, shapes: Shapes | Unknown) -> Resolved:
        """Replace the axes that are `auto` with sizes, and check the memory if it is known."""
        automatic = bool(spec.parallel.auto)
        if spec.script is not None or not (automatic or _may_know_memory(spec)):
            return Resolved(spec)
        known, machine = await self._database.read(
            lambda session: self._look_up(session, spec, shapes, needs_speed=automatic)
        )
        if known.most_bytes is None and not automatic:
            return Resolved(spec)
        return await asyncio.to_thread(_resolved, spec, shapes, known, machine)

    def _look_up(
        self, session: Session, spec: JobSpec, shapes: Shapes | Unknown, *, needs_speed: bool = True
    ) -> tuple[WorkerMemory, Machine]:
        known = known_memory(session, spec)
        machine = machine_of(spec, known.accelerator)
        if needs_speed and isinstance(shapes, Shapes):
            machine = calibrated(session, machine, spec, shapes, known.accelerator, self._config_of)
        return known, machine


@dataclass(frozen=True)
class _Around:
    """The information that `sync: auto` uses in addition to the document."""

    speeds: RankSpeeds
    nodes: Nodes


def _look_around(session: Session, spec: JobSpec) -> _Around:
    return _Around(speeds_of(session, spec), nodes_for(session, spec))


def _sync_choice(
    spec: JobSpec,
    shapes: Shapes | Unknown,
    machine: Machine,
    around: _Around,
    *,
    is_measured: bool = False,
) -> SyncChoice:
    """Choose the value of `sync`. `is_measured` is set if the bandwidth was given in the
    request."""
    if isinstance(shapes, Unknown):
        return choose_sync(spec, f"can't compare all-reduce with the other kinds of sync: {shapes}")
    facts = facts_of(spec, shapes, machine, around.speeds, around.nodes, is_measured=is_measured)
    return choose_sync(spec, facts)


def _sync_plan(choice: SyncChoice) -> views.SyncPlan:
    return views.SyncPlan(
        chosen=choice.chosen.name,
        options=[_sync_option(each) for each in choice.options],
        facts=list(choice.facts),
    )


def _sync_option(option: SyncCandidate) -> views.SyncOption:
    cost = option.cost
    return views.SyncOption(
        name=option.name,
        sync=dict(option.sync),
        sent_bytes=None if cost is None else round(cost.sent_bytes),
        step_time_s=None if cost is None else cost.step_time_s,
        staleness_steps=None if cost is None else cost.staleness_steps,
        why=option.why,
    )


def _may_know_memory(spec: JobSpec) -> bool:
    """Whether the workers' memory might be known from the resources that the document requests."""
    resources = spec.resources
    return resources.gpus_per_worker > 0 or resources.memory_bytes is not None


def known_memory(session: Session, spec: JobSpec) -> WorkerMemory:
    """Return the memory that each worker of the job has for its tensors, if known."""
    resources = spec.resources
    if not resources.gpus_per_worker:
        if resources.memory_bytes is None:
            return WorkerMemory(None, None, "unknown: resources.memory_bytes is not given")
        return WorkerMemory(
            resources.memory_bytes, resources.memory_bytes, "resources.memory_bytes"
        )
    kinds = node_table.kinds(session, spec)
    sizes = [MEMORY_GIB.get(kind or "", ()) for kind in kinds]
    share = resources.gpus_per_worker
    found = [round(size * GIB * share) - OVERHEAD_BYTES for each in sizes for size in each]
    named = ", ".join(sorted(kind or "of unknown type" for kind in kinds))
    if not all(sizes) or not found:
        what = f"the cluster's GPUs are {named}" if kinds else "no GPU is connected"
        return WorkerMemory(None, None, f"unknown: {what}", resources.accelerator)
    of = "" if share == 1 else f"{share:g} of "
    source = f"{of}a GPU of type {named}, minus 1 GiB for CUDA and NCCL"
    return WorkerMemory(min(found), max(found), source, next(iter(kinds)))


def _resolved(
    spec: JobSpec, shapes: Shapes | Unknown, known: WorkerMemory, machine: Machine
) -> Resolved:
    automatic = bool(spec.parallel.auto)
    if isinstance(shapes, Unknown):
        return _least_divided(spec, shapes) if automatic else Resolved(spec)
    plan = _plan(spec, shapes, machine, known, all_of_them=automatic)
    best = plan.candidates[0]
    refusal = None
    needed = _least_memory(best, shapes)
    if needed is not None and _cannot_fit(needed, known):
        assert known.most_bytes is not None
        change = plan.change
        if known.most_bytes != known.least_bytes:  # `change` is for the smallest
            change = smallest_change(spec, shapes, known.most_bytes, all_of_them=automatic)
        refusal = _refusal(needed, known, known.most_bytes, change)
    if not automatic:
        return Resolved(spec, refusal=refusal)
    explanation = f"{_auto(spec)} became {best.name}: {plan.why(best)}"
    return Resolved(best.spec, explanation, refusal=refusal)


def _least_divided(spec: JobSpec, unknown: Unknown) -> Resolved:
    """Choose the division with the most replicas, without planning."""
    try:
        way = least_divided(spec)
    except NoDivision:
        raise _no_way(spec) from None
    name = name_of(way.parallel, spec.resources.num_workers)
    return Resolved(way, f"{_auto(spec)} became {name}, because {unknown}")


def _plan(
    spec: JobSpec, shapes: Shapes, machine: Machine, known: WorkerMemory, *, all_of_them: bool
) -> Plan:
    try:
        return plan_of(spec, shapes, machine, known.least_bytes, all_of_them=all_of_them)
    except NoDivision:
        raise _no_way(spec) from None


def _no_way(spec: JobSpec) -> NotPlannable:
    return NotPlannable(
        f"no sizes of {', '.join(spec.parallel.auto)} result in {spec.resources.num_workers} "
        "workers, given the sizes of the other axes",
        pointer="/parallel",
        hint="leave more axes to the planner, or specify other sizes",
    )


def _auto(spec: JobSpec) -> str:
    """Return the fields of the document that leave axes to the planner."""
    chosen = spec.parallel.auto
    if set(chosen) == set(AXES):
        return "parallel: auto"
    return f"parallel.{' and '.join(chosen)}: auto"


def _least_memory(best: Candidate, shapes: Shapes) -> int | None:
    """Return the bytes that a rank needs whatever the data is. Return None if the plan makes an
    assumption about the data, other than the length of a base model's rows."""
    if shapes.base is not None:
        return memory_of(best.spec, replace(shapes, length=LEAST_LENGTH)).total
    return None if shapes.assumed else best.memory.total


def _copies_bytes(spec: JobSpec, shapes: Shapes | Unknown) -> int:
    """Return `Resolved.copies_bytes`, which does not depend on the length of rows."""
    if isinstance(shapes, Unknown) or (shapes.assumed and shapes.base is None):
        return 0
    return copies_bytes(spec, shapes)


def _cannot_fit(needed: int, known: WorkerMemory) -> bool:
    """Whether the job certainly can't fit: it exceeds the memory by more than TOLERANCE."""
    return known.most_bytes is not None and needed > known.most_bytes * (1 + TOLERANCE)


def _refusal(needed: int, known: WorkerMemory, available: int, change: str | None) -> OutOfMemory:
    missing = needed - available
    return OutOfMemory(
        f"this job can't fit: each worker needs {human(needed)}, but has {human(available)} "
        f"({known.source}); {human(missing)} ({missing} bytes) are missing",
        pointer="/parallel",
        hint=f"it fits with {change}"
        if change
        else "no single change makes the job fit: use a smaller model or larger workers",
    )


def _answer(
    request: PlanRequest,
    spec: JobSpec,
    shapes: Shapes,
    known: WorkerMemory,
    machine: Machine,
    around: _Around,
) -> views.Plan:
    machine = _as_asked(machine, request)
    plan = _plan(spec, shapes, machine, known, all_of_them=True)
    best = plan.candidates[0].spec
    has_bandwidth = request.bandwidth_bytes_per_s is not None
    sync = _sync_choice(best, shapes, machine, around, is_measured=has_bandwidth)
    return views.Plan(
        chosen=plan.chosen.name if plan.chosen else None,
        meshes=[_mesh(each, plan) for each in plan.candidates],
        memory_bytes_per_rank=plan.available_bytes,
        memory_source=known.source,
        change=plan.change,
        calibration=views.Calibration(
            flops_per_s=machine.flops_per_s,
            bandwidth_bytes_per_s=machine.bandwidth_bytes_per_s,
            latency_s=machine.latency_s,
            source=machine.source,
        ),
        assumed=list(shapes.assumed),
        sync=_sync_plan(sync),
    )


def _as_asked(machine: Machine, request: PlanRequest) -> Machine:
    names = ("flops_per_s", "bandwidth_bytes_per_s", "latency_s")
    given = {name: getattr(request, name) for name in names if getattr(request, name) is not None}
    if not given:
        return machine
    source = f"{', '.join(given)} as given in the request"
    if len(given) < len(names):
        source += f"; other values: {machine.source}"
    return replace(machine, **given, source=source)


def _mesh(candidate: Candidate, plan: Plan) -> views.PlannedMesh:
    memory, time, pieces = candidate.memory, candidate.time, pieces_of(candidate.spec)
    return views.PlannedMesh(
        name=candidate.name,
        parallel=candidate.spec.parallel.model_dump(mode="json", exclude_defaults=True),
        micro_batch_size=pieces.size,
        num_micro_batches=pieces.count,
        memory=views.PlannedMemory(
            parameters_bytes=memory.parameters,
            gradients_bytes=memory.gradients,
            optimizer_bytes=memory.optimizer,
            activations_bytes=memory.activations,
            total_bytes=memory.total,
        ),
        missing_bytes=candidate.missing_bytes,
        step_time_s=time.total_s,
        compute_s=time.compute_s,
        send_s=time.send_s,
        idle_s=time.idle_s,
        why=plan.why(candidate),
    )
