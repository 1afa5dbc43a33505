"""The checkpoints of a job, the copies of its state in memory, the comparisons of its replicas, and
the checkpoint of another job from which it starts."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, StringConstraints, model_validator

from dray.spec.fields import MAX_STEPS, Document, Int, MetricName, ModelVersion


class InMemory(Document):
    """How often the state of a divided model is copied to the memory of other workers."""

    every_steps: Annotated[Int, Field(ge=1, le=MAX_STEPS)]
    """Number of optimizer steps between copies."""
    copies: Annotated[Int, Field(ge=1, le=16)] = 1
    """Number of other workers that keep a copy of each worker's share of the state. They are on
    other nodes, as far as possible."""


class Checkpoint(Document):
    """When checkpoints are saved and how many are kept."""

    every_steps: Literal["auto"] | Annotated[Int, Field(ge=1, le=MAX_STEPS)] | None = None
    """Number of optimizer steps between checkpoints. If unset, a checkpoint is saved at the end of
    each epoch. `auto` derives the interval from the time that a save takes and the rate at which
    workers are lost."""
    keep: Annotated[Int, Field(ge=1, le=1000)] = 3
    """Number of most recent checkpoints to keep, in addition to the best one."""
    in_memory: Literal["auto", "off"] | InMemory = "auto"
    """Whether the workers of a divided model also keep its newest state in host memory, on
    themselves and on other workers, so that a lost worker is replaced without reading a checkpoint.
    `auto` keeps copies if the workers divide a single model on CPUs, and chooses the interval so
    that copying takes at most 1% of the time. Groups on GPUs keep copies only if an interval is
    set, because `auto` has not been measured on GPUs. All other groups don't keep copies, because
    their workers already hold replicas of the state, or can't recover in place."""
    best: MetricName | None = None
    """Metric that selects the best checkpoint. Losses, errors and perplexity are minimised; all
    other metrics are maximised."""


def of_model(given: Any) -> Any:
    """Expand the short form of `init_from`, a version of a registered model."""
    return {"model": given} if isinstance(given, str) else given


class InitFrom(Document):
    """Start from another job's checkpoint, or from a version of a registered model. The version
    alone, such as `model://digits@3`, is a short form."""

    job: (
        Annotated[str, StringConstraints(min_length=1, max_length=64, pattern=r"^job-[0-9a-z]+$")]
        | None
    ) = None
    """Id of the other job. If `model` is set, the server sets this field and `step`."""
    model: ModelVersion | None = None
    """A version of a registered model: `model://NAME@VERSION` or `model://NAME@ALIAS`. An alias is
    replaced with the number of its version when this job is submitted, so that moving the alias
    later has no effect on this job. If the version is the result of a job, this job starts from the
    newest checkpoint of that job."""
    step: Literal["latest", "best"] | Annotated[Int, Field(ge=0, le=MAX_STEPS)] = "latest"
    """Step of the checkpoint. `latest` and `best` are resolved when this job is submitted; `best`
    is the best checkpoint according to the other job's `checkpoint.best`."""
    take: Literal["weights", "everything"] = "weights"
    """weights: only the weights are loaded; training starts at step 0 with a new optimizer.
    everything: training continues from that step as if the checkpoint were the job's own, with the
    checkpoint's optimizer state and position in the data. The two jobs can differ in the number of
    workers and the division of the model."""

    @model_validator(mode="after")
    def _names_a_checkpoint(self) -> Self:
        if self.job is None and self.model is None:
            raise ValueError("needs job or model: name the job or the version to start from")
        return self


class Check(Document):
    """Which faults the ranks look for while they train."""

    replicas_every: Annotated[Int, Field(ge=1, le=MAX_STEPS)]
    """Number of optimizer steps between two comparisons of the replicas of the model. If their
    weights, optimizer states or averaged weights differ, the job returns to the last checkpoint
    that was saved while they were equal."""
