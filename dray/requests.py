"""Request bodies other than the job document.

Small bodies that only one route uses are defined next to the route, like query parameters.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    StrictBool,
    StringConstraints,
    model_validator,
)

from dray.code.manifest import MAX_FILES
from dray.spec import JobSpec
from dray.spec.fields import (
    MAX_STEPS,
    Document,
    Int,
    LabelKey,
    LabelValue,
    Name,
    Number,
    QueueName,
    ReservationName,
    Seconds,
    Sha256,
    Size,
    a_number,
    wrong,
)
from dray.views import DrillKind, JobState, WebhookFormat

MAX_RANK = 1_000_000
MAX_GRACE_S = 24 * 3600


# Unlike `Int`, these types allow 1.0, which JSON treats as an integer. The bounds precede the
# validator, because otherwise the JSON Schema would not contain `minimum` and `maximum`.
Rank = Annotated[int, Field(ge=0, le=MAX_RANK), BeforeValidator(a_number)]
Step = Annotated[int, Field(ge=0, le=MAX_STEPS), BeforeValidator(a_number)]


class PreemptRequest(Document):
    """Ask a job to save a checkpoint and release its slots."""

    grace_s: Annotated[Number, Field(ge=0.0, le=MAX_GRACE_S)] | None = None
    """A job that still holds its slots after this many seconds is killed. The default is the
    server's setting."""
    held: StrictBool = False
    """Hold the job once it waits again, so that it does not start until it is released."""


class DrillRequest(Document):
    """Inject a fault into a job."""

    kind: DrillKind
    rank: Rank = 0
    """Rank to inject the fault into; ignored for `preempt`."""
    at_step: Step | None = None
    """Number of optimizer steps after which to inject the fault; by default, immediately."""


Priority = Annotated[Int, Field(ge=0, le=100)]


MAX_FIELDS = 128
Fields = Annotated[dict[str, Any], Field(max_length=MAX_FIELDS)]


class DocumentChanges(Document):
    """New values of fields of a job's document, as a merge patch (RFC 7396): null restores a
    field's default. Fields that are not listed here can't be changed after the submission."""

    name: Name | None = None
    labels: Fields | None = None
    """null removes a label."""
    resources: Fields | None = None
    elastic: Fields | None = None
    max_retries: Annotated[Int, Field(ge=0, le=100)] | None = None
    max_runtime_s: Seconds | None = None
    """Also for a job that has slots: its owner can lower the limit, and an admin can raise it."""
    after: Annotated[list[Any], Field(max_length=MAX_FIELDS)] | None = None
    """Replaces the list. Only for a job that has never started and does not belong to an array."""
    queue: QueueName | None = None
    priority: Priority | None = None
    reservation: ReservationName | None = None

    @property
    def patch(self) -> dict[str, Any]:
        """The fields that were given, including fields that are null."""
        return self.model_dump(mode="json", exclude_unset=True)


class PositionChange(Document):
    """Change a job's position in the queues."""

    queue: QueueName | None = None
    """Move a waiting job to this queue."""
    priority: Priority | None = None
    """The new priority, at most the queue's `max_priority` unless the caller is an admin."""
    held: StrictBool | None = None
    """Whether a waiting job is on hold. A held job does not start until it is released."""
    first: Literal[True] | None = None
    """Move a waiting job ahead of all other jobs with the same priority in its queue; only for
    admins."""


