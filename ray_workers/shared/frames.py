"""The reports of ranks, with one frozen class for each kind of frame. The reports of supervisors
are in `supervisor_frames`.

A rank or a supervisor writes `body()` to its spool. `service.ingest.decoding` recreates the object
from the received data, and refuses values that a field's type does not accept, because frames come
from processes that run user code. None means that the value is unknown to the reporter; such fields
are also transmitted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from ray_workers.shared.contracts import Cause, FrameKind

if TYPE_CHECKING:  # only `decoding` imports these, and with them pydantic
    from pydantic import Field

    from dray.spec import OnDivergence
    from ray_workers.shared.frame_fields import (
        MISSING_IS_NONE,
        AnyText,
        Awaited,
        Bytes,
        ClientNumbers,
        Clients,
        Code,
        Count,
        Finite,
        Flag,
        LineNumber,
        MaybeCount,
        MaybeNumber,
        MaybeSeconds,
        MediaContent,
        MediaData,
        MediaName,
        Message,
        MetricKey,
        Number,
        Packages,
        Receipt,
        RoundName,
        SampleText,
        Sha256,
        Text,
        Traceback,
        UpdateBytes,
        UpdateElements,
        Url,
        first,
        of_ranks,
    )

MAX_STRAGGLERS = 64
MAX_PASSED_OVER = 100
MAX_CULPRITS = 64
MAX_PROMPTS = 16  # as dray.spec.training.text_samples.MAX_PROMPTS


@dataclass(frozen=True)
class Report:
    """The body of a frame."""

    KIND: ClassVar[FrameKind]

    def body(self) -> dict[str, Any]:
        """Return the report as JSON data, in the form written to a spool."""
        return dict(vars(self))


@dataclass(frozen=True)
class MetricsReport(Report):
    """A rank's metrics for one step. `dray.train.report` writes only the fields that are set."""

    KIND = FrameKind.METRICS
    step: Count
    values: Mapping[MetricKey, Number]
    epoch: MaybeCount
    total_steps: MaybeCount
    samples_per_s: MaybeNumber
    found: Annotated[Flag, Field(default=False)]
    """Whether the values were found in the rank's output or files. The steps of such metrics are
    counted separately for each metric."""


@dataclass(frozen=True)
class LogReport(Report):
    """A line of a rank's output."""

    KIND = FrameKind.LOG
    line: LineNumber
    """The line's number, starting from 0 for each rank and incarnation."""
    text: Text


@dataclass(frozen=True)
class CheckpointReport(Report):
    """A checkpoint whose manifest has been written."""

    KIND = FrameKind.CHECKPOINT
    step: Count
    url: Url
    size_bytes: Bytes
    manifest_sha256: Sha256
    metrics: Annotated[Mapping[MetricKey, Number], Field(default_factory=dict)]


@dataclass(frozen=True)
class CheckpointDroppedReport(Report):
    """A checkpoint that `checkpoint.keep` deleted."""

    KIND = FrameKind.CHECKPOINT_DROPPED
    step: Count
    url: Url


@dataclass(frozen=True)
class ArtifactReport(Report):
    """A file that a rank stored for the user with `dray.train.save_artifact`."""

    KIND = FrameKind.ARTIFACT
    path: AnyText
    url: Url
    size_bytes: Bytes
    sha256: Sha256


@dataclass(frozen=True)
class PassedOver:
    """A checkpoint that could not be restored."""

    step: Count
    why: Receipt


@dataclass(frozen=True)
class DataPosition:
    """The position from which the data are read after a resume."""

    epoch: Count
    step_in_epoch: Count
    samples: Count


@dataclass(frozen=True)
class ResumedReport(Report):
    """A receipt for the state with which a rank starts.

    The receipt of a script, which `dray.train.load_checkpoint` writes, has fewer fields.
    """

    KIND = FrameKind.RESUMED
    step: Count
    url: Receipt
    """URL of the checkpoint that was restored or used as a starting point; empty if there was
    none."""
    sha256: Annotated[Sha256 | None, MISSING_IS_NONE]
    """SHA-256 of the checkpoint's manifest."""
    size_bytes: Annotated[Bytes | None, MISSING_IS_NONE]
    position: Annotated[DataPosition | None, MISSING_IS_NONE]
    world_size: MaybeCount
    """World size of the group that saved the checkpoint."""
    optimizer_restored: Annotated[Flag, Field(default=False)]
    rng: Annotated[Receipt | None, MISSING_IS_NONE]
    """How the states of the random number generators are restored."""
    loss_before: Annotated[Finite | None, MISSING_IS_NONE]
    """Training loss at the saved step. The next step's metrics contain the loss after the
    resume."""
    passed_over: Annotated[
        Sequence[PassedOver], Field(default_factory=list, max_length=MAX_PASSED_OVER)
    ]

    def body(self) -> dict[str, Any]:
        """Return the report. For a fresh start, omit the fields that do not apply."""
        whole = asdict(self)
        if self.url:
            return whole
        names = ("step", "url", "passed_over") if self.passed_over else ("step", "url")
        return {name: whole[name] for name in names}


@dataclass(frozen=True)
class Culprit:
    """A rank whose replica differs from the majority."""

    rank: Count
    hostname: Receipt
    device: Receipt
    """Such as `cpu`, or `cuda:0 GPU-...` with the GPU's UUID."""


