"""The reports of ranks and supervisors: one frozen class for each kind of frame.

A rank or a supervisor writes `body()` to its spool. `service/ingest/decoding.py` makes the object
again from what arrives, and refuses what is malformed: frames come from processes that run a user's
code. None stands for what the reporter does not know; the field is on the wire all the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, ClassVar

from dray.drills import DrillState
from ray_workers.shared.contracts import Cause, FrameKind, Slice

if TYPE_CHECKING:
    from dray.spec import OnDivergence


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
    step: int
    values: Mapping[str, float]
    epoch: int | None
    total_steps: int | None
    samples_per_s: float | None


@dataclass(frozen=True)
class LogReport(Report):
    """A line of a rank's output."""

    KIND = FrameKind.LOG
    line: int
    """Counts from 0 within one rank and incarnation."""
    text: str


@dataclass(frozen=True)
class CheckpointReport(Report):
    """A checkpoint whose manifest is written."""

    KIND = FrameKind.CHECKPOINT
    step: int
    url: str
    size_bytes: int
    manifest_sha256: str
    metrics: Mapping[str, float]


@dataclass(frozen=True)
class CheckpointDroppedReport(Report):
    """A checkpoint that `checkpoint.keep` deleted."""

    KIND = FrameKind.CHECKPOINT_DROPPED
    step: int
    url: str


@dataclass(frozen=True)
class ArtifactReport(Report):
    """A file that a rank stored for the user; `dray.train.save_artifact` writes it."""

    KIND = FrameKind.ARTIFACT
    path: str
    url: str
    size_bytes: int
    sha256: str


@dataclass(frozen=True)
class PassedOver:
    """A checkpoint that could not be restored."""

    step: int
    why: str


@dataclass(frozen=True)
class DataPosition:
    """Where the data go on after a resume."""

    epoch: int
    step_in_epoch: int
    samples: int


@dataclass(frozen=True)
class ResumedReport(Report):
    """The receipt of a start: what was restored.

    `dray.train.load_checkpoint` writes that of a script, which knows less of it.
    """

    KIND = FrameKind.RESUMED
    step: int
    url: str
    """Of the checkpoint that was restored or begun from; empty for none."""
    sha256: str | None
    """Of its manifest."""
    size_bytes: int | None
    position: DataPosition | None
    world_size: int | None
    """World size of the group that saved the checkpoint."""
    optimizer_restored: bool
    rng: str | None
    """How random numbers go on."""
    loss_before: float | None
    """Training loss of the saved step; the next step's metrics have the loss after the resume."""
    passed_over: Sequence[PassedOver]

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
    step: int
    ranks: Sequence[int]
    slowdown: Mapping[str, float]
    """How many times as long as the others each rank takes."""
    lost_s: float
    """Seconds that each of the others waited for them in the last `num_steps` steps."""
    num_steps: int


@dataclass(frozen=True)
class DivergenceReport(Report):
    """The first step whose loss or gradient norm is not finite, or the first evaluation whose loss
    is not."""

    KIND = FrameKind.DIVERGENCE
    step: int
    loss: float
    """In training, or `val/loss`."""
    grad_norm: float | None
    """None for an evaluation."""
    then: OnDivergence
    """`train.on_divergence` of the job document."""


@dataclass(frozen=True)
class RoundReport(Report):
    """A round of a federated job whose clients are outside of the cluster opens, opens to more of
    them, or ends."""

    KIND = FrameKind.ROUND
    number: int
    name: str
    """`round_files.round_name`; its files are below it."""
    is_open: bool
    clients: Sequence[int] | None
    """The clients that are asked for an update; None for all."""
    quorum: int
    deadline_s: float
    """After which a quorum ends the round."""
    num_elements: int
    """Of an update."""
    model_sha256: str
    model_size_bytes: int
    form_sha256: str
    """Of the file that says what the model takes and predicts."""
    form_size_bytes: int
    received: Sequence[int]
    """The clients whose updates are there."""
    awaits: str
    """The thing that clients are to send: `round_files.UPDATE`, or with secure aggregation their
    answer in this phase."""
    update_bytes: int
    """The size of the update that they send in parts."""