class JobChangeRequest(PositionChange):
    """Change a job's position in the queues, or the document of a waiting job. Omitted fields
    remain unchanged."""

    document: DocumentChanges | None = None
    """Change the document of a waiting job. The new document is checked like a submission."""

    @model_validator(mode="before")
    @classmethod
    def _only_what_can_change(cls, given: Any) -> Any:
        document = given.get("document") if isinstance(given, Mapping) else None
        for field in document if isinstance(document, Mapping) else ():
            if field in JobSpec.model_fields and field not in DocumentChanges.model_fields:
                raise wrong(
                    f"/document/{field}",
                    "can't be changed after the submission; only "
                    f"{', '.join(DocumentChanges.model_fields)} can be changed: submit a new job "
                    "instead, for example with `dray submit --like`",
                )
        return given

    @model_validator(mode="after")
    def _something(self) -> Self:
        document = None if self.document is None else self.document.patch
        if not (document or self.model_dump(exclude_none=True, exclude={"document"})):
            raise ValueError(f"specify at least one of {', '.join(type(self).model_fields)}")
        for field in ("queue", "priority"):
            if field in (document or {}) and getattr(self, field) is not None:
                raise wrong(f"/document/{field}", f"is given twice: remove {field} or this field")
        return self


class ArrayChangeRequest(PositionChange):
    """Change the waiting jobs of an array together. Omitted fields remain unchanged."""

    max_running: Annotated[Int, Field(ge=1, le=10**6)] | None = None
    """Maximum number of jobs of the array that run at the same time; null removes the limit. Jobs
    that run already are not stopped."""

    @model_validator(mode="after")
    def _something(self) -> Self:
        if "max_running" not in self.model_fields_set and not self.changes_jobs:
            raise ValueError(f"specify at least one of {', '.join(type(self).model_fields)}")
        return self

    @property
    def changes_jobs(self) -> bool:
        """Whether fields other than `max_running` are given."""
        return bool(self.model_dump(exclude_none=True, exclude={"max_running"}))


Tag = Annotated[
    str, StringConstraints(min_length=1, max_length=63, pattern=r"^[A-Za-z0-9][A-Za-z0-9._/-]*$")
]
MAX_TAGS = 32
"""Maximum number of tags per job."""
MAX_NOTES = 32_768


NUM_COLOURS = 20


class AnnotationRequest(Document):
    """Change the tags, the notes and the colour of a job. Omitted fields remain unchanged."""

    add_tags: Annotated[tuple[Tag, ...], Field(max_length=MAX_TAGS)] = ()
    remove_tags: Annotated[tuple[Tag, ...], Field(max_length=MAX_TAGS)] = ()
    notes: Annotated[str, StringConstraints(max_length=MAX_NOTES)] | None = None
    """Markdown that replaces the current notes; an empty string removes them."""
    colour: Annotated[Int, Field(ge=0, lt=NUM_COLOURS)] | Literal["auto"] | None = None
    """Number of the colour in which the web page draws the job's curves; `auto` lets the page
    choose again."""

    @model_validator(mode="after")
    def _something(self) -> Self:
        if not (self.add_tags or self.remove_tags) and (self.notes, self.colour) == (None, None):
            raise ValueError("specify at least one of add_tags, remove_tags, notes and colour")
        return self


class PlanRequest(JobSpec):
    """A job document, with optional information that the planner can't determine itself."""

    memory_bytes_per_rank: Size | None = None
    """Memory for tensors on each worker; by default the memory of the cluster's GPUs, or
    `resources.memory_bytes` on CPU."""
    flops_per_s: Annotated[Number, Field(gt=0.0, le=1e18)] | None = None
    """Floating-point operations per second of a GPU or a CPU core during training. The default is
    the speed of recent jobs on such workers, or a typical value if there are no such jobs. The
    response names the source."""
    bandwidth_bytes_per_s: Annotated[Number, Field(gt=0.0, le=1e15)] | None = None
    """Bytes per second that each worker can send while all workers are sending."""
    latency_s: Annotated[Number, Field(ge=0.0, le=10.0)] | None = None
    """Duration, in seconds, of a collective operation without data."""

    @property
    def job(self) -> JobSpec:
        """The job document without the planner's fields."""
        own = type(self).model_fields.keys() - JobSpec.model_fields.keys()
        return JobSpec.model_validate(self.model_dump(exclude=own))


class CheckpointFileRequest(Document):
    """One file of a checkpoint."""

    step: Step
    path: Annotated[str, Field(min_length=1, max_length=1024)]


