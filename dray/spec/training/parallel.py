"""The division of a model and a batch among the ranks."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema, model_validator

from dray.spec.fields import Document, Int, a_number, wrong
from dray.spec.program.model import Gpt, Model, ResNet

MAX_WORKERS: Final = 4096

Size = Annotated[Int, Field(ge=1, le=MAX_WORKERS)]
_NUMBER_OR_AUTO = {
    "anyOf": [
        {"type": "integer", "minimum": 1, "maximum": MAX_WORKERS},
        {"type": "string", "const": "auto"},
    ]
}
Divisor = Annotated[Size, WithJsonSchema(_NUMBER_OR_AUTO)]
"""Size of an axis. `auto` adds the axis to `Parallel.auto`; its size is 1 until the planner chooses
a size."""
AXES = ("shard", "tensor", "pipeline", "context")
"""Axes along which one model is divided among several ranks."""
INNER = AXES[1:]
"""Axes that the model must support."""
MODELS_OF = {"tensor": ("gpt",), "pipeline": ("gpt", "resnet"), "context": ("gpt",)}


class Parallel(Document):
    """How the model and the batch are divided among the ranks. The number of ranks is the product
    of the axes."""

    auto: tuple[Literal["shard", "tensor", "pipeline", "context"], ...] = ()
    """Axes whose sizes the planner chooses when the job is submitted. The chosen sizes are stored
    in the job. `shard: auto` is shorthand for a single axis, and `parallel: auto` for all axes."""
    data: Literal["auto"] | Size = "auto"
    """Number of model replicas, each of which computes its share of the batch. `auto` is the number
    of ranks divided by the product of the other axes."""
    shard: Divisor = 1
    """Number of ranks that shard one model. Each rank holds a part of the parameters, gradients and
    optimizer state (FSDP), and computes its share of the batch."""
    zero: Annotated[Literal[1, 2, 3], BeforeValidator(a_number)] = 3
    """ZeRO stage (arXiv:1910.02054) to use with `shard`. 3 gathers the parameters for the forward
    pass, and again for the backward pass. 2 gathers them once, which uses more memory. 1 shards
    only the optimizer state."""
    tensor: Divisor = 1
    """Number of ranks that compute each layer together. Each rank holds a part of the matrices
    (Megatron, arXiv:1909.08053) and, between the matrix products, a part of the sequence
    (arXiv:2205.05198). Supported for gpt, and for scripts that pass a `tensor_plan` to
    `train.prepare`."""
    pipeline: Divisor = 1
    """Number of ranks among which the layers are divided. Micro-batches pass from rank to rank. For
    gpt and resnet."""
    schedule: Literal["gpipe", "1f1b", "interleaved", "zero_bubble"] = "1f1b"
    """Order of the forward and backward passes of a `pipeline`. gpipe: all forward passes come
    first (arXiv:1811.06965). 1f1b: forward and backward passes alternate, so fewer activations are
    kept. interleaved: each rank has several stages, so ranks are idle for less time
    (arXiv:2104.04473). zero_bubble: weight gradients are computed in the remaining idle time
    (arXiv:2401.10241)."""
    stages_per_rank: Annotated[Int, Field(ge=1, le=64)] = 1
    """Number of pipeline stages on each rank, for the schedules `interleaved` and `zero_bubble`."""
    context: Divisor = 1
    """Number of ranks among which each sequence and the attention heads are divided
    (DeepSpeed-Ulysses, arXiv:2309.14509). The parameters are also sharded across these ranks. For
    gpt."""

    param_dtype: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Data type in which `shard` and `context` gather the parameters of a block. A 16-bit type
    halves traffic and memory, and must equal `train.precision`. Each rank stores its own part in
    fp32."""
    reduce_dtype: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Data type in which `shard` and `context` send and sum gradients. fp16 requires
    `train.precision: fp16`, which scales the loss."""

    balance: Literal["even", "auto"] = "even"
    """auto: each rank's share of the batch is proportional to its measured speed, for machines of
    different speeds. Gradients are weighted so that the result is the same as with equal shares.
    Can't be combined with axes other than `data`."""

    @model_validator(mode="before")
    @classmethod
    def _name_what_is_auto(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        automatic = [axis for axis in AXES if given.get(axis) == "auto"]
        if not automatic:
            return given
        rest = {name: value for name, value in given.items() if name not in automatic}
        return {**rest, "auto": [*given.get("auto", ()), *automatic]}

    @property
    def num_parts(self) -> int:
        """Number of ranks that together hold one replica of the model."""
        return self.shard * self.tensor * self.pipeline * self.context

    @property
    def inner_axes(self) -> list[str]:
        return [axis for axis in INNER if getattr(self, axis) > 1]

    @property
    def is_sharded(self) -> bool:
        """Whether parameters, gradients or optimizer state are sharded, or whether `auto` allows
        the planner to shard them."""
        return self.shard * self.context > 1 or bool({"shard", "context"} & set(self.auto))

    def check(self, num_workers: int) -> None:
        """Raise a validation error if the axes don't match the number of workers, or options don't
        match the axes."""
        used = [axis for axis in AXES if getattr(self, axis) > 1]
        for axis in self.auto:
            if self.auto.count(axis) > 1:
                raise wrong(
                    f"/parallel/{axis}",
                    "is set to auto more than once: either list it once in parallel.auto, or set "
                    "it to auto",
                )
            if axis in used:
                raise wrong(
                    f"/parallel/{axis}",
                    "is listed in parallel.auto, but also has a size: omit one of the two",
                )
        if num_workers % self.num_parts:
            if len(used) == 1:
                what = f"is {self.num_parts}"
            else:
                product = " x ".join(f"{axis} {getattr(self, axis)}" for axis in used)
                what = f"results in the product {self.num_parts} ({product})"
            enough = -(-num_workers // self.num_parts) * self.num_parts
            message = (
                f"{what}, which does not divide resources.num_workers ({num_workers}): set "
                f"num_workers to {enough}, or {used[-1]} to "
                f"{_nearest_divisors(num_workers, self.num_parts)}"
            )
            raise wrong(f"/parallel/{used[-1]}", message)
        left = num_workers // self.num_parts
        if self.auto:
            self._check_auto(left)
        elif self.data not in ("auto", left):
            others = "".join(f" and {axis} is {getattr(self, axis)}" for axis in used)
            message = (
                f"is {self.data}, but must be {left}, because resources.num_workers is "
                f"{num_workers}{others}"
            )
            raise wrong("/parallel/data", message)
        if self.balance == "auto" and used:
            message = (
                f"must be `even` with {used[0]}: ranks that share one model compute each step "
                "together"
            )
            raise wrong("/parallel/balance", message)
        if self.zero == 1 and self.inner_axes:
            message = f"must be 2 or 3 with {self.inner_axes[0]}: torch's ZeRO 1 is for replicas"
            raise wrong("/parallel/zero", message)
        if self.zero != 3 and not self.is_sharded:
            raise wrong(
                "/parallel/zero",
                "requires parallel.shard above 1, because `zero` selects what is sharded",
            )
        is_pipeline = self.pipeline > 1 or "pipeline" in self.auto
        if self.schedule != "1f1b" and not is_pipeline:
            raise wrong("/parallel/schedule", "only applies to parallel.pipeline above 1")
        if self.stages_per_rank > 1 and not is_pipeline:
            raise wrong("/parallel/stages_per_rank", "only applies to parallel.pipeline above 1")
        if self.stages_per_rank > 1 and self.schedule not in ("interleaved", "zero_bubble"):
            message = (
                f"only applies to the schedules interleaved and zero_bubble, not to {self.schedule}"
            )
            raise wrong("/parallel/stages_per_rank", message)

    def _check_auto(self, left: int) -> None:
        if self.data != "auto" and left % self.data:
            message = f"is {self.data}, which does not divide the remaining {left} workers"
            raise wrong("/parallel/data", message)

    def check_model(self, model: Model) -> None:
        """Raise a validation error for axes that the model does not support."""
        for axis in self.inner_axes:
            if model.name not in MODELS_OF[axis]:
                message = (
                    f"is only for {' and '.join(MODELS_OF[axis])}: {model.name} can't be divided "
                    "this way. Use parallel.shard, which works with every model"
                )
                raise wrong(f"/parallel/{axis}", message)
        if isinstance(model, ResNet):
            self._check_stages(model.num_blocks, "blocks")
        if isinstance(model, Gpt):
            self._check_stages(model.num_layers, "layers (model.num_layers)")
            self._check_parts_of_layers(model)

    def _check_stages(self, most: int, what: str) -> None:
        stages = self.pipeline * self.stages_per_rank
        if self.pipeline > 1 and stages > most:
            product = "pipeline x stages_per_rank" if self.stages_per_rank > 1 else "pipeline"
            message = (
                f"results in {stages} stages, but the model has only {most} {what}: {product} must "
                f"be {most} or less"
            )
            raise wrong("/parallel/pipeline", message)

    def _check_parts_of_layers(self, model: Gpt) -> None:
        among = self.tensor * self.context
        axis = "tensor" if self.tensor > 1 else "context"
        if model.num_heads % among:
            message = (
                f"must divide model.num_heads, which is {model.num_heads}: each rank computes "
                "whole heads"
                + (f" (tensor x context is {among})" if min(self.tensor, self.context) > 1 else "")
            )
            raise wrong(f"/parallel/{axis}", message)
        if model.context_length % among:
            message = (
                f"must divide model.context_length, which is {model.context_length}: each rank has "
                "an equal part of the sequence"
            )
            raise wrong(f"/parallel/{axis}", message)


def _nearest_divisors(total: int, size: int) -> str:
    """Return the divisors of `total` that are nearest to `size`, such as `2 or 4`."""
    divisors = [n for n in range(1, total + 1) if total % n == 0]
    below = [n for n in divisors if n < size][-1:]
    above = [n for n in divisors if n > size][:1]
    return " or ".join(map(str, below + above))


def written_out(given: Any) -> Any:
    """Expand the shorthand `auto`."""
    return {"auto": list(AXES)} if given == "auto" else given
