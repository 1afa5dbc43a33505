"""Options for training and profiling."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, StrictBool, model_validator

from dray.spec.fields import MAX_STEPS, Document, Int, MetricName, Number, refuse_foreign

BatchSize = Annotated[Int, Field(ge=1, le=2**24)]
Beta = Annotated[Number, Field(ge=0.0, lt=1.0)]


class Optimizer(Document):
    """The optimizer. lars and lamb are for large batches: the step of each layer is proportional to
    the norm of the layer's weights (arXiv:1708.03888, arXiv:1904.00962)."""

    name: Literal["adamw", "sgd", "adafactor", "lars", "lamb"] = "adamw"
    """Name of the optimizer."""
    lr: Annotated[Number, Field(gt=0.0, le=1000.0)] = 1e-3
    """Peak learning rate, before the schedule."""
    weight_decay: Annotated[Number, Field(ge=0.0, le=10.0)] = 0.0
    """Weight decay of matrices and filters. The weights of normalisation layers and the biases are
    not decayed."""
    momentum: Annotated[Number, Field(ge=0.0, lt=1.0)] = 0.0
    """Momentum of sgd and lars."""
    nesterov: StrictBool = False
    """Whether sgd uses Nesterov momentum."""
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    """Decay rates of the running means of adamw and lamb."""
    eps: Annotated[Number, Field(gt=0.0, le=1.0)] = 1e-8
    """Term added to the denominator of adamw and lamb."""
    trust: Annotated[Number, Field(gt=0.0, le=1.0)] = 0.001
    """Trust coefficient of lars: the maximum step at a learning rate of 1, relative to the norm of
    the layer's weights."""

    state_dtype: Literal["fp32", "bf16"] = "fp32"
    """Data type in which the optimizer state is stored between steps. Steps are computed in fp32.
    bf16 halves the memory; values are rounded stochastically, so that small changes accumulate."""
    offload: StrictBool = False
    """Whether the optimizer state is kept in host memory and copied to the GPU in parts during each
    step. Offloading is slower, and is meant for models that would not fit otherwise."""

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
            raise ValueError("nesterov requires a momentum above 0")
        return self


class LrScaling(Document):
    """Scales a learning rate that was tuned for another batch size."""

    rule: Literal["linear", "sqrt"]
    """linear: multiplies the learning rate by the ratio of the batch sizes (Goyal et al. 2017,
    arXiv:1706.02677), for sgd. sqrt: multiplies the rate by the square root of the ratio, for
    adaptive optimizers (arXiv:2205.10287)."""
    reference_batch_size: Annotated[Int, Field(ge=1, le=2**24)]
    """Global batch size for which `optimizer.lr` was tuned."""


class Schedule(Document):
    """Learning rate schedule: a linear warm-up, followed by the named schedule."""

    name: Literal["constant", "linear", "cosine", "step"] = "constant"
    """Schedule after the warm-up."""
    warmup_steps: Annotated[Int, Field(ge=0, le=MAX_STEPS)] = 0
    """Number of steps over which the learning rate rises from 0."""
    final_ratio: Annotated[Number, Field(ge=0.0, le=1.0)] = 0.0
    """linear, cosine: the learning rate ends at `lr * final_ratio`."""
    every_steps: Annotated[Int, Field(ge=1, le=MAX_STEPS)] | None = None
    """step: interval, in steps, at which the learning rate is multiplied by `factor`. Warm-up steps
    are not counted."""
    factor: Annotated[Number, Field(gt=0.0, le=1.0)] = 0.1
    """step: factor by which the learning rate is multiplied."""

    @model_validator(mode="after")
    def _options_fit(self) -> Self:
        owners: dict[str, tuple[str, ...]] = {"final_ratio": ("linear", "cosine")}
        owners |= dict.fromkeys(("every_steps", "factor"), ("step",))
        refuse_foreign(self, self.name, owners)
        if self.name == "step" and self.every_steps is None:
            raise ValueError("the schedule 'step' requires every_steps")
        return self


class Ema(Document):
    """An exponential moving average of the weights. The average is evaluated and saved as the
    result."""

    decay: Annotated[Number, Field(ge=0.0, lt=1.0)] = 0.999
    """Fraction of the average that is kept in each optimizer step."""


class EarlyStopping(Document):
    """Ends training when a metric has stopped improving."""

    metric: MetricName = "val/loss"
    """Metric to monitor. Losses, errors and perplexity should decrease; all other metrics should
    increase."""
    patience: Annotated[Int, Field(ge=1, le=10**6)] = 3
    """Number of consecutive evaluations without improvement after which training ends."""
    min_delta: Annotated[Number, Field(ge=0.0)] = 0.0
    """Minimum change that counts as an improvement."""


