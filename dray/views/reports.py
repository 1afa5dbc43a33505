"""Views of a job's metrics, logs, events and files."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from dray.views.base import MetricValue, View
from dray.views.jobs import JobState


class Series(View):
    steps: list[int]
    values: list[MetricValue]
    times: list[float] | None = None
    """Unix time in seconds at which rank 0 first reported each step; unset if times were not
    requested, or if the job ran on an older server."""


class Metrics(View):
    series: dict[str, Series]
    next_step: int
    """Pass this as `after_step` to get later points. While the job is live, the next response
    repeats the latest step, because values might be added to it. Merge points by step."""


class Point(View):
    """One value of one series."""

    key: str
    step: int
    value: MetricValue
    time: float | None = None
    """When the value was reported, as in `Series.times`."""


class SystemSeries(View):
    times: list[int]
    """Unix times in seconds."""
    values: list[float]


class SystemMetrics(View):
    """CPU, memory, disk, network and GPU usage of one rank, and of its node if the rank is the
    lowest on the node."""

    series: dict[str, SystemSeries]
    next_time: int
    """Pass this as `after_time` to get later points."""


class RankSample(View):
    rank: int
    values: dict[str, float]


class SystemSample(View):
    """The latest system metrics of every rank."""

    time: int | None
    """Unix time in seconds; unset if the job has no samples."""
    ranks: list[RankSample]


class LogLine(View):
    attempt: int
    rank: int
    number: int
    """Number of the line in the log of this attempt and rank, starting at 0. Numbers of lines that
    were dropped are left out."""
    time: datetime
    text: str
    row: str | None = None
    """Name of the row that the line shows, if the program drew this row several times, as progress
    bars do. Each line with the same attempt, rank and row shows a later state of the row."""


class LogPage(View):
    items: list[LogLine]
    next_cursor: str
    """Pass this as `cursor` to get later lines, even if `items` is empty."""
    complete: bool
    """Whether the job has ended and this page reaches the end of its log."""


class Event(View):
    seq: int
    """Number of the event within the job, starting at 1, without gaps."""
    time: datetime
    type: str
    from_state: JobState | None = None
    to_state: JobState | None = None
    attempt: int
    code: str
    message: str
    actor: str | None = None
    """Name of the user who caused the event; `anonymous` if the server has no tokens, unset if no
    user caused it."""
    data: dict[str, Any] = {}


class EventPage(View):
    items: list[Event]
    next_seq: int


class Reset(View):
    """Data of the `reset` event. After this event, the stream starts again from the first event."""

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


class SampledTexts(View):
    """Texts that the model generated at an evaluation."""

    step: int
    """Number of optimizer steps before the evaluation."""
    attempt: int
    time: datetime
    texts: list[str]
    """The texts, in the order of the prompts, up to 4,096 characters each."""


class SampledTextsPage(View):
    prompts: list[Any]
    """`samples.prompts` of the job document."""
    items: list[SampledTexts]
    next_cursor: str | None = None


class Code(View):
    """Uploaded code, or the parts that are still missing."""

    id: str
    """`code-` followed by a hash of all files. The same files always have the same id."""
    num_files: int
    size_bytes: int
    is_complete: bool
    """Whether the server has all parts, so that jobs can use the code."""
    missing: list[str] = []
    """SHA-256 of each missing part."""


class CodeFile(View):
    path: str
    size_bytes: int
    is_executable: bool


class CodeFilePage(View):
    id: str
    items: list[CodeFile]


class DownloadLink(View):
    """A link that can be used once to download a file of a job without a token."""

    url: str
    """Path of the link on this server. Anyone who has the link can download the file."""
    expires_at: datetime
    """When the link expires; the download must begin before this time."""
