"""JobSpec: the one document a user writes.

The API validates it, the service stores it, the workers train by it; all three read these
classes. Unknown fields are refused, numbers are not guessed from strings or booleans, and a
feature that this version does not have is refused by name instead of being ignored.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, Final, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StrictBool,
    StrictInt,
    StringConstraints,
    model_validator,
)

SPEC_VERSION: Final = 1

MAX_WORKERS = 4096
MAX_STEPS = 10**12


def _plain_text(value: str) -> str:
    """Refuse what no name needs and what databases and terminals trip over."""
    for character in value:
        code = ord(character)
        if code < 32 or code == 127 or 0xD800 <= code <= 0xDFFF:
            raise ValueError(f"must not contain the control character U+{code:04X}")
    return value


def _a_number(value: Any) -> Any:
    """`true` and `"1"` are not numbers, though Python would take them for one."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError("must be a number")
    if not math.isfinite(value):
        raise ValueError("must be a finite number")
    return float(value)


PlainText = Annotated[str, AfterValidator(_plain_text)]
Name = Annotated[str, StringConstraints(min_length=1, max_length=128), AfterValidator(_plain_text)]
LabelKey = Annotated[
    str, StringConstraints(min_length=1, max_length=63, pattern=r"^[A-Za-z0-9][A-Za-z0-9._/-]*$")
]
LabelValue = Annotated[str, StringConstraints(max_length=255), AfterValidator(_plain_text)]
QueueName = Annotated[
    str, StringConstraints(min_length=1, max_length=63, pattern=r"^[a-z0-9][a-z0-9_-]*$")
]
Number = Annotated[float, BeforeValidator(_a_number)]


class Document(BaseModel):
    """Base of every part of the job document."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class Script(Document):
    """A training script that already lies where the ranks run, started as torchrun would."""

    entrypoint: Annotated[PlainText, StringConstraints(min_length=1, max_length=4096)]
    """Path of the Python file on the worker's machine, or relative to its working directory."""
    args: Annotated[list[PlainText], Field(max_length=1024)] = []
    """Command line arguments, given as they are (no shell)."""


class Model(Document):
    """Which of a recipe's models to train."""

    name: Literal["cnn", "mlp"] = "cnn"
    width: Annotated[StrictInt, Field(ge=1, le=4096)] = 32
    """Channels of the first convolution (cnn) or hidden units (mlp)."""
    dropout: Annotated[Number, Field(ge=0.0, lt=1.0)] = 0.0


class Data(Document):
    """Where the samples come from and how they are split."""

    source: Literal["sklearn://digits"] = "sklearn://digits"
    validation_fraction: Annotated[Number, Field(gt=0.0, lt=1.0)] = 0.2
    """Share of the samples kept out of training and used for `val/` metrics."""


class Optimizer(Document):
    """The optimizer; `momentum` and `nesterov` are for sgd, `betas` and `eps` for adamw."""

    name: Literal["adamw", "sgd"] = "adamw"
    lr: Annotated[Number, Field(gt=0.0, le=1000.0)] = 1e-3
    """Peak learning rate, before the schedule."""
    weight_decay: Annotated[Number, Field(ge=0.0, le=10.0)] = 0.0
    momentum: Annotated[Number, Field(ge=0.0, lt=1.0)] = 0.0
    nesterov: StrictBool = False
    betas: tuple[
        Annotated[Number, Field(ge=0.0, lt=1.0)], Annotated[Number, Field(ge=0.0, lt=1.0)]
    ] = (0.9, 0.999)
    eps: Annotated[Number, Field(gt=0.0, le=1.0)] = 1e-8

    @model_validator(mode="after")
    def _nesterov_needs_momentum(self) -> Self:
        if self.nesterov and self.momentum == 0.0:
            raise ValueError("nesterov needs a momentum above 0")
        return self


class Schedule(Document):
    """Learning rate over the optimizer steps: linear warm-up, then constant or cosine."""

    name: Literal["constant", "cosine"] = "constant"
    warmup_steps: Annotated[StrictInt, Field(ge=0, le=MAX_STEPS)] = 0
    final_ratio: Annotated[Number, Field(ge=0.0, le=1.0)] = 0.0
    """The cosine ends at `lr * final_ratio`."""


