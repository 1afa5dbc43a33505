"""Determine which divisions fit, which of them is the fastest, and which change would make a job
fit."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from dray.spec import JobSpec, Pretrained
from ray_workers.shared.memory_limit import human
from service.planning.model.cost import Machine, StepTime, step_time
from service.planning.model.memory import Memory, fits, memory_of
from service.planning.model.meshes import changed, meshes, name_of
from service.planning.model.shapes import Shapes

GIB = 1 << 30
MOST_WORKERS = 1024
"""Maximum number of workers for which divisions are compared. For larger jobs, only one division is
considered."""
SHORTEST = 128
"""The shortest length of examples that is proposed as a change, in tokens."""
OVERHEAD_BYTES = 1 * GIB
"""GPU memory that CUDA, its libraries and NCCL use before the first tensor."""

MEMORY_GIB: Mapping[str, tuple[int, ...]] = {
    "B200": (178,),
    "H200": (139,),
    "H100": (79,),
    "H20": (95, 139),
    "A100": (39, 79),
    "A100-80G": (79,),
    "A100-40G": (39,),
    "L40S": (44,),
    "L4": (22,),
    "A10G": (22,),
    "T4": (14,),
    "V100": (15, 31),
}
"""Free memory of an unused GPU in GiB, rounded down, keyed by Ray's accelerator type. Some types
are sold with two memory sizes."""


class NoDivision(Exception):
    """Raised if the axes that a document sets leave no valid sizes for the other axes."""


@dataclass(frozen=True)
class Candidate:
    """A way to divide the job among its workers."""

    spec: JobSpec
    memory: Memory
    time: StepTime
    missing_bytes: int | None
    """0 if the division fits, None if the workers' memory is unknown."""

    @property
    def name(self) -> str:
        return name_of(self.spec.parallel, self.spec.resources.num_workers)

    @property
    def fits(self) -> bool:
        return not self.missing_bytes


@dataclass(frozen=True)
class Plan:
    candidates: tuple[Candidate, ...]
    """Divisions that fit, fastest first, followed by the other divisions, sorted by the amount of
    missing memory."""
    available_bytes: int | None
    machine: Machine
    change: str | None
    """The smallest change that makes the job fit, as document fields with their values."""

    @property
    def chosen(self) -> Candidate | None:
        """The fastest division; None if no division fits."""
        first = self.candidates[0]
        return first if first.fits else None

    def why(self, candidate: Candidate) -> str:
        """Return a phrase that explains the candidate's rank."""
        if candidate.missing_bytes:
            return f"lacks {human(candidate.missing_bytes)} of memory on each worker"
        best = self.candidates[0]
        seconds = spoken(candidate.time.total_s)
        if candidate is best:
            known = "fits and " if candidate.missing_bytes is not None else ""
            alone = len(self.candidates) == 1
            return f"{known}takes {seconds} per step" + ("" if alone else ", the fastest")
        longer = candidate.time.total_s / max(best.time.total_s, 1e-12)
        parts = {"computing": "compute_s", "sending": "send_s", "idling": "idle_s"}
        costs = {
            what: getattr(candidate.time, part) - getattr(best.time, part)
            for what, part in parts.items()
        }
        what = max(costs, key=lambda each: costs[each])
        return (
            f"takes {seconds} per step, {longer:.2f} times as long as the fastest mesh: it spends "
            f"more time {what}"
        )


def plan_of(
    spec: JobSpec,
    shapes: Shapes,
    machine: Machine,
    available_bytes: int | None,
    *,
    all_of_them: bool,
) -> Plan:
    """Plan the job. Raises NoDivision. If `all_of_them` is set, all divisions of `meshes` are
    compared instead of only the division in the document."""
    specs = [spec]
    if all_of_them and _may_divide(spec):
        few = spec.resources.num_workers <= MOST_WORKERS
        specs = _divisions(spec) if few else [least_divided(spec)]
    found = [_candidate(each, shapes, machine, available_bytes) for each in specs]
    found.sort(key=lambda each: (each.missing_bytes or 0, each.time.total_s, each.memory.total))
    change = None
    if not found[0].fits and available_bytes is not None:
        given = spec if spec.parallel.auto else found[0].spec
        change = smallest_change(given, shapes, available_bytes, all_of_them=all_of_them)
    return Plan(tuple(found), available_bytes, machine, change)


def least_divided(spec: JobSpec) -> JobSpec:
    """Return the document with the most replicas; the unchanged document if no axis is `auto`.
    Raises NoDivision."""
    if not spec.parallel.auto:
        return spec
    return _divisions(spec)[0]


def _divisions(spec: JobSpec) -> list[JobSpec]:
    found = meshes(spec)
    if not found:
        raise NoDivision
    return found


def _candidate(spec: JobSpec, shapes: Shapes, machine: Machine, available: int | None) -> Candidate:
    memory = memory_of(spec, shapes)
    missing = None if available is None else max(0, memory.total - available)
    return Candidate(spec, memory, step_time(spec, shapes, machine), missing)


def _may_divide(spec: JobSpec) -> bool:
    """Whether the job can be divided. Elastic jobs can't be divided, because their number of
    workers is not fixed."""
    return not spec.changes_size


