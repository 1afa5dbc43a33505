"""The reports of ranks and supervisors: one frozen class for each kind of frame.

A rank or a supervisor writes `body()` to its spool. `service.ingest.decoding` makes the object
again from what arrives, and refuses what the type of a field does not take: frames come from
processes that run a user's code. None stands for what the reporter does not know; the field is on
the wire all the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from dray.drills import DrillState
from ray_workers.shared.contracts import Cause, FrameKind

if TYPE_CHECKING:  # `decoding` has the types: a process that reports need not import pydantic
    from pydantic import Field

    from dray.spec import MAX_WORKERS, OnDivergence
    from ray_workers.shared.frame_fields import (
        MISSING_IS_NONE,
        AnyText,
        Awaited,
        Bytes,
        ClientNumbers,
        Clients,
        Code,
        Collective,
        Count,
        DrillMessage,
        Finite,
        Flag,
        LedgerSeconds,
        LineNumber,
        MaybeCount,
        MaybeNumber,
        MaybeSeconds,
        Message,
        MetricKey,
        Number,
        Phase,
        Ranks,
        Receipt,
        RisingRanks,
        RoundName,
        Sha256,
        Slots,
        Stack,
        SystemMetrics,
        Text,
        Traceback,
        UpdateBytes,
        UpdateElements,
        Url,
        Workers,
        first,
        of_ranks,
    )

MAX_STRAGGLERS = 64
MAX_PASSED_OVER = 100
MAX_COLUMNS = 1000


@dataclass(frozen=True)
class Report:
    """The body of a frame."""

    KIND: ClassVar[FrameKind]

    def body(self) -> dict[str, Any]:
        """The report as it is written to a spool, in JSON."""
        return dict(vars(self))


@dataclass(frozen=True)
class MetricsReport(Report):
    """Metrics of one step of a rank. `dray.train.report` writes it, and leaves out what is None."""

    KIND = FrameKind.METRICS
    step: Count
    values: Mapping[MetricKey, Number]
    epoch: MaybeCount
    total_steps: MaybeCount
    samples_per_s: MaybeNumber


@dataclass(frozen=True)
class LogReport(Report):
    """A line of a rank's output."""

    KIND = FrameKind.LOG
    line: LineNumber
    """Counts from 0 within one rank and incarnation."""
    text: Text


@dataclass(frozen=True)
class CheckpointReport(Report):
    """A checkpoint whose manifest is written."""

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
    """A file that a rank stored for the user; `dray.train.save_artifact` writes it."""

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
    """Where the data go on after a resume."""

    epoch: Count
    step_in_epoch: Count
    samples: Count


@dataclass(frozen=True)
class ResumedReport(Report):
    """The receipt of a start: what was restored.

    `dray.train.load_checkpoint` writes that of a script, which knows less of it.
    """

    KIND = FrameKind.RESUMED
    step: Count
    url: Receipt
    """Of the checkpoint that was restored or begun from; empty for none."""
    sha256: Annotated[Sha256 | None, MISSING_IS_NONE]
    """Of its manifest."""
    size_bytes: Annotated[Bytes | None, MISSING_IS_NONE]
    position: Annotated[DataPosition | None, MISSING_IS_NONE]
    world_size: MaybeCount
    """World size of the group that saved the checkpoint."""
    optimizer_restored: Annotated[Flag, Field(default=False)]
    rng: Annotated[Receipt | None, MISSING_IS_NONE]
    """How random numbers go on."""
    loss_before: Annotated[Finite | None, MISSING_IS_NONE]
    """Training loss of the saved step; the next step's metrics have the loss after the resume."""
    passed_over: Annotated[
        Sequence[PassedOver], Field(default_factory=list, max_length=MAX_PASSED_OVER)
    ]

    def body(self) -> dict[str, Any]:
        """Without the fields that say nothing of a fresh start."""
        whole = asdict(self)
        if self.url:
            return whole
        said = ("step", "url", "passed_over") if self.passed_over else ("step", "url")
        return {name: whole[name] for name in said}


@dataclass(frozen=True)
class StragglersReport(Report):
    """These ranks take longer for a sample than the others, or none does any more."""

    KIND = FrameKind.STRAGGLERS
    step: Count
    ranks: Annotated[Sequence[Count], first(MAX_STRAGGLERS)]
    slowdown: Annotated[Mapping[str, Finite], of_ranks]
    """How many times as long as the others each rank takes."""
    lost_s: Finite
    """Seconds that each of the others waited for them in the last `num_steps` steps."""
    num_steps: Count


@dataclass(frozen=True)
class DivergenceReport(Report):
    """The first step whose loss or gradient norm is not finite, or the first evaluation whose loss
    is not."""

    KIND = FrameKind.DIVERGENCE
    step: Count
    loss: Number
    """In training, or `val/loss`."""
    grad_norm: MaybeNumber
    """None for an evaluation."""
    then: OnDivergence
    """`train.on_divergence` of the job document."""


