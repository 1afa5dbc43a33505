"""Filters of lists of jobs, and of series of metrics: the API parses them, and they become SQL."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Annotated, Any, TypeAlias

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from dray.views import JobState

MAX_INDEX = 2**63 - 1
MAX_POINTS = 100_000
"""Most points of each series in one answer."""

States: TypeAlias = JobState | str | Iterable[JobState | str]
"""One state or several."""


def states_of(given: States | None) -> tuple[JobState, ...]:
    if given is None:
        return ()
    return tuple(JobState(state) for state in ([given] if isinstance(given, str) else given))


def label_texts(labels: Mapping[str, str] | None) -> tuple[str, ...]:
    return tuple(f"{key}={value}" for key, value in (labels or {}).items())


def _rfc_3339(value: Any) -> Any:
    """Refuse what pydantic would also accept: seconds since 1970, dates, times without a zone."""
    if isinstance(value, str) and not re.fullmatch(
        r"\d{4}-\d\d-\d\d[Tt]\d\d:\d\d:\d\d(\.\d{1,9})?([Zz]|[+-]\d\d:\d\d)", value, re.ASCII
    ):
        raise ValueError("must be a time like 2026-01-31T12:00:00Z; in an address + is %2B")
    return value


def _in_utc(value: datetime) -> datetime:
    try:
        return value.astimezone(UTC)
    except OverflowError:
        raise ValueError("must be in the years 1 to 9999 by UTC, too") from None


Time = Annotated[datetime, BeforeValidator(_rfc_3339), AfterValidator(_in_utc)]


def _key_and_value(text: str) -> str:
    key, equals, _value = text.partition("=")
    if not key or not equals:
        raise ValueError(f"must be of the form key=value, and {text!r} is not")
    return text


Label = Annotated[
    str, AfterValidator(_key_and_value), Field(json_schema_extra={"pattern": "^[^=]+="})
]


class JobFilter(BaseModel):
    """Selects the jobs that match all given fields; a field that is None matches all jobs."""

    # The SDK fills it without a check, so the check is built at the first use. Descriptions are not
    # taken from docstrings: finding these takes longer than the other imports of the module.
    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)

    state: Annotated[tuple[JobState, ...], Field(description="Jobs in any of these states.")] = ()
    queue: Annotated[str | None, Field(max_length=63)] = None
    label: Annotated[
        tuple[Label, ...],
        Field(max_length=64, description="`key=value`; jobs that have all of these labels."),
    ] = ()
    name: Annotated[str | None, Field(max_length=128)] = None
    name_glob: Annotated[
        str | None,
        Field(
            max_length=128,
            description="Jobs whose name matches this pattern: `*` is any text, `?` one character.",
        ),
    ] = None
    text: Annotated[
        str | None,
        Field(
            max_length=128,
            description="Jobs whose name contains this text, ignoring case.",
        ),
    ] = None
    id_prefix: Annotated[
        str | None,
        Field(
            pattern="^job-[0-9a-z]{0,60}$",
            description="Jobs whose id begins with this.",
        ),
    ] = None
    array: Annotated[
        str | None,
        Field(
            pattern="^array-[0-9a-z]{0,60}$",
            description="Jobs of the array whose id is this, or begins with it.",
        ),
    ] = None
    array_index: Annotated[
        int | None,
        Field(ge=0, le=MAX_INDEX, description="Jobs that have this index in their array."),
    ] = None
    collapse_arrays: Annotated[
        bool,
        Field(
            description="List only one job of each array; with `state`, of each array with a job "
            "in any of the states."
        ),
    ] = False
    owner: Annotated[
        str | None,
        Field(max_length=255, description="Jobs of this owner; `@me` is the caller."),
    ] = None
    project: Annotated[str | None, Field(max_length=255)] = None
    created_after: Annotated[
        Time | None, Field(description="Jobs submitted at this time (RFC 3339) or later.")
    ] = None
    created_before: Annotated[
        Time | None, Field(description="Jobs submitted earlier than this time (RFC 3339).")
    ] = None
    where: Annotated[
        str | None,
        Field(
            description="Jobs that a search expression matches, such as `val/accuracy > 0.9 and "
            'state = "RUNNING"`:\ndocs/guides/tracking.md has its grammar.'
        ),
    ] = None

    @property
    def labels(self) -> list[tuple[str, str]]:
        """Return the key and value of each label. No job matches two values of one key."""
        pairs = (text.partition("=") for text in dict.fromkeys(self.label))
        return [(key, value) for key, _, value in pairs]


class SeriesFilter(BaseModel):
    """Selects series of one rank of a job."""

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)

    keys: Annotated[
        tuple[str, ...],
        Field(
            max_length=1000,
            description="Series to return, repeated or separated by commas; by default all. A "
            "value that is the name of a series, including commas, selects that series.",
        ),
    ] = ()
    rank: Annotated[int, Field(ge=0, lt=2**31)] = 0
    max_points: Annotated[
        int,
        Field(
            ge=2,
            le=MAX_POINTS,
            description="Most points of each series; extremes and the first and last point are "
            "kept.",
        ),
    ] = 2000


class MetricsFilter(SeriesFilter):
    """Selects series of metrics, and a part of their steps."""

    after_step: Annotated[
        int | None,
        Field(
            ge=-1,
            lt=2**63,
            description="Only steps after this one; pass `next_step` of the previous answer.",
        ),
    ] = None
    until_step: Annotated[
        int | None,
        Field(
            ge=0,
            lt=2**63,
            description="Only steps up to this one: with `after_step`, a part of the series in "
            "more detail.",
        ),
    ] = None
    in_order: Annotated[
        bool,
        Field(
            description="Return the first `max_points` points of each series without "
            "downsampling. The next call\ncontinues with `next_step`."
        ),
    ] = False
    times: Annotated[
        bool, Field(description="Also return the time at which each point was reported.")
    ] = False


class SystemMetricsFilter(SeriesFilter):
    """Selects series of the resource usage of a rank and its node, and a part of their time."""

    after_time: Annotated[
        int,
        Field(
            ge=0,
            lt=2**63,
            description="Only points after this time, in Unix seconds; pass `next_time` of the "
            "previous answer.",
        ),
    ] = 0
