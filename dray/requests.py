"""The documents that ask for something, besides the one that describes a job."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from dray.spec import JobSpec
from dray.spec.fields import MAX_STEPS, Document, Number, Size
from dray.views import DrillKind

MAX_RANK = 1_000_000
MAX_GRACE_S = 24 * 3600


def _a_number(value: Any) -> Any:
    """`true` and `"1"` are none, though pydantic would take them; 1.0 is an integer in JSON."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError("must be a number")
    return value


# The bounds stand before the validator: behind one, pydantic leaves them out of the JSON schema.
Grace = Annotated[
    float, Field(ge=0, le=MAX_GRACE_S, allow_inf_nan=False), BeforeValidator(_a_number)
]
Rank = Annotated[int, Field(ge=0, le=MAX_RANK), BeforeValidator(_a_number)]
Step = Annotated[int, Field(ge=0, le=MAX_STEPS), BeforeValidator(_a_number)]


class PreemptRequest(Document):
    """Ask a job to save a checkpoint and leave its slots."""

    grace_s: Grace | None = None
    """Seconds until it is ended if it has not left; by default the server's."""


class DrillRequest(Document):
    """Try a fault on a job."""

    kind: DrillKind
    rank: Rank = 0
    """Whom it strikes; of no meaning for `preempt`."""
    at_step: Step | None = None
    """Strike when so many optimizer steps are done; left out: at once."""


class PlanRequest(JobSpec):
    """A job document, and what the planner can't know by itself."""

    memory_bytes_per_rank: Size | None = None
    """What each worker has for its tensors; by default what is known of the cluster's GPUs, or
    `resources.memory_bytes` on CPU."""
    flops_per_s: Annotated[Number, Field(gt=0.0, le=1e18)] | None = None
    """Floating point operations that a GPU, or a core of a CPU, does in a second of training; by
    default what the last jobs on such workers have reached, and where none ran a number of its
    kind; the answer tells which."""
    bandwidth_bytes_per_s: Annotated[Number, Field(gt=0.0, le=1e15)] | None = None
    """That each worker sends with while all do."""
    latency_s: Annotated[Number, Field(ge=0.0, le=10.0)] | None = None
    """Of one operation among workers."""

    @property
    def job(self) -> JobSpec:
        """The document alone."""
        own = type(self).model_fields.keys() - JobSpec.model_fields.keys()
        return JobSpec.model_validate(self.model_dump(exclude=own))
