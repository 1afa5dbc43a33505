"""Jobs that start after other jobs, and arrays: many jobs from one document."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, BeforeValidator, Field, StringConstraints

from dray.spec.fields import Document, Int

MAX_AFTER: Final = 64
"""Most jobs and arrays that one document may name in `after`."""

JobOrArrayId = Annotated[
    str, StringConstraints(min_length=1, max_length=64, pattern=r"^(job|array)-[0-9a-z]+$")
]


class After(Document):
    """A job, or an array of jobs, that must end before this one starts."""

    job: JobOrArrayId
    """Id of a job; or of an array, all of whose jobs must end."""
    on: Literal["success", "end"] = "success"
    """success: this job starts if the other job succeeds, and is cancelled otherwise. end: this job
    starts however the other job ended."""


def _written_out(given: Any) -> Any:
    return {"job": given} if isinstance(given, str) else given


def _named_once(entries: list[After]) -> list[After]:
    names = [entry.job for entry in entries]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ValueError(f"names {twice} twice")
    return entries


Afters = Annotated[
    list[Annotated[After, BeforeValidator(_written_out, json_schema_input_type=After | str)]],
    Field(max_length=MAX_AFTER),
    AfterValidator(_named_once),
]


class Array(Document):
    """Many jobs from one document, which differ in their index. A script reads the index from the
    variable `DRAY_ARRAY_INDEX`, and the number of jobs from `DRAY_ARRAY_SIZE`. For a recipe, the
    index is added to `train.seed`."""

    size: Annotated[Int, Field(ge=1)]
    """Number of jobs, whose indices begin with 0; at most the server's `DRAY_MAX_ARRAY_SIZE`."""
    max_running: Annotated[Int, Field(ge=1, le=10**6)] | None = None
    """Most jobs of the array that may run at a time; unset, as many as there are slots for."""
