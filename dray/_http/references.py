"""Which jobs are listed, and which job a name or the beginning of an id means."""

from __future__ import annotations

import re

from dray import errors, views
from dray._http.transport import Parameters, params
from dray.filters import JobFilter


def query_of(chosen: JobFilter) -> Parameters:
    """The filter as query parameters. The server checks them."""
    return params(**{name: getattr(chosen, name) for name in JobFilter.model_fields})


_ARRAY = "array-[0-9a-z]{1,26}"
"""An array's id, or how it begins."""


def not_found(reference: str) -> errors.JobNotFound:
    """The error that the server would answer for an id."""
    what = "there is no job of yours" if reference == "@last" else f"there is no job {reference}"
    hint = "`dray ls` shows the jobs there are"
    if re.fullmatch(_ARRAY, reference):
        hint = f"that is the id of an array; {reference}/0 is its first job"
    problem = views.Problem(
        type="about:blank",
        title="Job not found",
        status=404,
        detail=what,
        code=errors.JobNotFound.code,
        hint=hint,
    )
    return errors.JobNotFound(problem)


def meant(reference: str, arrays: bool) -> list[JobFilter]:
    """The lists in which the job is that is meant, and with `arrays` the array."""
    if reference == "@last":
        return [JobFilter.model_construct(owner="@me", collapse_arrays=arrays)]
    in_array = re.fullmatch(rf"({_ARRAY})(?:/([0-9]{{1,18}}))?", reference)
    if in_array is not None and (arrays or in_array[2]):
        index = None if in_array[2] is None else int(in_array[2])
        return [
            JobFilter.model_construct(
                array=in_array[1], array_index=index, collapse_arrays=index is None
            )
        ]
    name, slash, number = reference.rpartition("/")
    if slash and name and re.fullmatch(r"[0-9]{1,18}", number):
        return [
            JobFilter.model_construct(name=name, array_index=int(number)),
            JobFilter.model_construct(name=reference),
        ]
    if not reference:
        raise ValueError("'' is no id")
    is_prefix = re.fullmatch(r"job-[0-9a-z]{1,25}", reference)
    by_id = [JobFilter.model_construct(id_prefix=reference)] if is_prefix else []
    return [*by_id, JobFilter.model_construct(name=reference, collapse_arrays=arrays)]
