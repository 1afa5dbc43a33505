"""The ways in which a job's workers can divide it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from dray.spec import Gpt, JobSpec, Parallel

AXES = ("shard", "tensor", "pipeline", "context")


def meshes(spec: JobSpec) -> list[JobSpec]:
    """The document once for each division that it accepts, replicas first.

    `zero`, `schedule` and `stages_per_rank` stay as they are where they mean something.
    """
    found = []
    axes_of_model = AXES if isinstance(spec.model, Gpt) else AXES[:1]
    for axes in _products(spec.resources.num_workers, axes_of_model):
        divided = with_axes(spec, axes)
        if divided is not None:
            found.append(divided)
    return found


def with_axes(spec: JobSpec, axes: dict[str, int]) -> JobSpec | None:
    """The document with these axes above 1; None if it does not accept them."""
    parallel: dict[str, Any] = {**axes, "zero": spec.parallel.zero}
    if axes.get("pipeline", 1) > 1:
        parallel |= {
            "schedule": spec.parallel.schedule,
            "stages_per_rank": spec.parallel.stages_per_rank,
        }
    return changed(spec, {"parallel": parallel})


def changed(spec: JobSpec, parts: dict[str, Any]) -> JobSpec | None:
    """The document with some parts replaced; None if that is no document."""
    document = spec.model_dump(mode="json", exclude_defaults=True)
    document["recipe"] = spec.recipe
    try:
        return JobSpec.model_validate({**document, **parts})
    except ValueError:
        return None


def name_of(parallel: Parallel, num_workers: int) -> str:
    """Such as `data 2 x shard 4`."""
    sizes = {"data": num_workers // parallel.num_parts}
    sizes |= {axis: getattr(parallel, axis) for axis in AXES}
    used = [f"{axis} {size}" for axis, size in sizes.items() if size > 1]
    return " x ".join(used) or "one worker"


def _products(total: int, axes: tuple[str, ...]) -> Iterator[dict[str, int]]:
    """Sizes of the axes whose product divides the total; what is left is `data`."""
    if not axes:
        yield {}
        return
    for size in (n for n in range(1, total + 1) if total % n == 0):
        for rest in _products(total // size, axes[1:]):
            yield ({axes[0]: size} if size > 1 else {}) | rest
