"""Bodies of requests other than the job document."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field, StrictBool

from dray.code.manifest import MAX_FILES
from dray.spec import JobSpec
from dray.spec.fields import MAX_STEPS, Document, Int, Number, Sha256, Size
from dray.views import DrillKind

MAX_RANK = 1_000_000
MAX_GRACE_S = 24 * 3600


def _a_number(value: Any) -> Any:
    """Refuse `true` and `"1"`, which pydantic would accept; 1.0 is an integer in JSON."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError("must be a number")
    return value


# The bounds come before the validator: pydantic leaves later ones out of the JSON schema.
Grace = Annotated[
    float, Field(ge=0, le=MAX_GRACE_S, allow_inf_nan=False), BeforeValidator(_a_number)
]
Rank = Annotated[int, Field(ge=0, le=MAX_RANK), BeforeValidator(_a_number)]
Step = Annotated[int, Field(ge=0, le=MAX_STEPS), BeforeValidator(_a_number)]


class PreemptRequest(Document):
    """Ask a job to save a checkpoint and leave its slots."""

    grace_s: Grace | None = None
    """Seconds until a job that has not left is ended; by default the server's setting."""


class DrillRequest(Document):
    """Inject a fault into a job."""

    kind: DrillKind
    rank: Rank = 0
    """Rank to inject the fault into; has no meaning for `preempt`."""
    at_step: Step | None = None
    """Inject the fault when this many optimizer steps are done; by default at once."""


class PlanRequest(JobSpec):
    """A job document, with optional facts that the planner can't know."""

    memory_bytes_per_rank: Size | None = None
    """Memory of each worker for tensors; by default that of the cluster's GPUs, or
    `resources.memory_bytes` on CPU."""
    flops_per_s: Annotated[Number, Field(gt=0.0, le=1e18)] | None = None
    """Floating point operations per second of a GPU, or of a CPU core, in training; by default the
    speed of the last jobs on such workers, or else a typical number; the answer says which."""
    bandwidth_bytes_per_s: Annotated[Number, Field(gt=0.0, le=1e15)] | None = None
    """Bandwidth with which each worker sends while all workers send."""
    latency_s: Annotated[Number, Field(ge=0.0, le=10.0)] | None = None
    """Latency of one collective operation."""

    @property
    def job(self) -> JobSpec:
        """The job document without the planner's fields."""
        own = type(self).model_fields.keys() - JobSpec.model_fields.keys()
        return JobSpec.model_validate(self.model_dump(exclude=own))


class CodeFileRequest(Document):
    """One file of code, by the hashes of its parts."""

    path: Annotated[str, Field(min_length=1, max_length=1024)]
    """Relative to the code's root, with `/` between its folders."""
    size_bytes: Annotated[Int, Field(ge=0, le=1 << 40)]
    is_executable: StrictBool = False
    parts: list[Sha256]
    """The SHA-256, in hexadecimal, of each 4 MiB of it; none of an empty file."""


class CodeRequest(Document):
    """The files of a folder, which a job can run once their parts are there."""

    files: Annotated[list[CodeFileRequest], Field(min_length=1, max_length=MAX_FILES)]
