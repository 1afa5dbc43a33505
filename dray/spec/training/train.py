"""How a model is trained, and which steps are profiled."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, StrictBool, model_validator

from dray.spec.fields import MAX_STEPS, Document, Int, MetricName, Number, refuse_foreign

BatchSize = Annotated[Int, Field(ge=1, le=2**24)]
Beta = Annotated[Number, Field(ge=0.0, lt=1.0)]


class Optimizer(Document):
    """The optimizer. lars and lamb are for large batches: each layer's step is proportional to the
    norm of its weights (arXiv:1708.03888, arXiv:1904.00962)."""

    name: Literal["adamw", "sgd", "adafactor", "lars", "lamb"] = "adamw"
    """Name of the optimizer."""
    lr: Annotated[Number, Field(gt=0.0, le=1000.0)] = 1e-3
    """Peak learning rate, before the schedule."""
    weight_decay: Annotated[Number, Field(ge=0.0, le=10.0)] = 0.0
    """Weight decay of matrices and filters; norms and biases never decay."""
    momentum: Annotated[Number, Field(ge=0.0, lt=1.0)] = 0.0
    """Momentum of sgd and lars."""
    nesterov: StrictBool = False
    """Whether sgd uses Nesterov momentum."""
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    """Decay of the running means of adamw and lamb."""
    eps: Annotated[Number, Field(gt=0.0, le=1.0)] = 1e-8
    """Term added to the denominator of adamw and lamb."""
    trust: Annotated[Number, Field(gt=0.0, le=1.0)] = 0.001
    """Trust coefficient of lars: the largest step relative to the norm of a layer's weights, at a
    learning rate of 1."""

    state_dtype: Literal["fp32", "bf16"] = "fp32"
    """Type of the optimizer's state between steps; the step itself is in fp32. bf16 takes half the
    memory and is rounded stochastically, so that small changes add up."""
    offload: StrictBool = False
    """Whether the optimizer's state is kept in the host's memory and copied to the GPU in parts
    during the step: slower, for models that do not fit otherwise."""

    @model_validator(mode="after")
    def _options_fit(self) -> Self:
        owners: dict[str, tuple[str, ...]] = {
            "momentum": ("sgd", "lars"),
            "nesterov": ("sgd",),
            "trust": ("lars",),
            **dict.fromkeys(("betas", "eps"), ("adamw", "lamb")),
        }
        refuse_foreign(self, self.name, owners)
        if self.nesterov and self.momentum == 0.0:
            raise ValueError("nesterov needs a momentum above 0")
        return self


class LrScaling(Document):
    """Scaling of a learning rate that was tuned for another batch size."""

    rule: Literal["linear", "sqrt"]
    """linear: by the ratio of the sizes (Goyal et al. 2017, arXiv:1706.02677), for sgd;
    sqrt: by its square root, which suits adaptive optimizers (arXiv:2205.10287)."""
    reference_batch_size: Annotated[Int, Field(ge=1, le=2**24)]
    """Global batch size for which `optimizer.lr` was tuned."""


class Schedule(Document):
    """Learning rate over the optimizer steps: a linear warm-up, then the named schedule."""

    name: Literal["constant", "linear", "cosine", "step"] = "constant"
    """Schedule of the rate after the warm-up."""
    warmup_steps: Annotated[Int, Field(ge=0, le=MAX_STEPS)] = 0
    """Steps over which the rate rises from 0."""
    final_ratio: Annotated[Number, Field(ge=0.0, le=1.0)] = 0.0
    """linear and cosine end at `lr * final_ratio`."""
    every_steps: Annotated[Int, Field(ge=1, le=MAX_STEPS)] | None = None
    """step: number of steps, not counting the warm-up, between multiplications of the rate by
    `factor`."""
    factor: Annotated[Number, Field(gt=0.0, le=1.0)] = 0.1
    """step: factor of each reduction."""

    @model_validator(mode="after")
    def _options_fit(self) -> Self:
        owners: dict[str, tuple[str, ...]] = {"final_ratio": ("linear", "cosine")}
        owners |= dict.fromkeys(("every_steps", "factor"), ("step",))
        refuse_foreign(self, self.name, owners)
        if self.name == "step" and self.every_steps is None:
            raise ValueError("the schedule 'step' needs every_steps")
        return self


class Ema(Document):
    """An exponential moving average of the weights, which is evaluated and saved as the result."""

    decay: Annotated[Number, Field(ge=0.0, lt=1.0)] = 0.999
    """Share of the average that remains after each optimizer step."""


class EarlyStopping(Document):
    """Training ends when a metric has not improved for some evaluations."""

    metric: MetricName = "val/loss"
    """Losses, errors and perplexity improve downwards, other metrics upwards."""
    patience: Annotated[Int, Field(ge=1, le=10**6)] = 3
    """Number of evaluations in a row without an improvement after which training ends."""
    min_delta: Annotated[Number, Field(ge=0.0)] = 0.0
    """Least change that counts as an improvement."""


OnDivergence = Literal["fail", "warn", "skip_step", "rollback"]


class Train(Document):
    """How the model is trained; sizes are global, so they apply at any world size."""

    epochs: Annotated[Int, Field(ge=1, le=10**6)] = 1
    """Passes over the training samples."""
    max_steps: Annotated[Int, Field(ge=1, le=MAX_STEPS)] | None = None
    """Most optimizer steps; training ends after the last epoch in any case."""
    global_batch_size: Annotated[Int, Field(ge=1, le=2**24)] = 256
    """Samples of one optimizer step, over all ranks."""
    batch_range: tuple[BatchSize, BatchSize] | None = None
    """[least, most]: range of the global batch size of an elastic recipe. Training begins with
    `global_batch_size`. Whenever the group changes its size, the batch size with the most progress
    is chosen, by the step times and the noise scale that the ranks measure (arXiv:2008.12260); each
    change at most doubles or halves it. A step in this document and in reports is then a batch of
    the least size, and a larger batch counts as several steps. The order of the samples stays the
    same. Needs `measure_noise`."""
    batch_scaling: Literal["sqrt", "linear"] = "sqrt"
    """How the learning rate, which is given for `global_batch_size`, is scaled with the batch size.
    sqrt: by the square root of the ratio of the sizes (arXiv:2205.10287). linear: by the ratio
    (arXiv:1706.02677), for `sgd`."""
    micro_batch_size: Annotated[Int, Field(ge=1, le=2**24)] | None = None
    """Most samples of one forward pass of a rank; gradients of a larger share are accumulated."""
    optimizer: Optimizer = Optimizer()
    lr_scaling: LrScaling | None = None
    schedule: Schedule = Schedule()
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Type of the forward and backward pass; weights and optimizer state stay fp32. fp16 scales the
    loss, so that small gradients do not vanish."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Activations that the backward pass recomputes to save memory. full: everything but the inputs
    of each block (arXiv:1604.06174). selective: everything but matrix products and attention. For
    gpt, resnet and unet."""
    compile: StrictBool = False
    """Whether the model is compiled with torch.compile when training begins. Needs a C++ compiler
    on the nodes."""
    max_grad_norm: Annotated[Number, Field(gt=0.0)] | None = None
    """Norm to which the gradient of all parameters is clipped; unset, gradients are not clipped."""
    label_smoothing: Annotated[Number, Field(ge=0.0, lt=1.0)] = 0.0
    """classification: share of the target that is spread over all classes."""
    ema: Ema | None = None
    early_stopping: EarlyStopping | None = None
    on_divergence: OnDivergence = "fail"
    """Reaction to a loss or gradient norm that is not finite, besides an event for the first such
    step. fail: the job fails after 10 such steps in a row, if its last step is such a step, or if
    the final val/loss is not finite. warn: training goes on. skip_step: a step whose gradient is
    not finite changes no weight; 10 such steps in a row fail the job. rollback: instead of failing,
    the job returns to its last checkpoint with half the learning rate, up to 3 times."""
    measure_noise: StrictBool = False
    """Whether the gradient noise scale (arXiv:1812.06162) is measured in every tenth step, and
    reported as `train/gradient_noise_scale`, in samples. A global batch far below the noise scale
    could be larger with little loss of efficiency per sample. Needs 2 workers or more that each
    have the whole model."""
    seed: Annotated[Int, Field(ge=0, lt=2**63)] = 0
    """Seed of the weights, the order of the samples, and all other random numbers."""
    eval_every_epochs: Annotated[Int, Field(ge=1, le=10**6)] = 1
    """Epochs between two evaluations."""

    @property
    def samples_per_step(self) -> int:
        """Number of samples that count as one step."""
        return self.global_batch_size if self.batch_range is None else self.batch_range[0]


class Profile(Document):
    """Steps to record with torch's profiler. A trace and a summary of the time spent become
    artifacts: for rank 0 under `profile/`, for rank 1 under `profile/rank-1/`, and so on."""

    at_step: Annotated[Int, Field(ge=1, le=MAX_STEPS)] = 10
    """First step to record; the very first steps of a job are not representative."""
    num_steps: Annotated[Int, Field(ge=1, le=50)] = 3
    """Number of steps to record."""
    ranks: Annotated[list[Annotated[Int, Field(ge=0)]], Field(min_length=1, max_length=64)] = [0]
    """Ranks to record, such as one rank of each pipeline stage."""
