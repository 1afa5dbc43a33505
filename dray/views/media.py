"""Views of the media of a job: values that it reported in addition to numbers."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Literal

from pydantic import Field, FiniteFloat

from dray.media.kinds import MediaKind as MediaKind
from dray.views.base import View


class MediaFile(View):
    """The file of a picture or of audio."""

    sha256: str
    """Identifies the file in `/v1/jobs/{id}/media/files/{sha256}`."""
    size_bytes: int
    media_type: str
    """Such as `image/png`."""


class Histogram(View):
    kind: Literal["histogram"]
    counts: list[int]
    edges: list[FiniteFloat]
    """The edges of the bins, one more than counts."""
    not_finite: int = 0
    """Number of values that are NaN or infinite, which are in no bin."""


class Image(View):
    kind: Literal["image"]
    file: MediaFile
    width: int
    height: int


class Audio(View):
    kind: Literal["audio"]
    file: MediaFile
    sample_rate: int
    """Samples per second of each channel."""
    channels: int
    seconds: FiniteFloat


class ReportedText(View):
    kind: Literal["text"]
    text: str
    num_chars: int
    """Number of characters of the reported text, which is cut if it is too long."""


class ReportedTable(View):
    kind: Literal["table"]
    columns: list[str]
    rows: list[list[bool | int | FiniteFloat | str | None]]
    num_rows: int
    """Number of reported rows, of which only the first are kept if there are too many."""


class ConfusionMatrix(View):
    kind: Literal["confusion_matrix"]
    classes: list[str]
    counts: list[list[int]]
    """A row for each true class, with a count for each predicted class."""


class RateCurve(View):
    """Precision over recall, or the true positive rate over the false positive rate."""

    kind: Literal["pr_curve", "roc_curve"]
    x: list[FiniteFloat]
    y: list[FiniteFloat]
    thresholds: list[FiniteFloat | None]
    """The least score that counts as positive at each point; unset at the first point, at which no
    score does."""
    area: FiniteFloat
    """The average precision, or the area under the ROC curve, computed from all scores."""
    positives: int
    negatives: int


MediaValue = Annotated[
    Histogram | Image | Audio | ReportedText | ReportedTable | ConfusionMatrix | RateCurve,
    Field(discriminator="kind"),
]


class MediaRecord(View):
    """A value that a rank reported for a key at a step."""

    key: str
    rank: int
    step: int
    attempt: int
    time: datetime
    value: MediaValue


class MediaPage(View):
    items: list[MediaRecord]
    next_cursor: str | None = None


class MediaSeries(View):
    """The records of a kind and key that a rank reported."""

    kind: MediaKind
    key: str
    rank: int
    steps: list[int]
    """The steps with a record, in ascending order."""


class MediaOverview(View):
    """The media of a job, by series."""

    items: list[MediaSeries]
    num_records: int
    """Number of records that were stored, including records that a later attempt replaced."""
    num_bytes: int
    num_left_out: int
    """Number of values that were left out, because they could not be stored or a limit was
    reached; the job's log and events state the reasons."""
    max_records: int
    max_bytes: int
