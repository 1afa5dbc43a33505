"""The reports of supervisors (`frames`), which have the rank SUPERVISOR_RANK."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

from dray.drills import DrillState
from ray_workers.shared.contracts import FrameKind
from ray_workers.shared.frames import Report

if TYPE_CHECKING:  # only `decoding` imports these, and with them pydantic
    from pydantic import Field

    from dray.spec import MAX_WORKERS
    from ray_workers.shared.frame_fields import (
        Code,
        Collective,
        Count,
        DrillMessage,
        LedgerSeconds,
        MaybeCount,
        MaybeSeconds,
        Message,
        Phase,
        Ranks,
        RisingRanks,
        Slots,
        Stack,
        SystemMetrics,
        Workers,
        first,
    )

MAX_COLUMNS = 1000


class LossKind(StrEnum):
    """How a group lost ranks."""

    KILLED = "killed"
    """Their processes ended."""
    LOST = "lost"
    """The ranks' workers disappeared, or a connection between live ranks broke."""
    HANG = "hang"
    """The ranks made no progress, and were therefore killed."""


@dataclass(frozen=True)
class RegroupingReport(Report):
    """Ranks were lost or are hanging. The other ranks keep their state and wait for
    replacements."""

    KIND = FrameKind.REGROUPING
    generation: Count
    """The rendezvous round that the ranks are asked to join."""
    ranks: Ranks
    code: LossKind
    message: Message


@dataclass(frozen=True)
class RegroupedReport(Report):
    """The group has resumed training after `step`."""

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
    """The slots that the attempt now holds, after releasing all other slots."""

    KIND = FrameKind.RESIZED
    world_size: Workers
    slices: Slots
    lacking: Workers
    """Number of missing workers. The attempt waits for these workers for a limited time, or
    continues without them."""
    grants: Count
    """Number of the latest `Grant` or `Recall` that was handled; 0 if none was handled. If a later
    grant is still being sent, its slots also belong to the attempt."""
    message: Message

    def body(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class SparesReport(Report):
    """A change of the spares of a group."""

    KIND = FrameKind.SPARES
    ready: Workers
    """Number of spares that can take the rank of a lost worker."""
    message: Message


@dataclass(frozen=True)
class RankWhereabouts:
    """The position of one rank when the group hung."""

    rank: Count
    step: MaybeCount
    phase: Phase
    collective: Collective
    since_s: MaybeSeconds
    stack: Stack


@dataclass(frozen=True)
class HangReport(Report):
    """The ranks that made no progress, and the positions of all ranks."""

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
    """The progress of a drill."""

    KIND = FrameKind.DRILL
    id: Code
    state: DrillState
    step: MaybeCount
    recovery_s: MaybeSeconds
    steps_lost: MaybeCount
    message: DrillMessage


@dataclass(frozen=True)
class WaitingReport(Report):
    """The ranks have ended, but the attempt is still waiting, for the reason in `message`."""

    KIND = FrameKind.WAITING
    message: Message


@dataclass(frozen=True)
class LedgerReport(Report):
    """The attempt's use of its slots so far."""

    KIND = FrameKind.LEDGER
    slot_seconds: LedgerSeconds
    """Slot-seconds by `TimeCategory`."""


@dataclass(frozen=True)
class SystemMetricsColumns:
    """System metrics of ranks that report the same metric names."""

    ranks: RisingRanks
    values: SystemMetrics
    """A value for each of the ranks, by metric name."""


@dataclass(frozen=True)
class SystemMetricsReport(Report):
    """A sample of the CPU, memory and device usage of ranks and nodes."""

    KIND = FrameKind.SYSTEM_METRICS
    time: Count
    """Unix time in seconds, unaffected by changes to the supervisor's clock during the attempt."""
    columns: Annotated[Sequence[SystemMetricsColumns], Field(max_length=MAX_COLUMNS)]

    def body(self) -> dict[str, Any]:
        return asdict(self)
