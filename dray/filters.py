"""Filters for lists. The SDK creates a filter, the API parses it, and the service converts it to
SQL."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from dray.views import JobState

MAX_INDEX = 2**63 - 1
MAX_POINTS = 100_000
"""Maximum number of points per series in one response of the server."""

States: TypeAlias = JobState | str | Iterable[JobState | str]
"""One or more states."""


def states_of(given: States | None) -> tuple[JobState, ...]:
    if given is None:
        return ()
    return tuple(JobState(state) for state in ([given] if isinstance(given, str) else given))


def label_texts(labels: Mapping[str, str] | None) -> tuple[str, ...]:
    return tuple(f"{key}={value}" for key, value in (labels or {}).items())


def _rfc_3339(value: Any) -> Any:
    """Refuse formats that pydantic would also accept: seconds since 1970, dates, and times without
    a time zone."""
    if isinstance(value, str) and not re.fullmatch(
        r"\d{4}-\d\d-\d\d[Tt]\d\d:\d\d:\d\d(\.\d{1,9})?([Zz]|[+-]\d\d:\d\d)", value, re.ASCII
    ):
        raise ValueError("must be a time like 2026-01-31T12:00:00Z; in a URL, write + as %2B")
    return value


def _in_utc(value: datetime) -> datetime:
    try:
        return value.astimezone(UTC)
    except OverflowError:
        raise ValueError("must be within the years 1 to 9999 in UTC") from None


Time = Annotated[datetime, BeforeValidator(_rfc_3339), AfterValidator(_in_utc)]


def _key_and_value(text: str) -> str:
    key, equals, _value = text.partition("=")
    if not key or not equals:
        raise ValueError(f"must have the form key=value, but is {text!r}")
    return text


Label = Annotated[
    str, AfterValidator(_key_and_value), Field(json_schema_extra={"pattern": "^[^=]+="})
]


class BasicJobFilter(BaseModel):
    """Selects the jobs that match all given fields. A field that is None matches all jobs."""

    # The SDK constructs filters without validation, so building the validator is deferred until
    # first use. Descriptions are not taken from docstrings, because extracting them takes longer
    # than importing everything else.
    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)

    state: Annotated[tuple[JobState, ...], Field(description="Jobs in any of these states.")] = ()
    queue: Annotated[
        str | None,
        Field(max_length=63, description="Jobs in this queue, or in a queue under it."),
    ] = None
    label: Annotated[
        tuple[Label, ...],
        Field(
            max_length=64,
            description="Jobs that have all of these labels, each given as `key=value`.",
        ),
    ] = ()
    name: Annotated[str | None, Field(max_length=128)] = None
    name_glob: Annotated[
        str | None,
        Field(
            max_length=128,
            description="Jobs whose name matches this pattern: `*` matches any text, and `?` "
            "matches one character.",
        ),
    ] = None
    text: Annotated[
        str | None,
        Field(
            max_length=128,
            description="Jobs whose name contains this text, ignoring case.",
        ),
    ] = None
    array: Annotated[
        str | None,
        Field(
            pattern="^array-[0-9a-z]{0,60}$",
            description="Jobs whose array's id starts with this prefix.",
        ),
    ] = None
    array_index: Annotated[
        int | None,
        Field(ge=0, le=MAX_INDEX, description="Jobs with this index in their array."),
    ] = None
    owner: Annotated[
        str | None,
        Field(max_length=255, description="Jobs of this owner; `@me` means the caller."),
    ] = None
    project: Annotated[str | None, Field(max_length=255)] = None
    schedule: Annotated[
        str | None,
        Field(
            max_length=64,
            description="Jobs that this schedule (id or name) submitted.",
        ),
    ] = None
    reservation: Annotated[
        str | None, Field(max_length=63, description="Jobs that name this reservation.")
    ] = None

    @property
    def labels(self) -> list[tuple[str, str]]:
        """The key and value of each label. If a key has two values, no job matches."""
        pairs = (text.partition("=") for text in dict.fromkeys(self.label))
        return [(key, value) for key, _, value in pairs]


class JobFilter(BasicJobFilter):
    """Selects jobs for the list of jobs."""

    id_prefix: Annotated[
        str | None,
        Field(
            pattern="^job-[0-9a-z]{0,60}$",
            description="Jobs whose id starts with this prefix.",
        ),
    ] = None
    collapse_arrays: Annotated[
        bool,
        Field(
            description="List only one job per array. With `state`, only arrays with a job in one "
            "of these states are listed."
        ),
    ] = False
    created_after: Annotated[
        Time | None, Field(description="Jobs submitted at this time (RFC 3339) or later.")
    ] = None
    created_before: Annotated[
        Time | None, Field(description="Jobs submitted before this time (RFC 3339).")
    ] = None
    where: Annotated[
        str | None,
        Field(
            description="Jobs that a search expression matches, such as `val/accuracy > 0.9 and "
            'state = "RUNNING"`:\nsee docs/guides/tracking.md for the grammar.'
        ),
    ] = None


class JobTable(JobFilter):
    """A list of jobs with a column by which it is sorted, and with values to show for each job."""

    sort: Annotated[
        str | None,
        Field(
            max_length=1024,
            description="The column by which the jobs are sorted, such as `val/accuracy` or "
            "`best:val/accuracy`; with `-` in front of it, in descending order. Jobs without the "
            "value are last. The default is newest first.",
        ),
    ] = None
    columns: Annotated[
        str | None,
        Field(
            max_length=8192,
            description="Comma-separated columns whose values are returned with each job, such as "
            "`lr,best:val/accuracy,cost`.",
        ),
    ] = None


class JobTableFile(JobTable):
    """A list of jobs as a file, with a row for each job."""

    columns: Annotated[
        str,
        Field(
            max_length=8192,
            description="Comma-separated columns of the file, such as `lr,best:val/accuracy,cost`. "
            "The first column of the file is the job's id, and the last column, `values_as_of`, is "
            "the time up to which the metrics of a running job cover its points.",
        ),
    ]
    format: Annotated[Literal["parquet", "csv"], Field(description="The format of the file.")] = (
        "parquet"
    )


GroupedBy = Annotated[
    str,
    Field(
        max_length=80,
        pattern="^(sweep|experiment|user|label:.+)$",
        description="How jobs are grouped: `sweep`, `experiment`, `user`, or `label:KEY` for the "
        "values of a label.",
    ),
]


class JobGroups(JobFilter):
    """Groups of the jobs of a list."""

    by: GroupedBy
    sort: Annotated[
        str | None,
        Field(
            max_length=1024,
            description="The column whose values are compared, such as `val/accuracy`. The best "
            "value of a group is the smallest or, with `-` in front of the column, the largest.",
        ),
    ] = None


class ImportanceFilter(JobFilter):
    """The jobs from which the importance of parameters is estimated."""

    metric: Annotated[
        str,
        Field(
            max_length=1024,
            description="The metric, such as `val/loss` for the last value or `best:val/loss` for "
            "the best value; or `cost` or `duration`.",
        ),
    ]
    include_stopped: Annotated[
        bool,
        Field(
            description="Whether trials that were stopped early count, with the value that they "
            "had reached."
        ),
    ] = False


class AccountingFilter(BasicJobFilter):
    """Selects the attempts for accounting: attempts that ran in a period and whose jobs match the
    other fields."""

    since: Annotated[
        Time | None,
        Field(
            description="Start of the period (RFC 3339). The default is the beginning of the "
            "current month in UTC."
        ),
    ] = None
    until: Annotated[
        Time | None,
        Field(description="End of the period (RFC 3339). The default is the current time."),
    ] = None
    per: Annotated[
        Literal["attempt", "job"],
        Field(description="Whether each item is an attempt or the sum of a job's attempts."),
    ] = "attempt"
