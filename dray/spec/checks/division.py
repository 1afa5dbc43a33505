"""Validation across parts: the axes along which the model is divided."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dray.spec.fields import wrong
from dray.spec.program.script import Script
from dray.spec.training.sync import ParameterServer

if TYPE_CHECKING:
    from dray.spec.job import JobSpec
    from dray.spec.resources import Elastic


def check_mesh(spec: JobSpec) -> None:
    spec.parallel.check(spec.resources.num_workers)
    if spec.parallel.auto and spec.script is not None:
        raise wrong("/parallel", "is only for recipes: a script divides its own model")
    if spec.parallel.auto and spec.changes_size:
        raise wrong(
            "/elastic",
            "can't be combined with parallel: auto, which plans for a fixed number of workers",
        )
    if spec.is_divided:
        _check_divided(spec)
        if spec.model is not None:
            spec.parallel.check_model(spec.model)


def _check_divided(spec: JobSpec) -> None:
    train = spec.train
    axis = "shard" if spec.parallel.shard > 1 else spec.parallel.inner_axes[0]
    alone = f"requires parallel.{axis} to be 1"
    if spec.elastic is not None:
        _check_elastic(spec, spec.elastic, alone)
    if spec.script is not None:
        _check_divided_script(spec, spec.script)
        return
    if spec.copies_differ:
        at = "/sync/every" if spec.takes_local_steps else "/sync/kind"
        raise wrong(at, f"{alone}: above 1, no rank has the complete state")
    if spec.parallel.zero == 1:
        return  # every rank has the complete weights and gradients
    instead = ", or parallel.zero to be 1" if not spec.parallel.inner_axes else ""
    if spec.compression is not None:
        why = ": compression applies to complete gradients"
        if spec.parallel.is_sharded:
            why = (
                f"{instead}: torch can't compress the sharded gradients of FSDP2. To halve the "
                "traffic, set parallel.reduce_dtype to bf16"
            )
        raise wrong("/sync/compression", f"{alone}{why}")
    if train.ema is not None:
        raise wrong("/train/ema", f"{alone} in this version of dray{instead}")
    if train.optimizer.name not in ("adamw", "sgd"):
        raise wrong(
            "/train/optimizer/name",
            f"{alone}{instead}: {train.optimizer.name} needs complete layers. With "
            f"parallel.{axis}, use adamw or sgd",
        )


def _check_elastic(spec: JobSpec, elastic: Elastic, alone: str) -> None:
    """Check that the group has complete replicas of the model at every size that it can have."""
    if spec.script is not None and spec.changes_size:
        raise wrong(
            "/elastic", f"{alone}: scripts whose ranks divide a model do not recover in place"
        )
    if elastic.exact:
        raise wrong(
            "/elastic/exact", f"{alone}: ranks that divide a model compute their shares together"
        )
    size, least = spec.parallel.num_parts, elastic.min_workers
    if least is not None and least % size:
        near = (least // size * size, -(-least // size) * size)
        fitting = (str(one) for one in near if 0 < one <= spec.resources.num_workers)
        raise wrong(
            "/elastic/min_workers",
            f"is {least}, but must be a multiple of {size}, the number of workers that hold one "
            f"replica of the model: set it to {' or '.join(fitting)}",
        )


def _check_divided_script(spec: JobSpec, script: Script) -> None:
    """Reject options that `train.prepare` does not support. `train.prepare` parallelizes a script's
    model only along the axes `data`, `shard` and `tensor`."""
    for axis in ("pipeline", "context"):
        if getattr(spec.parallel, axis) > 1:
            raise wrong(
                f"/parallel/{axis}",
                "is only for recipes: train.prepare() supports parallel.shard and parallel.tensor",
            )
    if script.framework != "torch" or script.roles:
        raise wrong("/parallel", "requires a script with `framework: torch` and no roles")
    if spec.parallel.zero != 3:
        raise wrong("/parallel/zero", "must be 3 for a script: train.prepare() uses FSDP2")
    for name in ("param_dtype", "reduce_dtype"):
        if getattr(spec.parallel, name) != "fp32":
            raise wrong(
                f"/parallel/{name}", "is only for recipes: train.prepare() sends values as fp32"
            )


def check_sent_types(spec: JobSpec) -> None:
    parallel = spec.parallel
    for name in ("param_dtype", "reduce_dtype"):
        if getattr(parallel, name) == "fp32":
            continue
        if not parallel.is_sharded or parallel.zero == 1:
            raise wrong(
                f"/parallel/{name}",
                "requires FSDP: set parallel.shard or parallel.context to more than 1, and "
                "parallel.zero to 2 or 3. For replicas, use sync.compression bf16 instead",
            )
    param, precision = parallel.param_dtype, spec.train.precision
    if param not in ("fp32", precision):
        raise wrong("/parallel/param_dtype", f"requires train.precision {param}")
    if parallel.reduce_dtype == "fp16" and precision != "fp16":
        raise wrong(
            "/parallel/reduce_dtype",
            "fp16 requires train.precision fp16, whose loss scaling preserves small gradients. "
            "With other precisions, use bf16",
        )


def check_balance(spec: JobSpec) -> None:
    if spec.parallel.balance == "even":
        return
    if spec.script is not None:
        raise wrong(
            "/parallel/balance", "is only for recipes: a script distributes its own batches"
        )
    if spec.is_exact:
        raise wrong(
            "/parallel/balance", "must be `even` with elastic.exact, which uses equal shares"
        )
    has_servers = isinstance(spec.sync, ParameterServer)
    if spec.compression is not None or spec.copies_differ or has_servers:
        raise wrong(
            "/parallel/balance",
            "must be `even` with sync.compression, with sync.every above 1, and with kinds of sync "
            "other than all_reduce",
        )