class LogRequest(Document):
    """Request the part of the log that has been written so far, as plain text."""

    rank: Rank | None = None
    """Rank whose log to download. By default, the logs of all ranks are downloaded, and each line
    starts with its attempt and rank."""
    attempt: Annotated[int, Field(ge=1, lt=2**31), BeforeValidator(a_number)] | None = None
    """Attempt whose log to download. By default, the logs of all attempts are downloaded."""


class DownloadRequest(Document):
    """Request a download link for an artifact, a checkpoint file, or a log of a job. Set exactly
    one of the fields."""

    artifact: Annotated[str, Field(min_length=1, max_length=255)] | None = None
    """Id of the artifact."""
    checkpoint: CheckpointFileRequest | None = None
    log: LogRequest | None = None

    @model_validator(mode="after")
    def _one(self) -> Self:
        if [self.artifact, self.checkpoint, self.log].count(None) != 2:
            raise ValueError("specify exactly one of artifact, checkpoint and log")
        return self


class CodeFileRequest(Document):
    """One file of the code, described by the hashes of its parts."""

    path: Annotated[str, Field(min_length=1, max_length=1024)]
    """Path of the file relative to the root of the code, with `/` as the separator."""
    size_bytes: Annotated[Int, Field(ge=0, le=1 << 40)]
    is_executable: StrictBool = False
    parts: list[Sha256]
    """Hexadecimal SHA-256 of each part of 4 MiB. An empty file has no parts."""


class CodeRequest(Document):
    """The files of a folder. Jobs can use the code once all parts are uploaded."""

    files: Annotated[list[CodeFileRequest], Field(min_length=1, max_length=MAX_FILES)]


_URL = r"^https?://[^\s\\/@?#\x00-\x20\x7f]+(?:[/?][^\s\\#\x00-\x20\x7f]*)?$"


def _a_url(value: str) -> str:
    """Refuse URLs that different programs parse differently, because the host that was checked
    might then differ from the host of the connection."""
    if not value.isascii():
        raise ValueError(
            "must be ASCII: percent-encode other characters (for example %C3%A9), and write host "
            "names in the form xn--..."
        )
    try:
        parts = urlsplit(value)
        has_host = bool(parts.hostname) and parts.port != 0
    except ValueError:
        has_host = False
    if not has_host:
        raise ValueError("must have a host; the port, if any, must be from 1 to 65535")
    return value


class WebhookRequest(Document):
    """Send notifications to a URL when jobs enter certain states."""

    url: Annotated[
        str,
        StringConstraints(min_length=1, max_length=2000, pattern=_URL),
        AfterValidator(_a_url),
    ]
    """URL to which messages are posted: `https://`, without a user name, password or fragment."""
    format: WebhookFormat = WebhookFormat.JSON
    states: Annotated[list[JobState], Field(min_length=1, max_length=len(JobState))] = Field(
        default_factory=lambda: [state for state in JobState if state.is_terminal]
    )
    """A notification is sent when a job enters one of these states. The default is the final
    states."""
    queue: QueueName | None = None
    """Notify only about jobs in this queue."""
    labels: Annotated[dict[LabelKey, LabelValue], Field(max_length=16)] = Field(
        default_factory=dict
    )
    """Notify only about jobs with all of these labels."""
    all_users: StrictBool = False
    """Notify about the jobs of all users instead of only your own; only for admins."""


class UpdateRequest(Document):
    """Submit the update whose parts were uploaded. The server can't verify the numbers that the
    client reports."""

    sha256: Sha256
    """SHA-256 of all parts together."""
    num_samples: Annotated[Int, Field(ge=1, le=2**31)]
    """Number of samples that the client trained on."""
    num_steps: Annotated[Int, Field(ge=1, le=2**31)]
    loss: Number
    """Mean loss during training."""
    num_val_samples: Annotated[Int, Field(ge=0, le=2**31)] = 0
    """Number of the client's own validation samples."""
    val_loss: Number | None = None
    """Mean loss of the round's model on the validation samples, before training."""
