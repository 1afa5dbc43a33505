"""Which jobs are listed, and which job a name or the beginning of an id means."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import TypeAlias

from dray import errors, views
from dray._http.transport import Parameters, moment, params
from dray.views import JobState

States: TypeAlias = JobState | str | Iterable[JobState | str]
"""One state or several."""


def states_of(given: States | None) -> list[JobState]:
    if given is None:
        return []
    return [JobState(state) for state in ([given] if isinstance(given, str) else given)]


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


@dataclass(frozen=True)
class JobFilter:
    """Selects the jobs to list; None selects any."""

    state: States | None = None
    queue: str | None = None
    label: Mapping[str, str] | None = None
    owner: str | None = None
    project: str | None = None
    name: str | None = None
    name_glob: str | None = None
    text: str | None = None
    id_prefix: str | None = None
    array: str | None = None
    array_index: int | None = None
    collapse_arrays: bool = False
    created_after: datetime | None = None
    created_before: datetime | None = None
    where: str | None = None
    brief: bool = False

    def params(self) -> Parameters:
        return (
            *(("state", state.value) for state in states_of(self.state)),
            *(("label", f"{key}={value}") for key, value in (self.label or {}).items()),
            *params(
                queue=self.queue,
                owner=self.owner,
                project=self.project,
                name=self.name,
                name_glob=self.name_glob,
                text=self.text,
                id_prefix=self.id_prefix,
                array=self.array,
                array_index=self.array_index,
                collapse_arrays="true" if self.collapse_arrays else None,
                created_after=moment(self.created_after),
                created_before=moment(self.created_before),
                where=self.where,
                brief="true" if self.brief else None,
            ),
        )


def meant(reference: str, arrays: bool) -> list[JobFilter]:
    """The lists in which the job is that is meant, and with `arrays` the array."""
    if reference == "@last":
        return [JobFilter(owner="@me", collapse_arrays=arrays)]
    in_array = re.fullmatch(rf"({_ARRAY})(?:/([0-9]{{1,18}}))?", reference)
    if in_array is not None and (arrays or in_array[2]):
        index = None if in_array[2] is None else int(in_array[2])
        return [JobFilter(array=in_array[1], array_index=index, collapse_arrays=index is None)]
    name, slash, number = reference.rpartition("/")
    if slash and name and re.fullmatch(r"[0-9]{1,18}", number):
        return [JobFilter(name=name, array_index=int(number)), JobFilter(name=reference)]
    if not reference:
        raise ValueError("'' is no id")
    is_prefix = re.fullmatch(r"job-[0-9a-z]{1,25}", reference)
    by_id = [JobFilter(id_prefix=reference)] if is_prefix else []
    return [*by_id, JobFilter(name=reference, collapse_arrays=arrays)]