@dataclass(frozen=True)
class RoundTroubleReport(Report):
    """A round with secure aggregation begins anew without a result, or clients have lied in it."""

    KIND = FrameKind.ROUND_TROUBLE
    number: int
    left_out: Sequence[int]
    """The clients that take part in no further round."""
    message: str


@dataclass(frozen=True)
class SiloRoundReport(Report):
    """A round of silos is open for long, or has ended then."""

    KIND = FrameKind.SILO_ROUND
    number: int
    missing: Sequence[int]
    """The places of the silos that have not answered; none of a round that has ended."""
    quorum: int
    ends_in_s: float | None
    """Seconds until the deadline, after which a quorum ends the round; None without one."""


@dataclass(frozen=True)
class ErrorReport(Report):
    """Why a rank ends."""

    KIND = FrameKind.ERROR
    cause: Cause
    type: str
    message: str
    """`TypeName: words (file, line n)`, by the rules of `training.core.failure_reason`."""
    traceback: str
    raised_at: float | None
    """Unix seconds by the node's clock; the report itself may come much later."""
    seat: int | None
    """With `incarnation`, the process; None in reports that a user's program made up. Its spool may
    have the name of another rank: that of a process that has no place yet is named by its seat."""
    incarnation: int | None


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
    generation: int
    """The round of the rendezvous that the ranks are called to."""
    ranks: Sequence[int]
    code: LossKind
    message: str


@dataclass(frozen=True)
class RegroupedReport(Report):
    """The group trains again from after `step`."""

    KIND = FrameKind.REGROUPED
    generation: int
    ranks: Sequence[int]
    world_size: int
    step: int | None
    steps_lost: int | None
    recovery_s: float | None
    """Seconds from the loss of the ranks to the next committed step."""


@dataclass(frozen=True)
class ResizedReport(Report):
    """The attempt holds these slots from now on; all others were given back."""

    KIND = FrameKind.RESIZED
    world_size: int
    slices: Sequence[Slice]
    lacking: int
    """How many workers more it needs: it stands by for them for a while, or trains on meanwhile."""
    grants: int
    """The number of the newest `Grant` that it knew, 0 for none. The slots of a newer one are its
    own all the same."""
    message: str

    def body(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class RankWhereabouts:
    """The place of one rank when the group hung."""

    rank: int
    step: int | None
    phase: str | None
    collective: int | str | None
    since_s: float | None
    stack: str | None


@dataclass(frozen=True)
class HangReport(Report):
    """Which ranks stood still, and where everyone was."""

    KIND = FrameKind.HANG
    culprits: Sequence[int]
    step: int | None
    phase: str | None
    waited_s: float | None
    limit_s: float | None
    ranks: Sequence[RankWhereabouts]

    def body(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class DrillReport(Report):
    """How a drill goes."""

    KIND = FrameKind.DRILL
    id: str
    state: DrillState
    step: int | None
    recovery_s: float | None
    steps_lost: int | None
    message: str


@dataclass(frozen=True)
class WaitingReport(Report):
    """The ranks have ended, and the attempt waits for something else."""

    KIND = FrameKind.WAITING
    message: str


@dataclass(frozen=True)
class LedgerReport(Report):
    """The uses of the attempt's slots so far."""

    KIND = FrameKind.LEDGER
    slot_seconds: Mapping[str, float]
    """Slot-seconds by `TimeCategory`."""


@dataclass(frozen=True)
class SystemMetricsColumns:
    """Ranks with the same system metrics."""

    ranks: Sequence[int]
    values: Mapping[str, Sequence[float]]
    """By name, of each of the ranks."""


@dataclass(frozen=True)
class SystemMetricsReport(Report):
    """One sample of the processors, memory and devices that ranks and nodes use."""

    KIND = FrameKind.SYSTEM_METRICS
    time: int
    """Unix seconds by the supervisor's clock as it was set when the attempt began."""
    columns: Sequence[SystemMetricsColumns]

    def body(self) -> dict[str, Any]:
        return asdict(self)
