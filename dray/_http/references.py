"""Queries for lists of jobs, and the job that a name or the beginning of an id refers to."""

from __future__ import annotations

import re
from collections.abc import Mapping

from dray import errors, views
from dray._http.transport import Parameters, params
from dray.filters import JobFilter


def query_of(chosen: JobFilter) -> Parameters:
    """Return the filter as query parameters, which the server validates."""
    return params(**{name: getattr(chosen, name) for name in JobFilter.model_fields})


MAX_CANDIDATES = 10
"""Most candidates of an ambiguous reference that are listed."""
_ARRAY = "array-[0-9a-z]{1,26}"
"""Pattern of an array's id, or of its beginning."""


def not_found(reference: str) -> errors.JobNotFound:
    """Return the error with which the server would answer for an unknown id."""
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


def ambiguous(reference: str, found: Mapping[str, views.Job]) -> errors.AmbiguousJob:
    """Return the error for an ambiguous reference. found: the matching jobs, newest first, by their
    ids or the ids of the arrays that they represent; one more than is listed, if it exists."""
    listed = dict(list(found.items())[:MAX_CANDIDATES])
    more = len(found) > len(listed)
    number = f"more than {MAX_CANDIDATES}" if more else f"{len(found)}"
    how = "give the id of one, or more of it"
    called, newest = next(iter(listed.items()))
    if (newest.name, called) == (reference, newest.id) and newest.array_id is not None:
        example = f"{reference}/{newest.array_index}"
        how = f"{reference}/INDEX, such as {example}, is one of an array or sweep; or {how}"
    lines = [
        f"  {one} {job.state} of {job.created_at:%Y-%m-%d %H:%M:%S}Z: {job.name}"
        for one, job in listed.items()
    ]
    detail = "\n".join([f"{reference!r} means {number} jobs; {how}", *lines])
    return errors.AmbiguousJob(detail, reference, listed, more=more)


def meant(reference: str, arrays: bool) -> list[JobFilter]:
    """Return the filters that find the referenced job, and with `arrays` the array."""
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