@dataclass(frozen=True)
class RoundReport(Report):
    """A round of a federated job whose clients are outside of the cluster opens, opens to more of
    them, or ends."""

    KIND = FrameKind.ROUND
    number: Count
    name: RoundName
    """`round_files.round_name`; its files are below it."""
    is_open: Flag
    clients: Annotated[ClientNumbers | None, MISSING_IS_NONE]
    """The clients that are asked for an update; None for all."""
    quorum: Clients
    deadline_s: Finite
    """After which a quorum ends the round."""
    num_elements: UpdateElements
    """Of an update."""
    model_sha256: Sha256
    model_size_bytes: Bytes
    form_sha256: Sha256
    """Of the file that says what the model takes and predicts."""
    form_size_bytes: Bytes
    received: ClientNumbers
    """The clients whose updates are there."""
    awaits: Awaited
    """The thing that clients are to send: `round_files.UPDATE`, or with secure aggregation their
    answer in this phase."""
    update_bytes: UpdateBytes
    """The size of the update that they send in parts."""


@dataclass(frozen=True)
class RoundTroubleReport(Report):
    """A round with secure aggregation begins anew without a result, or clients have lied in it."""

    KIND = FrameKind.ROUND_TROUBLE
    number: Count
    left_out: ClientNumbers
    """The clients that take part in no further round."""
    message: Message


@dataclass(frozen=True)
class SiloRoundReport(Report):
    """A round of silos is open for long, or has ended then."""

    KIND = FrameKind.SILO_ROUND
    number: Count
    missing: ClientNumbers
    """The places of the silos that have not answered; none of a round that has ended."""
    quorum: Clients
    ends_in_s: MaybeSeconds
    """Seconds until the deadline, after which a quorum ends the round; None without one."""


@dataclass(frozen=True)
class ErrorReport(Report):
    """Why a rank ends."""

    KIND = FrameKind.ERROR
    cause: Cause
    type: Code
    message: Message
    """`TypeName: words (file, line n)`, by the rules of `training.core.failure_reason`."""
    traceback: Traceback
    raised_at: MaybeNumber
    """Unix seconds by the node's clock; the report itself may come much later."""
    seat: MaybeCount
    """With `incarnation`, the process; None in reports that a user's program made up. Its spool may
    have the name of another rank: that of a process that has no place yet is named by its seat."""
    incarnation: MaybeCount


class LossKind(StrEnum):
    """How a group lost ranks."""

    KILLED = "killed"
    """Their processes ended."""
    LOST = "lost"
    """Their workers vanished, or a connection between living ranks broke."""
    HANG = "hang"
    """They stood still, and were ended for it."""


@dataclass(frozen=True)
class RegroupingReport(Report):
    """These ranks were lost or hang; the others keep their state and wait for replacements."""

    KIND = FrameKind.REGROUPING
    generation: Count
    """The round of the rendezvous that the ranks are called to."""
    ranks: Ranks
    code: LossKind
    message: Message


@dataclass(frozen=True)
class RegroupedReport(Report):
    """The group trains again from after `step`."""

    KIND = FrameKind.REGROUPED
    generation: Count
    ranks: Ranks
    world_size: Annotated[Workers, Field(ge=1)]
    step: MaybeCount
    steps_lost: MaybeCount
    recovery_s: MaybeSeconds
    """Seconds from the loss of the ranks to the next committed step."""


@dataclass(frozen=True)
class ResizedReport(Report):
    """The attempt holds these slots from now on; all others were given back."""

    KIND = FrameKind.RESIZED
    world_size: Workers
    slices: Slots
    lacking: Workers
    """How many workers more it needs: it stands by for them for a while, or trains on meanwhile."""
    grants: Count
    """The number of the newest `Grant` that it knew, 0 for none. The slots of a newer one are its
    own all the same."""
    message: Message

    def body(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class RankWhereabouts:
    """The place of one rank when the group hung."""

    rank: Count
    step: MaybeCount
    phase: Phase
    collective: Collective
    since_s: MaybeSeconds
    stack: Stack


@dataclass(frozen=True)
class HangReport(Report):
    """Which ranks stood still, and where everyone was."""

    KIND = FrameKind.HANG
    culprits: Ranks
    step: MaybeCount
    phase: Phase
    waited_s: MaybeSeconds
    limit_s: MaybeSeconds
    ranks: Annotated[Sequence[RankWhereabouts], first(MAX_WORKERS)]

    def body(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class DrillReport(Report):
    """How a drill goes."""

    KIND = FrameKind.DRILL
    id: Code
    state: DrillState
    step: MaybeCount
    recovery_s: MaybeSeconds
    steps_lost: MaybeCount
    message: DrillMessage


@dataclass(frozen=True)
class WaitingReport(Report):
    """The ranks have ended, and the attempt waits for something else."""

    KIND = FrameKind.WAITING
    message: Message


@dataclass(frozen=True)
class LedgerReport(Report):
    """The uses of the attempt's slots so far."""

    KIND = FrameKind.LEDGER
    slot_seconds: LedgerSeconds
    """Slot-seconds by `TimeCategory`."""


@dataclass(frozen=True)
class SystemMetricsColumns:
    """Ranks with the same system metrics."""

    ranks: RisingRanks
    values: SystemMetrics
    """By name, of each of the ranks."""


@dataclass(frozen=True)
class SystemMetricsReport(Report):
    """One sample of the processors, memory and devices that ranks and nodes use."""

    KIND = FrameKind.SYSTEM_METRICS
    time: Count
    """Unix seconds by the supervisor's clock as it was set when the attempt began."""
    columns: Annotated[Sequence[SystemMetricsColumns], Field(max_length=MAX_COLUMNS)]

    def body(self) -> dict[str, Any]:
        return asdict(self)