@dataclass(frozen=True)
class StragglersReport(Report):
    """The ranks that take longer per sample than the other ranks; empty once there are no such
    ranks."""

    KIND = FrameKind.STRAGGLERS
    step: Count
    ranks: Annotated[Sequence[Count], first(MAX_STRAGGLERS)]
    slowdown: Annotated[Mapping[str, Finite], of_ranks]
    """For each of these ranks, its time per sample divided by the time per sample of the other
    ranks."""
    lost_s: Finite
    """Seconds that each of the other ranks waited for these ranks in the last `num_steps` steps."""
    num_steps: Count


@dataclass(frozen=True)
class DivergenceReport(Report):
    """The first step with a non-finite loss or gradient norm, or the first evaluation with a
    non-finite loss."""

    KIND = FrameKind.DIVERGENCE
    step: Count
    loss: Number
    """The training loss, or `val/loss`."""
    grad_norm: MaybeNumber
    """None for an evaluation."""
    then: OnDivergence
    """`train.on_divergence` of the job document."""


@dataclass(frozen=True)
class ReplicasReport(Report):
    """The result of a comparison of the model's replicas."""

    KIND = FrameKind.REPLICAS
    step: Count
    num_differing: Count
    """Number of ranks whose replica differs from the largest set of equal replicas."""
    culprits: Annotated[Sequence[Culprit], first(MAX_CULPRITS)]
    is_drill: Flag
    """Whether a drill changed the state of one of the ranks."""

    def body(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class MemoryCopiesReport(Report):
    """A copy of a divided model's state is complete in the memory of the ranks."""

    KIND = FrameKind.MEMORY_COPIES
    step: Count
    """The step after which the state was copied."""
    state_bytes: Bytes
    """Sum of the sizes of all ranks' shares of the state."""
    worker_bytes: Bytes
    """Memory for copies, of shares of this size, on the rank that needs the most."""


@dataclass(frozen=True)
class NoMemoryCopiesReport(Report):
    """The ranks of a divided model keep no copies of its state in memory, for the reason in
    `message`."""

    KIND = FrameKind.NO_MEMORY_COPIES
    message: Message


@dataclass(frozen=True)
class SamplesReport(Report):
    """Texts that the model generated at an evaluation, in the order of the document's prompts."""

    KIND = FrameKind.SAMPLES
    step: Count
    texts: Annotated[Sequence[SampleText], first(MAX_PROMPTS)]


@dataclass(frozen=True)
class PackagesReport(Report):
    """The packages that rank 0 can import: their versions, keyed by name."""

    KIND = FrameKind.PACKAGES
    packages: Packages


@dataclass(frozen=True)
class MediaReport(Report):
    """A value that is not a number, such as a picture, from `dray.train.report`."""

    KIND = FrameKind.MEDIA
    step: Count
    key: MetricKey
    kind: MediaName
    value: MediaData
    file: MediaContent
    """The file of an image or of audio; None for other kinds."""
    left_out: Count
    """Number of values that the rank left out since its last such report."""


@dataclass(frozen=True)
class RoundReport(Report):
    """A round with clients outside of the cluster was opened, was opened to more clients, or has
    ended."""

    KIND = FrameKind.ROUND
    number: Count
    name: RoundName
    """`round_files.round_name`, which is also the folder of the round's files."""
    is_open: Flag
    clients: Annotated[ClientNumbers | None, MISSING_IS_NONE]
    """The clients that are asked for an update; None means all."""
    quorum: Clients
    deadline_s: Finite
    """Seconds after which a quorum suffices to end the round."""
    num_elements: UpdateElements
    """Number of elements in an update."""
    model_sha256: Sha256
    model_size_bytes: Bytes
    form_sha256: Sha256
    """SHA-256 of the file that describes the model's inputs and predictions."""
    form_size_bytes: Bytes
    received: ClientNumbers
    """The clients whose updates have arrived."""
    awaits: Awaited
    """The message that clients must send: `round_files.UPDATE` or, with secure aggregation, the
    response of this phase."""
    update_bytes: UpdateBytes
    """The total size of the update, which clients send in parts."""


@dataclass(frozen=True)
class RoundTroubleReport(Report):
    """A round with secure aggregation restarts without a result, or clients sent invalid
    messages."""

    KIND = FrameKind.ROUND_TROUBLE
    number: Count
    left_out: ClientNumbers
    """The clients that are excluded from all further rounds."""
    message: Message


@dataclass(frozen=True)
class SiloRoundReport(Report):
    """A round of silos has been open for a long time, or such a long round has ended."""

    KIND = FrameKind.SILO_ROUND
    number: Count
    missing: ClientNumbers
    """The numbers of the silos that have not responded; empty if the round has ended."""
    quorum: Clients
    ends_in_s: MaybeSeconds
    """Seconds until the deadline, after which a quorum suffices; None without a deadline."""


@dataclass(frozen=True)
class ErrorReport(Report):
    """Why a rank ended."""

    KIND = FrameKind.ERROR
    cause: Cause
    type: Code
    message: Message
    """`TypeName: message (file, line n)`, as formatted by `training.core.failure_reason`."""
    traceback: Traceback
    raised_at: MaybeNumber
    """Unix time in seconds by the node's clock. The report may arrive much later."""
    seat: MaybeCount  # plain: ok
    """Worker index, which together with `incarnation` identifies the process; None in reports
    forged by a user's program. The spool's name is not sufficient, because the spool of a process
    without a rank is named after its worker index."""
    incarnation: MaybeCount