OnDivergence = Literal["fail", "warn", "skip_step", "rollback"]


class Train(Document):
    """Training options. The batch size is given for all ranks together, so it doesn't depend on the
    number of workers."""

    epochs: Annotated[Int, Field(ge=1, le=10**6)] = 1
    """Number of passes over the training samples."""
    max_steps: Annotated[Int, Field(ge=1, le=MAX_STEPS)] | None = None
    """Maximum number of optimizer steps. Training also ends after the last epoch."""
    global_batch_size: Annotated[Int, Field(ge=1, le=2**24)] = 256
    """Number of samples per optimizer step, over all ranks."""
    batch_range: tuple[BatchSize, BatchSize] | None = None
    """[least, most]: range of the global batch size of an elastic recipe. Training begins with
    `global_batch_size`. Whenever the size of the group changes, the batch size with the highest
    expected progress is chosen, based on measured step times and the measured noise scale
    (arXiv:2008.12260). Each change at most doubles or halves the batch size. If a range is given,
    steps in this document and in reports are counted in batches of the smallest size, so a larger
    batch counts as several steps. The order of the samples does not change. Requires
    `measure_noise`."""
    batch_scaling: Literal["sqrt", "linear"] = "sqrt"
    """How the learning rate, which is given for `global_batch_size`, is scaled with the batch size.
    sqrt: by the square root of the ratio of the batch sizes (arXiv:2205.10287). linear: by the
    ratio (arXiv:1706.02677), for `sgd`."""
    micro_batch_size: Annotated[Int, Field(ge=1, le=2**24)] | None = None
    """Maximum number of samples in a rank's forward pass. If a rank's share of the batch is larger,
    gradients are accumulated."""
    optimizer: Optimizer = Optimizer()
    lr_scaling: LrScaling | None = None
    schedule: Schedule = Schedule()
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Data type of the forward and backward passes. Weights and optimizer state remain in fp32.
    With fp16, the loss is scaled so that small gradients don't underflow."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Activations that are recomputed in the backward pass to save memory. full: all activations
    except the inputs of each block (arXiv:1604.06174). selective: all activations except the
    results of matrix products and attention. Supported for `gpt`, `resnet`, `unet` and
    `pretrained`."""
    compile: StrictBool = False
    """Whether to compile the model with torch.compile. Requires a C++ compiler on the nodes."""
    max_grad_norm: Annotated[Number, Field(gt=0.0)] | None = None
    """Maximum norm of the gradient over all parameters; larger gradients are clipped. If unset,
    gradients are not clipped."""
    label_smoothing: Annotated[Number, Field(ge=0.0, lt=1.0)] = 0.0
    """classification: fraction of the target that is spread evenly over all classes."""
    ema: Ema | None = None
    early_stopping: EarlyStopping | None = None
    on_divergence: OnDivergence = "fail"
    """Action to take if the loss or the gradient norm is not finite. An event reports the first
    such step, regardless of the action. fail: the job fails after 10 consecutive such steps, if its
    last step is such a step, or if the final val/loss is not finite. warn: training continues.
    skip_step: a step whose gradient is not finite leaves the weights unchanged; the job fails after
    10 consecutive such steps. rollback: instead of failing, the job returns to its last checkpoint
    and halves the learning rate, up to 3 times."""
    measure_noise: StrictBool = False
    """Whether to measure the gradient noise scale (arXiv:1812.06162) in every tenth step, and
    report it as `train/gradient_noise_scale`, in samples. If the global batch is far smaller than
    the noise scale, a larger batch would reduce the efficiency per sample only a little. Requires
    at least 2 workers, each with the complete model."""
    seed: Annotated[Int, Field(ge=0, lt=2**63)] = 0
    """Seed for the initial weights, the order of the samples, and all other random numbers."""
    eval_every_epochs: Annotated[Int, Field(ge=1, le=10**6)] = 1
    """Number of epochs between evaluations."""

    @property
    def samples_per_step(self) -> int:
        """Number of samples that count as one step."""
        return self.global_batch_size if self.batch_range is None else self.batch_range[0]


class Profile(Document):
    """Steps to record with torch's profiler. For each rank, a trace and a summary of the time spent
    are saved as artifacts: under `profile/` for rank 0, under `profile/rank-1/` for rank 1, and so
    on."""

    at_step: Annotated[Int, Field(ge=1, le=MAX_STEPS)] = 10
    """First step to record. The first few steps of a job are not representative."""
    num_steps: Annotated[Int, Field(ge=1, le=50)] = 3
    """Number of steps to record."""
    ranks: Annotated[list[Annotated[Int, Field(ge=0)]], Field(min_length=1, max_length=64)] = [0]
    """Ranks to record, for example one rank of each pipeline stage."""
