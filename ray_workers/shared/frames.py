"""The reports of ranks and supervisors: one frozen class for each kind of frame.

A rank or a supervisor writes `body()` to its spool. `service/ingest/decoding.py` makes the object
again from what arrives, and refuses what is malformed: frames come from processes that run a user's
code. None stands for what the reporter does not know; the field is on the wire all the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

from ray_workers.shared.contracts import Cause, DrillState, FrameKind


@dataclass(frozen=True)
class Report:
    """The body of a frame."""

    KIND: ClassVar[FrameKind]

    def body(self) -> dict[str, Any]:
        """As it is written to a spool, in JSON."""
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
class StragglersReport(Report):
    """These ranks take longer for a sample than the others, or none does any more."""

    KIND = FrameKind.STRAGGLERS
    step: int
    ranks: Sequence[int]
    slowdown: Mapping[str, float]
    """By rank: how many times as long as the others."""
    lost_s: float
    """What they cost each of the others in the last `num_steps` steps."""
    num_steps: int


@dataclass(frozen=True)
class DivergenceReport(Report):
    """The first step whose loss or gradient norm is not finite."""

    KIND = FrameKind.DIVERGENCE
    step: int
    loss: float
    grad_norm: float
    then: str
    """`train.on_divergence` of the job document."""


@dataclass(frozen=True)
class ErrorReport(Report):
    """Why a rank ends."""

    KIND = FrameKind.ERROR
    cause: Cause | str
    type: str
    message: str
    """`TypeName: words (file, line n)`, by the rules of `training.core.failure_reason`."""
    traceback: str


@dataclass(frozen=True)
class RegroupingReport(Report):
    """These ranks were lost or hang; the others keep their state and wait for replacements."""

    KIND = FrameKind.REGROUPING
    generation: int
    """The round of the rendezvous that the ranks are called to."""
    ranks: Sequence[int]
    code: str
    """`killed`, `lost` or `hang`."""
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
    """From the loss to the next committed step."""


@dataclass(frozen=True)
class HeldSlots:
    """Slots of one node that an attempt holds."""

    node_id: str
    num_workers: int


@dataclass(frozen=True)
class ResizedReport(Report):
    """The attempt holds these slots from now on; all others were given back."""

    KIND = FrameKind.RESIZED
    world_size: int
    slices: Sequence[HeldSlots]
    lacking: int
    """How many workers more it needs to train on; it stands by for them for a while."""
    grants: int
    """The number of the newest `Grant` that it knew, 0 for none. The slots of a newer one are its
    own all the same."""
    message: str

    def body(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class RankWhereabouts:
    """Where one rank stood when the group hung."""

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
class LedgerReport(Report):
    """What the slots of the attempt were used for so far."""

    KIND = FrameKind.LEDGER
    slot_seconds: Mapping[str, float]
    """By `TimeCategory`."""
