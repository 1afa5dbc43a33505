"""Job list queries, and the resolution of references such as names and id prefixes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from dray import errors, views
from dray._http.transport import Parameters, params
from dray.filters import BasicJobFilter, JobFilter


def query_of(chosen: BasicJobFilter) -> Parameters:
    """Return the filter as query parameters. The server validates them."""
    return params(**{name: getattr(chosen, name) for name in type(chosen).model_fields})


MAX_CANDIDATES = 10
"""Maximum number of candidates to list for an ambiguous reference."""
_ARRAY = "array-[0-9a-z]{1,26}"
"""Pattern of an array id or its prefix."""


_PART = r"[0-9]{1,18}(?:-[0-9]{1,18}(?::[0-9]{1,18})?)?"


@dataclass(frozen=True)
class IndexList:
    """Several jobs of an array: `ARRAY/1,3,5-9`, or `ARRAY/0-98:2` with a step."""

    array: str
    """The array's id, a prefix of it, or the name of its jobs."""
    ranges: tuple[range, ...]

    def among(self, ids: Mapping[int | None, str]) -> list[str]:
        """Return the ids of the jobs. `ids` maps the indices of the array's jobs to the ids of the
        jobs. Raises JobNotFound for an index that does not exist."""
        wanted: dict[str, None] = {}
        for some in self.ranges:
            for index in some:
                if index not in ids:
                    detail = f"{self.array} has no job with the index {index}"
                    last = max((known for known in ids if known is not None), default=None)
                    hint = (
                        "it has no jobs" if last is None else f"its last job has the index {last}"
                    )
                    raise _job_not_found(detail, hint)
                wanted[ids[index]] = None
        return list(wanted)


def index_list(reference: str) -> IndexList | None:
    """Return the list of indices that a reference contains; None if the reference contains no
    index, or only one. Raises JobNotFound for a range that contains no index."""
    array, _, text = reference.rpartition("/")
    if not array or text.isdigit() or not re.fullmatch(rf"{_PART}(?:,{_PART})*", text):
        return None
    ranges = []
    for part in text.split(","):
        first, _, rest = part.partition("-")
        last, _, step = (rest or first).partition(":")
        if int(last) < int(first) or (step and not int(step)):
            detail = f"{part!r} in {reference} contains no index"
            raise _job_not_found(detail, "write a range as FIRST-LAST or FIRST-LAST:STEP")
        ranges.append(range(int(first), int(last) + 1, int(step or 1)))
    return IndexList(array, tuple(ranges))


def not_found(reference: str) -> errors.JobNotFound:
    """Return the error that the server would return for an unknown id."""
    what = "you have no jobs" if reference == "@last" else f"there is no job {reference}"
    hint = "`dray ls` lists the jobs"
    if re.fullmatch(_ARRAY, reference):
        hint = f"this is the id of an array; its first job is {reference}/0"
    if index_list(reference) is not None:
        hint = "specify a single index, such as ARRAY/3"
    return _job_not_found(what, hint)


def _job_not_found(detail: str, hint: str) -> errors.JobNotFound:
    problem = views.Problem(
        type="about:blank",
        title="Job not found",
        status=404,
        detail=detail,
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
        f"  {one} {job.state} (created {job.created_at:%Y-%m-%d %H:%M:%S}Z): {job.name}"
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
