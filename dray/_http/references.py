"""Job list queries, and the resolution of references such as names and id prefixes."""

from __future__ import annotations

import re
from collections.abc import Mapping

from dray import errors, views
from dray._http.transport import Parameters, params
from dray.filters import JobFilter


def query_of(chosen: JobFilter) -> Parameters:
    """Return the filter as query parameters. The server validates them."""
    return params(**{name: getattr(chosen, name) for name in JobFilter.model_fields})


MAX_CANDIDATES = 10
"""Maximum number of candidates to list for an ambiguous reference."""
_ARRAY = "array-[0-9a-z]{1,26}"
"""Pattern of an array id or its prefix."""


def not_found(reference: str) -> errors.JobNotFound:
    """Return the error that the server would return for an unknown id."""
    what = "you have no jobs" if reference == "@last" else f"there is no job {reference}"
    hint = "`dray ls` lists the jobs"
    if re.fullmatch(_ARRAY, reference):
        hint = f"this is the id of an array; its first job is {reference}/0"
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
    """Return the error for an ambiguous reference. found: maps the id of a matching job (or of the
    array that the job represents) to the job, newest first. Entries beyond MAX_CANDIDATES are not
    listed."""
    listed = dict(list(found.items())[:MAX_CANDIDATES])
    more = len(found) > len(listed)
    number = f"more than {MAX_CANDIDATES}" if more else f"{len(found)}"
    how = "specify a complete id, or a longer prefix"
    called, newest = next(iter(listed.items()))
    if (newest.name, called) == (reference, newest.id) and newest.array_id is not None:
        example = f"{reference}/{newest.array_index}"
        how = (
            f"to select one job of an array or sweep, give {reference}/INDEX, such as {example}; "
            f"or {how}"
        )
    lines = [
        f"  {one} {job.state} of {job.created_at:%Y-%m-%d %H:%M:%S}Z: {job.name}"
        for one, job in listed.items()
    ]
    detail = "\n".join([f"{reference!r} matches {number} jobs: {how}", *lines])
    return errors.AmbiguousJob(detail, reference, listed, more=more)


def meant(reference: str, arrays: bool) -> list[JobFilter]:
    """Return the filters that find the referenced job or, with `arrays`, the array."""
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
        raise ValueError("an id must not be empty")
    is_prefix = re.fullmatch(r"job-[0-9a-z]{1,25}", reference)
    by_id = [JobFilter.model_construct(id_prefix=reference)] if is_prefix else []
    return [*by_id, JobFilter.model_construct(name=reference, collapse_arrays=arrays)]
