"""How the ranks exchange their gradients."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, StrictBool, model_validator

from dray.spec.fields import MAX_STEPS, Document, Int, Number, refuse_foreign


class Compression(Document):
    """Compression of gradients for sending. All methods but fp16 and bf16 keep the remainder and
    add it to the next step's gradient (error feedback)."""

    name: Literal["fp16", "bf16", "powersgd", "topk"]
    """fp16, bf16: half the bytes. powersgd: factors of low rank (Vogels et al. 2019,
    arXiv:1905.13727). topk: the largest elements of each tensor, with momentum correction where the
    optimizer is sgd with momentum (Lin et al. 2018, arXiv:1712.01887)."""
    rank: Annotated[Int, Field(ge=1, le=256)] = 2
    """powersgd: columns of the factors."""
    warm_start: StrictBool = True
    """powersgd: each step starts from the factors of the last one."""
    start_step: Annotated[Int, Field(ge=2, le=MAX_STEPS)] = 10
    """powersgd: number of exact steps after the start and after each re-formation of the group."""
    ratio: Annotated[Number, Field(gt=0.0, le=0.5)] = 0.001
    """topk: share of each tensor's elements to send, one at least."""
    warmup_steps: Annotated[Int, Field(ge=0, le=MAX_STEPS)] = 0
    """topk: number of steps over which the share falls from a quarter to `ratio`, after the start
    and after each re-formation of the group."""

    @model_validator(mode="after")
    def _options_fit(self) -> Self:
        owners: dict[str, tuple[str, ...]] = dict.fromkeys(
            ("rank", "warm_start", "start_step"), ("powersgd",)
        )
        refuse_foreign(
            self, self.name, owners | dict.fromkeys(("ratio", "warmup_steps"), ("topk",))
        )
        return self


class Outer(Document):
    """The optimizer that uses the mean change of the ranks' weights as a gradient: SGD with
    Nesterov momentum (DiLoCo, arXiv:2311.08105)."""

    lr: Annotated[Number, Field(gt=0.0, le=10.0)] = 0.7
    """Learning rate of the outer step."""
    momentum: Annotated[Number, Field(ge=0.0, lt=1.0)] = 0.9
    """Momentum of the outer step."""


class Sync(Document):
    """How ranks synchronise. If given, the job's metrics include the bytes sent."""

    compression: Compression | None = None
    """Compression of gradients; unset, none."""
    every: Annotated[Int, Field(ge=1, le=MAX_STEPS)] = 1
    """Optimizer steps between two averages of the ranks' weights, with independent steps in between
    (local SGD, arXiv:1805.09767). The ranks also average before an evaluation and a checkpoint.
    With 1, gradients are exchanged in every step."""
    outer: Outer | None = None
    """With `every` above 1, an optimizer for the averages; unset, the mean of the weights is
    used."""

    @model_validator(mode="after")
    def _parts_fit(self) -> Self:
        if self.every == 1 and self.outer is not None:
            raise ValueError("outer needs every above 1: with 1, gradients are exchanged")
        if self.every > 1 and self.compression is not None:
            raise ValueError("compression needs every 1: above, no gradients are exchanged")
        return self
