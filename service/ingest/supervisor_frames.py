"""Stores the reports of a supervisor: losses, sizes, hangs, drills, the ledger, system metrics.

Reports are stored in the order in which the supervisor wrote them, so the events of a job are in
the right order even if one reply reports a loss and the recovery from it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from datetime import datetime
from typing import Any

from sqlalchemy.orm import Session

from dray.views import JobState
from ray_workers.shared.contracts import SUPERVISOR_RANK, Frame, FrameKind
from ray_workers.shared.supervisor_frames import (
    DrillReport,
    HangReport,
    LedgerReport,
    LossKind,
    RegroupedReport,
    RegroupingReport,
    ResizedReport,
    SparesReport,
    SystemMetricsReport,
    WaitingReport,
)
from service.costs import spending
from service.db.models import AttemptRow, JobRow
from service.db.repositories import faults as repository
from service.db.session import measure
from service.domain import meter
from service.domain.attempts import drills, ledger
from service.domain.costs.prices import Prices
from service.domain.progress import without_rates
from service.domain.states import Trigger
from service.ingest import fault_injection, goodput, hangs, resize_frames
from service.ingest.decoding import MALFORMED, BadFrame, Refusals, decode, within
from service.lifecycle import node_checks
from service.lifecycle.transitions import move, remark
from service.telemetry import system_metrics
from service.telemetry.known_attempts import KnownAttempt

KINDS = frozenset(
    {
        FrameKind.REGROUPING,
        FrameKind.REGROUPED,
        FrameKind.RESIZED,
        FrameKind.SPARES,
        FrameKind.HANG,
        FrameKind.DRILL,
        FrameKind.WAITING,
        FrameKind.LEDGER,
        FrameKind.SYSTEM_METRICS,
    }
)


def is_from_supervisor(frame: Frame) -> bool:
    """Whether the frame has one of these kinds and is from the supervisor, not from a rank."""
    return frame.rank == SUPERVISOR_RANK and frame.kind in KINDS


def generation(frames: Sequence[Frame]) -> int:
    """Return the newest rendezvous generation in REGROUPING frames; 0 if there are none."""
    newest = 0
    for frame in frames:
        if frame.kind is FrameKind.REGROUPING:
            with contextlib.suppress(*MALFORMED):
                report = decode(frame)
                newest = (
                    max(newest, report.generation)
                    if isinstance(report, RegroupingReport)
                    else newest
                )
    return newest


class SupervisorFrames:
    """Stores the supervisor's frames from one reply. Each instance serves one transaction."""

    def __init__(
        self,
        session: Session,
        job: JobRow,
        attempt: AttemptRow,
        now: datetime,
        known: KnownAttempt,
        prices: Prices | None = None,
    ) -> None:
        """`known` contains cached facts about the attempt, and is kept up to date. `prices` is None
        if no prices are set."""
        self._session = session
        self._known = known
        self._prices = prices
        self._job = job
        self._attempt = attempt
        self._now = now
        self._ledger: tuple[dict[str, float], datetime] | None = None

    def take(self, frames: Sequence[Frame]) -> None:
        refusals = Refusals()
        for frame in frames:
            refusals.guard(frame, self._take)
        if self._ledger is not None:
            reported, at = self._ledger
            goodput.book(self._session, self._job, self._attempt, reported, at)
            spending.charge(self._session, self._job, self._attempt, self._prices, at)
        refusals.add_event(self._session, self._job, self._now)

    def _take(self, frame: Frame) -> None:
        session, job, now = self._session, self._job, self._now
        at = self._within_run(frame.time)
        match decode(frame):
            case RegroupingReport() as report:
                self._take_regrouping(report)
            case RegroupedReport() as report:
                self._take_regrouped(report)
            case ResizedReport() as report:
                resize_frames.store_resized(session, job, self._attempt, report, at, now)
            case SparesReport() as report:
                self._job.spares_ready = report.ready
                self._remark("spares", "spares", report.message, {"ready": report.ready})
            case HangReport() as report:
                self._take_hang(report, at)
            case DrillReport() as report:
                fault_injection.take(session, job, report, at, now)
            case WaitingReport() as report:
                self._remark("waiting", "waiting", report.message, {})
            case LedgerReport() as report:  # the newest ledger replaces all others
                self._ledger = ledger.checked(report.slot_seconds), at
            case SystemMetricsReport() as report:
                time = int(self._within_run(report.time).timestamp())
                system_metrics.store(session, job.id, time, report, self._known)
            case _:
                raise BadFrame("a supervisor sent a report that only ranks may send")

    def _within_run(self, seconds: float) -> datetime:
        """Return a time from the node's clock if it is within the attempt; otherwise, return the
        current time."""
        return within(seconds, self._attempt.started_at or self._attempt.created_at, self._now)

    def _take_regrouping(self, report: RegroupingReport) -> None:
        ranks = list(report.ranks)
        message = report.message or f"lost {_named(ranks)}; the group recovers in place"
        data = {"ranks": ranks, "generation": report.generation, "how": report.code}
        if report.code is LossKind.LOST:
            self._suspect(ranks, "vanished")
        if self._job.state == JobState.RUNNING:
            move(
                self._session,
                self._job,
                Trigger.REFORM,
                code="group_lost",
                message=message,
                now=self._now,
                values={"progress": without_rates(self._job.progress)},
                data=data,
            )
        else:  # the job is starting, already recovering, or being cancelled
            self._remark("regrouping", "group_lost", message, data)

    def _take_regrouped(self, report: RegroupedReport) -> None:
        data = report.body()
        world_size = report.world_size
        workers = "1 worker" if world_size == 1 else f"{world_size} workers"
        sentence = drills.outcome_sentence(report.recovery_s, report.steps_lost)
        message = f"{sentence}; trains again on {workers}"
        if report.recovery_s is not None:
            measure(self._session, meter.RECOVERY, report.recovery_s, "in_place")
        values = {"recoveries": self._job.recoveries + 1, "world_size": world_size}
        self._attempt.growth = None
        if self._job.state == JobState.RECOVERING:
            move(
                self._session,
                self._job,
                Trigger.STEP,
                code="recovered",
                message=message,
                now=self._now,
                values=values,
                data=data,
            )
        else:
            self._job.recoveries, self._job.world_size = values["recoveries"], world_size
            self._remark("regrouped", "recovered", message, data)

    def _take_hang(self, report: HangReport, at: datetime) -> None:
        num_ranks = max(self._attempt.world_size, self._job.world_size)
        report = hangs.bounded(report, num_ranks)
        seq = repository.add_hang(
            self._session,
            self._job.id,
            attempt=self._attempt.attempt,
            time=at,
            body=report.body(),
            keep=hangs.KEPT_OF_A_JOB,
        )
        data = {
            "hang": seq,
            **{name: shown for name, shown in vars(report).items() if name != "ranks"},
        }
        self._remark("hang", "hang", hangs.sentence(report, self._job.id), data)
        self._suspect(report.culprits, "hung")

    def _suspect(self, ranks: Sequence[int], why: str) -> None:
        """Request tests of the nodes of these ranks, unless a drill might have caused the loss."""
        session, job = self._session, self._job
        if ranks and not repository.with_open_drills(session, [job.id]):
            sentence = f"{_named(ranks)} {why}"
            node_checks.suspect(session, job, self._attempt, ranks, sentence, self._now)

    def _remark(self, type_: str, code: str, message: str, data: dict[str, Any]) -> None:
        remark(
            self._session,
            self._job,
            type_=type_,
            code=code,
            message=message,
            now=self._now,
            data=data,
        )


def _named(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (" and more" if len(ranks) > 8 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"
