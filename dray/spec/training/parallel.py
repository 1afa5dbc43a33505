"""The division of a model and a batch among the ranks."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from pydantic import Field, WithJsonSchema, model_validator

from dray.spec.fields import Document, Int, wrong
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
"""Size of an axis; `auto` adds the axis to `Parallel.auto`, and its size is 1 until the planner
has chosen it."""
AXES = ("shard", "tensor", "pipeline", "context")
"""Axes along which several ranks hold one model."""
INNER = AXES[1:]
"""Axes that need support in the model."""
MODELS_OF = {"tensor": ("gpt",), "pipeline": ("gpt", "resnet"), "context": ("gpt",)}


class Parallel(Document):
    """How the ranks divide the model and the batch; their number is the product of the axes."""

    auto: tuple[Literal["shard", "tensor", "pipeline", "context"], ...] = ()
    """Axes whose sizes the planner chooses when the job is submitted; the job is stored with the
    chosen sizes. `shard: auto` is short for one axis, `parallel: auto` for all axes."""
    data: Literal["auto"] | Size = "auto"
    """Number of model replicas, each with its share of the batch; `auto` divides the number of
    ranks by the other axes."""
    shard: Divisor = 1
    """Ranks that share one model: each has a part of the parameters, gradients and optimizer state
    (FSDP), and a share of the batch."""
    zero: Literal[1, 2, 3] = 3
    """With `shard`, the ZeRO stage (arXiv:1910.02054). 3 gathers the parameters for the forward
    pass and again for the backward pass; 2 gathers them once, which takes more memory; 1 shards
    only the optimizer's state."""
    tensor: Divisor = 1
    """Ranks that compute each layer together, each with a part of the matrices (Megatron,
    arXiv:1909.08053) and, between the matrices, a part of the sequence (arXiv:2205.05198). For
    gpt, and scripts that give `train.prepare` a `tensor_plan`."""
    pipeline: Divisor = 1
    """Ranks that each hold some of the layers; micro-batches pass from rank to rank. For gpt and
    resnet."""
    schedule: Literal["gpipe", "1f1b", "interleaved", "zero_bubble"] = "1f1b"
    """With `pipeline`, the order of forward and backward passes. gpipe: all forward passes first
    (arXiv:1811.06965). 1f1b: forward and backward passes alternate, which holds fewer activations.
    interleaved: several stages on each rank, so that ranks idle less (arXiv:2104.04473).
    zero_bubble: gradients of weights are computed in the remaining idle time (arXiv:2401.10241)."""
    stages_per_rank: Annotated[Int, Field(ge=1, le=64)] = 1
    """With the schedules interleaved and zero_bubble, number of pipeline stages on each rank."""
    context: Divisor = 1
    """Ranks that each compute a part of every sequence, and some of the attention heads
    (DeepSpeed-Ulysses, arXiv:2309.14509); parameters are sharded over these ranks too. For gpt."""

    param_dtype: Literal["fp32", "bf16", "fp16"] = "fp32"
    """With `shard` or `context` and the same `precision`: type of the parameters that are gathered
    for a block; a half type halves traffic and memory. Each rank's own part stays fp32."""
    reduce_dtype: Literal["fp32", "bf16", "fp16"] = "fp32"
    """With `shard` or `context`: type in which gradients are sent and summed. fp16 needs the loss
    scale of `precision: fp16`."""

    balance: Literal["even", "auto"] = "even"
    """auto: each rank's share of the batch follows its measured speed, for machines of different
    speed; gradients are weighted so that the result stays the same. Only with `data`."""

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
        """Number of ranks that share one model."""
        return self.shard * self.tensor * self.pipeline * self.context

    @property
    def inner_axes(self) -> list[str]:
        return [axis for axis in INNER if getattr(self, axis) > 1]

    @property
    def is_sharded(self) -> bool:
        """Whether parameters, gradients or optimizer state are sharded, or `auto` may shard
        them."""
        return self.shard * self.context > 1 or bool({"shard", "context"} & set(self.auto))

    def check(self, num_workers: int) -> None:
        """Raise the error of `wrong` if the axes do not fit the number of workers, or options do
        not fit the axes."""
        used = [axis for axis in AXES if getattr(self, axis) > 1]
        for axis in self.auto:
            if axis in used or self.auto.count(axis) > 1:
                raise wrong(f"/parallel/{axis}", "is left to the planner and given as well")
        if num_workers % self.num_parts:
            if len(used) == 1:
                what = f"is {self.num_parts}, which does not divide"
            else:
                product = " x ".join(f"{axis} {getattr(self, axis)}" for axis in used)
                what = f"makes the product {self.num_parts} ({product}), which does not divide"
            enough = -(-num_workers // self.num_parts) * self.num_parts
            message = (
                f"{what} the {num_workers} of resources.num_workers: make those {enough}, or this "
                f"{_nearest_divisors(num_workers, self.num_parts)}"
            )
            raise wrong(f"/parallel/{used[-1]}", message)
        left = num_workers // self.num_parts
        if self.auto:
            self._check_auto(left)
        elif self.data not in ("auto", left):
            others = ", ".join(f"{axis} {getattr(self, axis)}" for axis in used)
            between = f" and {others}, so it must be {left}" if used else ""
            message = f"is {self.data} but resources.num_workers is {num_workers}{between}"
            raise wrong("/parallel/data", message)
        if self.balance == "auto" and used:
            message = f"must be even with {used[0]}: ranks that hold a model together step together"
            raise wrong("/parallel/balance", message)
        if self.zero == 1 and self.inner_axes:
            message = f"must be 2 or 3 with {self.inner_axes[0]}: torch's ZeRO 1 is for replicas"
            raise wrong("/parallel/zero", message)
        if self.zero != 3 and not self.is_sharded:
            raise wrong(
                "/parallel/zero", "is for parallel.shard above 1: it selects what is sharded"
            )
        is_pipeline = self.pipeline > 1 or "pipeline" in self.auto
        if self.schedule != "1f1b" and not is_pipeline:
            raise wrong("/parallel/schedule", "is for parallel.pipeline above 1")
        if self.stages_per_rank > 1 and not is_pipeline:
            raise wrong("/parallel/stages_per_rank", "is for parallel.pipeline above 1")
        if self.stages_per_rank > 1 and self.schedule not in ("interleaved", "zero_bubble"):
            message = f"is for the schedules interleaved and zero_bubble, not for {self.schedule}"
            raise wrong("/parallel/stages_per_rank", message)

    def _check_auto(self, left: int) -> None:
        if self.data != "auto" and left % self.data:
            message = f"is {self.data}, which does not divide the {left} workers that are left"
            raise wrong("/parallel/data", message)

    def check_model(self, model: Model) -> None:
        """Raise the error of `wrong` for axes that the model does not support."""
        for axis in self.inner_axes:
            if model.name not in MODELS_OF[axis]:
                message = (
                    f"is for {' and '.join(MODELS_OF[axis])}: {model.name} can't be divided so; "
                    "use parallel.shard, which every model takes"
                )
                raise wrong(f"/parallel/{axis}", message)
        if isinstance(model, ResNet):
            self._check_stages(model.num_blocks, "blocks of this depth")
        if isinstance(model, Gpt):
            self._check_stages(model.num_layers, "of model.num_layers")
            self._check_parts_of_layers(model)

    def _check_stages(self, most: int, what: str) -> None:
        stages = self.pipeline * self.stages_per_rank
        if self.pipeline > 1 and stages > most:
            product = "pipeline x stages_per_rank" if self.stages_per_rank > 1 else "it"
            message = f"makes {stages} stages, more than the {most} {what}: {product} can be {most}"
            raise wrong("/parallel/pipeline", f"{message} at most")

    def _check_parts_of_layers(self, model: Gpt) -> None:
        among = self.tensor * self.context
        axis = "tensor" if self.tensor > 1 else "context"
        if model.num_heads % among:
            message = (
                f"must divide model.num_heads {model.num_heads}: each rank computes whole heads"
                + (f" (tensor x context is {among})" if min(self.tensor, self.context) > 1 else "")
            )
            raise wrong(f"/parallel/{axis}", message)
        if model.context_length % among:
            message = (
                f"must divide model.context_length {model.context_length}: each rank has equally "
                "many places"
            )
            raise wrong(f"/parallel/{axis}", message)


def _nearest_divisors(total: int, size: int) -> str:
    """Return the divisors of `total` that are nearest to `size`, such as `2 or 4`."""
    divisors = [n for n in range(1, total + 1) if total % n == 0]
    below = [n for n in divisors if n < size][-1:]
    above = [n for n in divisors if n > size][:1]
    return " or ".join(map(str, below + above))


def written_out(given: Any) -> Any:
    """Return the fields that a short form stands for."""
    return {"auto": list(AXES)} if given == "auto" else given
