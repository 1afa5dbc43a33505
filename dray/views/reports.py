"""Reports of a job: metrics, log lines and events; and its files."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from dray.views.base import MetricValue, View
from dray.views.jobs import JobState


class Series(View):
    steps: list[int]
    values: list[MetricValue]
    times: list[float] | None = None
    """Unix time in seconds at which rank 0 first reported each step; unset if it was not requested,
    and for jobs that an older server ran."""


class Metrics(View):
    series: dict[str, Series]
    next_step: int
    """Pass as `after_step` to get later points. While the job is live, its newest step is sent
    again, because more values of that step may follow: merge points by step."""


class Point(View):
    """One value of one series."""

    key: str
    step: int
    value: MetricValue
    time: float | None = None
    """Time of the report, as in `Series.times`."""


class SystemSeries(View):
    times: list[int]
    """Unix times in seconds."""
    values: list[float]


class SystemMetrics(View):
    """The use of processors, memory, disks, network and GPUs by one rank, and by its node if it is
    the node's lowest rank."""

    series: dict[str, SystemSeries]
    next_time: int
    """Pass as `after_time` to get later points."""


class RankSample(View):
    rank: int
    values: dict[str, float]


class SystemSample(View):
    """The newest system metrics of every rank."""

    time: int | None
    """Unix time in seconds; unset for a job without samples."""
    ranks: list[RankSample]


class LogLine(View):
    attempt: int
    rank: int
    time: datetime
    text: str


class LogPage(View):
    items: list[LogLine]
    next_cursor: str
    """Pass as `cursor` to get later lines, even if `items` is empty."""
    complete: bool
    """Whether the job is over and this page reaches the end of its log."""


class Event(View):
    seq: int
    """Number of the event within the job, from 1, without gaps."""
    time: datetime
    type: str
    from_state: JobState | None = None
    to_state: JobState | None = None
    attempt: int
    code: str
    message: str
    actor: str | None = None
    """Name of the caller's token; `anonymous` if the server has no tokens, unset for events without
    a caller."""
    data: dict[str, Any] = {}


class EventPage(View):
    items: list[Event]
    next_seq: int


class Reset(View):
    """Data of the event `reset`, after which a stream begins again with the first event."""

    code: str
    message: str
    newest_seq: int


class Artifact(View):
    id: str
    path: str
    size_bytes: int
    sha256: str
    created_at: datetime


class ArtifactPage(View):
    items: list[Artifact]


class Code(View):
    """Uploaded code, or the missing parts of an upload."""

    id: str
    """`code-` and a hash of all files: the same files have the same id."""
    num_files: int
    size_bytes: int
    is_complete: bool
    """Whether the server has every part, so that a job may name the code."""
    missing: list[str] = []
    """The SHA-256 of each missing part."""


class CodeFile(View):
    path: str
    size_bytes: int
    is_executable: bool


class CodeFilePage(View):
    id: str
    items: list[CodeFile]


class DownloadLink(View):
    """A link for downloading one file of a job, once, without a token."""

    url: str
    """Path of the link on this server; anyone who has it can download the file."""
    expires_at: datetime
    """Time before which the download must begin."""
