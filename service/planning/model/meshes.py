"""The ways to divide a job's model among its workers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from dray.spec import JobSpec, Parallel
from dray.spec.training.parallel import AXES, MODELS_OF


def meshes(spec: JobSpec) -> list[JobSpec]:
    """Return a copy of the document for each combination of axis sizes that the document allows,
    starting with the most replicas.

    Only the axes that are `auto` vary. If no axis is `auto`, all axes vary.
    """
    left = [axis for axis in AXES if axis in (spec.parallel.auto or AXES)]
    name = spec.model.name if spec.model is not None else ""
    left = [axis for axis in left if name in MODELS_OF.get(axis, (name,))]
    given = {}
    if spec.parallel.auto:
        given = {axis: getattr(spec.parallel, axis) for axis in ("data", *AXES)}
    products = _products(spec.resources.num_workers, left)
    divided = (with_axes(spec, {**given, **sizes}) for sizes in products)
    return [each for each in divided if each is not None]


def with_axes(spec: JobSpec, axes: dict[str, Any]) -> JobSpec | None:
    """Return the document with these axes; None if the result is invalid.

    Other fields of `parallel` are kept if they apply to these axes.
    """
    given = spec.parallel.model_dump(mode="json", exclude_defaults=True)
    meaningless = {"auto", "data", *AXES}
    if axes.get("pipeline", 1) == 1:
        meaningless |= {"schedule", "stages_per_rank"}
    if axes.get("shard", 1) * axes.get("context", 1) == 1:
        meaningless |= {"zero", "param_dtype", "reduce_dtype"}
    kept = {name: value for name, value in given.items() if name not in meaningless}
    found = changed(spec, {"parallel": {**kept, **axes}})
    if found is None and axes.get("shard", 1) > 1 and "zero" not in kept:
        # Some optimizers, such as lamb, need complete layers.
        found = changed(spec, {"parallel": {**kept, **axes, "zero": 1}})
    return found


def changed(spec: JobSpec, parts: dict[str, Any]) -> JobSpec | None:
    """Return the document with some parts replaced; None if the result is invalid."""
    try:
        return JobSpec.model_validate(document_with(spec, parts))
    except ValueError:
        return None


def document_with(spec: JobSpec, parts: dict[str, Any]) -> dict[str, Any]:
    """Return the document with some parts replaced, without validation."""
    return {**spec.without_defaults(), "recipe": spec.recipe, **parts}


def name_of(parallel: Parallel, num_workers: int) -> str:
    """Return a name such as `data 2 x shard 4`, with the ZeRO stage if it is not 3."""
    sizes = {"data": num_workers // parallel.num_parts}
    sizes |= {axis: getattr(parallel, axis) for axis in AXES}
    used = [f"{axis} {size}" for axis, size in sizes.items() if size > 1]
    name = " x ".join(used) or "one worker"
    return name if parallel.zero == 3 else f"{name}, zero {parallel.zero}"


def _products(total: int, axes: Sequence[str]) -> Iterator[dict[str, int]]:
    """Yield sizes of the axes whose product divides the total. The size of `data` is the
    quotient."""
    if not axes:
        yield {}
        return
    for size in (n for n in range(1, total + 1) if total % n == 0):
        for rest in _products(total // size, axes[1:]):
            yield {axes[0]: size, **rest}