class _Change(NamedTuple):
    words: str
    spec: JobSpec
    """The changed document."""


def smallest_change(
    spec: JobSpec, shapes: Shapes, available_bytes: int, *, all_of_them: bool
) -> str | None:
    """Return the cheapest change that makes the job fit; None if no single change does.

    `all_of_them` is set if all divisions were tried instead of only the division in the document.
    """
    divides_anew = all_of_them and _may_divide(spec)

    def helps(tried: JobSpec) -> bool:
        ways = meshes(tried) if divides_anew else [tried]
        return any(fits(way, shapes, available_bytes) for way in reversed(ways))

    for kind in _changes(spec, shapes, divides=not all_of_them and _may_divide(spec)):
        if kind and helps(kind[-1].spec):
            return next(each.words for each in kind if helps(each.spec))
    return None


def _changes(spec: JobSpec, shapes: Shapes, *, divides: bool) -> Iterator[list[_Change]]:
    """Yield lists of changes, one list for each kind of change. Within a list, later changes save
    more memory and cost more.

    The changes in the first few lists affect neither the model nor its results. `divides` is set if
    the same workers can divide the model in a different way.
    """
    train, parallel = spec.train, spec.parallel

    def kind(*changes: Mapping[str, Any]) -> list[_Change]:
        found = []
        for parts in changes:
            new = _with(spec, parts)
            if new is None and "parallel.shard" in parts:
                parts = {**parts, "parallel.zero": 1}  # for optimizers such as lamb
                new = _with(spec, parts)
            if new is not None:
                found.append(_Change(_words(parts), new))
        return found

    share = -(-train.global_batch_size // (spec.num_replicas * parallel.shard))
    size = min(train.micro_batch_size or share, share)
    halves = [size >> n for n in range(1, size.bit_length())]
    yield kind(*({"train.micro_batch_size": n} for n in halves))
    if parallel.is_sharded:
        yield kind(*({"parallel.zero": zero} for zero in (2, 3) if zero > parallel.zero))
    shards = []
    if divides:
        left = spec.num_replicas
        shards = [parallel.shard * n for n in range(2, left + 1) if left % n == 0]
    yield kind(*({"parallel.shard": n} for n in shards))
    if train.precision == "fp32":
        yield kind({"train.precision": "bf16"})
    if train.recompute == "none":
        yield kind(*({"train.recompute": how} for how in ("selective", "full")))
    if divides:
        yield _other_divisions(spec, shapes)
    if not isinstance(spec.checkpoint.in_memory, str):
        yield kind({"checkpoint.in_memory": "auto"})
    yield kind({"train.optimizer.offload": True})
    yield kind({"train.optimizer.state_dtype": "bf16"})
    if isinstance(spec.model, Pretrained):
        if spec.model.adapter is None:
            yield kind({"model.adapter": "lora"})
        elif spec.model.adapter.base_precision == "fp32":
            low = {"train.precision": "bf16"} if train.precision == "fp32" else {}
            yield kind({**low, "model.adapter.base_precision": "bf16"})
    least = {"train.micro_batch_size": 1, "train.recompute": "full"}
    yield kind(least)
    yield kind(*({**least, "parallel.shard": n} for n in shards))
    factors = (2, 4, 8, 16, 32, 64)
    yield kind(*(_more_workers(spec, factor) for factor in factors))
    yield kind(*({**_more_workers(spec, factor), **least} for factor in factors))
    if spec.method is not None:
        longest = spec.method.max_length
        shorter = [longest >> n for n in range(1, longest.bit_length()) if longest >> n >= SHORTEST]
        yield kind(*({"method.max_length": length} for length in shorter))


def _other_divisions(spec: JobSpec, shapes: Shapes) -> list[_Change]:
    own = spec.parallel.model_dump(mode="json")

    def changed_axes(way: JobSpec) -> dict[str, Any]:
        theirs = way.parallel.model_dump(mode="json")
        return {f"parallel.{name}": value for name, value in theirs.items() if value != own[name]}

    ways = sorted(meshes(spec), key=lambda way: memory_of(way, shapes).total, reverse=True)
    return [_Change(_words(parts), way) for way in ways if (parts := changed_axes(way))]


def _more_workers(spec: JobSpec, factor: int) -> dict[str, Any]:
    parts: dict[str, Any] = {"resources.num_workers": spec.resources.num_workers * factor}
    if not spec.parallel.auto:
        parts["parallel.shard"] = spec.parallel.shard * factor
    return parts


def _words(parts: Mapping[str, Any]) -> str:
    shown = ((path, v if isinstance(v, str) else json.dumps(v)) for path, v in parts.items())
    return " with ".join(f"{path} {value}" for path, value in shown)


def _with(spec: JobSpec, parts: Mapping[str, Any]) -> JobSpec | None:
    """Return the document with these fields; None if the result is invalid."""
    document: dict[str, Any] = spec.model_dump(mode="json")
    for path, value in parts.items():
        *outer, field = path.split(".")
        part = document
        for name in outer:
            part = part[name]
        part[field] = value
    roots = {path.partition(".")[0] for path in parts}
    return changed(spec, {root: document[root] for root in roots})


def spoken(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1000:.0f} ms" if seconds >= 0.1 else f"{seconds * 1000:.2g} ms"
