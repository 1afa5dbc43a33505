"""Dependencies between jobs, and arrays: many jobs from one document."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, StringConstraints, model_validator

from dray.spec.fields import Document, Int

MAX_AFTER: Final = 64
"""Maximum number of jobs and arrays in `after`."""

JobOrArrayId = Annotated[
    str, StringConstraints(min_length=1, max_length=64, pattern=r"^(job|array)-[0-9a-z]+$")
]


Condition = Literal["success", "end", "failure"]


class After(Document):
    """A job, or an array of jobs, that must end before this one starts."""

    job: JobOrArrayId
    """Id of a job or of an array. All jobs of an array must end."""
    on: Condition = "success"
    """success: this job starts if the other job succeeds, and is cancelled otherwise. failure: this
    job starts if the other job fails or is cancelled, and is cancelled if the other job succeeds.
    An array fails if any of its jobs does. end: this job starts regardless of the other job's
    outcome."""
    each: bool = False
    """Each job of this array waits only for the job with the same index in the array `job`, which
    must have the same size."""

    @model_validator(mode="after")
    def _each_of_an_array(self) -> Self:
        if self.each and not self.job.startswith("array-"):
            raise ValueError(
                f"each: true requires the id of an array, but {self.job} is not the id of an array"
            )
        return self


def _written_out(given: Any) -> Any:
    return {"job": given} if isinstance(given, str) else given


def _named_once(entries: list[After]) -> list[After]:
    names = [entry.job for entry in entries]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ValueError(f"lists {twice} twice")
    return entries


Afters = Annotated[
    list[Annotated[After, BeforeValidator(_written_out, json_schema_input_type=After | str)]],
    Field(max_length=MAX_AFTER),
    AfterValidator(_named_once),
]


class Array(Document):
    """Many jobs from one document, each with its own index. A script reads the index from the
    environment variable `DRAY_ARRAY_INDEX`, and the number of jobs from `DRAY_ARRAY_SIZE`. For a
    recipe, the index is added to `train.seed`."""

    size: Annotated[Int, Field(ge=1)]
    """Number of jobs. Indices start at 0. Must not exceed the server's `DRAY_MAX_ARRAY_SIZE`."""
    max_running: Annotated[Int, Field(ge=1, le=10**6)] | None = None
    """Maximum number of jobs of the array that run at the same time. If unset, the number is
    limited only by the free slots."""
