"""The checkpoints of a job, and the checkpoint of another job that it starts from."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from dray.spec.fields import MAX_STEPS, Document, Int, MetricName


class Checkpoint(Document):
    """When checkpoints are saved and how many are kept."""

    every_steps: Literal["auto"] | Annotated[Int, Field(ge=1, le=MAX_STEPS)] | None = None
    """Optimizer steps between two checkpoints; unset, a checkpoint is saved at the end of each
    epoch. `auto` chooses the interval from the time that a save takes and the rate at which workers
    are lost."""
    keep: Annotated[Int, Field(ge=1, le=1000)] = 3
    """Number of newest checkpoints to keep, besides the best one."""
    best: MetricName | None = None
    """Metric that selects the best checkpoint. Losses, errors and perplexity are minimised, other
    metrics are maximised."""


class InitFrom(Document):
    """Start from another job's checkpoint."""

    job: Annotated[str, StringConstraints(min_length=1, max_length=64, pattern=r"^job-[0-9a-z]+$")]
    """Id of the other job."""
    step: Literal["latest", "best"] | Annotated[Int, Field(ge=0, le=MAX_STEPS)] = "latest"
    """Step of the checkpoint, looked up when this job is submitted. `best` is the best checkpoint
    by the metric in the other job's `checkpoint.best`."""
    take: Literal["weights", "everything"] = "weights"
    """weights: optimizer and step start anew. everything: the job continues after that step as if
    the checkpoint were its own, with the optimizer's state and the position in the data, on any
    number of workers and with any division of the model."""