class Train(Document):
    """How the model is trained; sizes are global, so they hold at any world size."""

    epochs: Annotated[StrictInt, Field(ge=1, le=10**6)] = 1
    max_steps: Annotated[StrictInt, Field(ge=1, le=MAX_STEPS)] | None = None
    """Stop after this many optimizer steps, if that comes before the last epoch's end."""
    global_batch_size: Annotated[StrictInt, Field(ge=1, le=2**24)] = 256
    """Samples of one optimizer step, over all ranks."""
    micro_batch_size: Annotated[StrictInt, Field(ge=1, le=2**24)] | None = None
    """Most samples of one forward pass of one rank; a larger share is accumulated."""
    optimizer: Optimizer = Optimizer()
    schedule: Schedule = Schedule()
    precision: Literal["fp32", "bf16"] = "fp32"
    max_grad_norm: Annotated[Number, Field(gt=0.0)] | None = None
    """Clip the global gradient norm to this."""
    seed: Annotated[StrictInt, Field(ge=0, lt=2**63)] = 0
    eval_every_epochs: Annotated[StrictInt, Field(ge=1, le=10**6)] = 1


class Parallel(Document):
    """How the world is divided. This version replicates (data parallelism)."""

    data: Literal["auto"] | Annotated[StrictInt, Field(ge=1, le=MAX_WORKERS)] = "auto"
    shard: Annotated[StrictInt, Field(ge=1)] = 1
    tensor: Annotated[StrictInt, Field(ge=1)] = 1
    pipeline: Annotated[StrictInt, Field(ge=1)] = 1
    context: Annotated[StrictInt, Field(ge=1)] = 1

    @model_validator(mode="after")
    def _only_data_yet(self) -> Self:
        for axis in ("shard", "tensor", "pipeline", "context"):
            if getattr(self, axis) != 1:
                raise ValueError(f"{axis} must be 1: this version of dray has data parallelism")
        return self


class Resources(Document):
    """What the group needs. The gang starts whole or not at all."""

    num_workers: Annotated[StrictInt, Field(ge=1, le=MAX_WORKERS)] = 1
    gpus_per_worker: Annotated[StrictInt, Field(ge=0, le=1)] = 0
    """0 trains on CPU; 1 gives each rank a GPU of its own."""
    cpus_per_worker: Annotated[StrictInt, Field(ge=1, le=1024)] = 1
    memory_bytes: Annotated[StrictInt, Field(ge=1, le=2**50)] | None = None
    """Memory of each worker, counted in Ray's books."""
    accelerator: Annotated[str, StringConstraints(min_length=1, max_length=64)] | None = None
    """Ray's accelerator type, such as `H100`."""


class Checkpoint(Document):
    """When state is saved and how much of it is kept."""

    every_steps: Annotated[StrictInt, Field(ge=1, le=MAX_STEPS)] | None = None
    """Save after every so many optimizer steps; unset saves at the end of each epoch."""
    keep: Annotated[StrictInt, Field(ge=1, le=1000)] = 3
    """Newest checkpoints that are kept; the best is kept besides."""
    best: Annotated[str, StringConstraints(max_length=128, pattern=r"^val/[a-z0-9_]+$")] | None = (
        None
    )
    """Metric that names the best checkpoint; `val/loss` is minimised, others maximised."""


def _unavailable(value: Any) -> Any:
    if value is not None:
        raise ValueError("is not available in this version of dray; leave it out")
    return value


NotYet = Annotated[None, BeforeValidator(_unavailable)]


class JobSpec(Document):
    """A training job: exactly one of `recipe` and `script`, and what it needs to run."""

    version: Literal[1] = SPEC_VERSION
    name: Name = "job"
    labels: Annotated[dict[LabelKey, LabelValue], Field(max_length=64)] = {}
    recipe: Literal["image_classification"] | None = None
    script: Script | None = None
    model: Model = Model()
    data: Data = Data()
    train: Train = Train()
    parallel: Parallel = Parallel()
    resources: Resources = Resources()
    elastic: NotYet = None
    checkpoint: Checkpoint = Checkpoint()
    init_from: NotYet = None
    queue: QueueName = "default"
    priority: Annotated[StrictInt, Field(ge=0, le=100)] = 50
    """Higher starts first; equal priorities start in the order of submission."""
    max_retries: Annotated[StrictInt, Field(ge=0, le=100)] = 1
    """How often the job is tried again after its own error. The cluster's failures have a
    budget of their own and preemptions are free."""
    max_runtime_s: Annotated[StrictInt, Field(ge=1, le=10**8)] | None = None
    """Seconds of running time over all attempts, after which the job fails."""

    @model_validator(mode="after")
    def _one_thing_to_run(self) -> Self:
        if (self.recipe is None) == (self.script is None):
            raise ValueError("give exactly one of recipe and script")
        workers = self.resources.num_workers
        if self.parallel.data not in ("auto", workers):
            raise ValueError(
                f"parallel.data is {self.parallel.data} but resources.num_workers is {workers}"
            )
        if self.recipe is not None and self.train.global_batch_size < workers:
            raise ValueError(
                f"train.global_batch_size is {self.train.global_batch_size}, "
                f"fewer than one sample for each of {workers} workers"
            )
        return self
