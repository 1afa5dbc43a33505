"""What the supervisor tells, on its way into SQL: losses, sizes, hangs, drills, the ledger.

In the order in which it told it, so that the events of a job read as it happened, also where one
reply tells of a loss and of its repair.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any

from sqlalchemy.orm import Session

from dray.spec import MAX_WORKERS
from dray.views import JobState
from ray_workers.shared.contracts import SUPERVISOR_RANK, Frame, FrameKind
from service.db.models import AttemptRow, JobRow
from service.db.repositories import faults as repository
from service.domain import drills, ledger
from service.domain.progress import without_rates
from service.domain.states import Trigger
from service.ingest import fault_injection, goodput, hangs, resize_frames
from service.ingest.frame_checks import (
    MAX_STEP,
    Refusals,
    Refused,
    count,
    count_or_none,
    ranks_of,
    seconds_or_none,
    text,
    time_of,
)
from service.lifecycle.transitions import move, remark

KINDS = frozenset(
    {
        FrameKind.REGROUPING,
        FrameKind.REGROUPED,
        FrameKind.RESIZED,
        FrameKind.HANG,
        FrameKind.DRILL,
        FrameKind.LEDGER,
    }
)
MAX_MESSAGE_CHARS = 4096


def is_from_supervisor(frame: Frame) -> bool:
    """Whether it is one of these; a rank that says such a thing is not believed."""
    return frame.rank == SUPERVISOR_RANK and frame.kind in KINDS


def generation(frames: Sequence[Frame]) -> int:
    """The newest that they tell of, 0 if of none."""
    told = [f.body.get("generation") for f in frames if f.kind is FrameKind.REGROUPING]
    return max((n for n in told if isinstance(n, int) and 0 < n <= MAX_STEP), default=0)


class SupervisorFrames:
    """Stores what the supervisor told in one reply. Made for one transaction."""

    def __init__(self, session: Session, job: JobRow, attempt: AttemptRow, now: datetime) -> None:
        self._session = session
        self._job = job
        self._attempt = attempt
        self._now = now
        self._ledger: tuple[dict[str, float], datetime] | None = None

    def take(self, frames: Sequence[Frame]) -> None:
        handlers = {
            FrameKind.REGROUPING: self._take_regrouping,
            FrameKind.REGROUPED: self._take_regrouped,
            FrameKind.RESIZED: self._take_resized,
            FrameKind.HANG: self._take_hang,
            FrameKind.DRILL: self._take_drill,
            FrameKind.LEDGER: self._take_ledger,
        }
        refusals = Refusals()
        for frame in frames:
            refusals.guard(frame, handlers[frame.kind])
        if self._ledger is not None:
            goodput.book(self._session, self._job, self._attempt, *self._ledger)
        refusals.tell(self._session, self._job, self._now)

    def _take_regrouping(self, frame: Frame) -> None:
        body = frame.body
        ranks = ranks_of(body, "ranks", MAX_WORKERS)
        how = text(body, "code", 64)
        said = text(body, "message", MAX_MESSAGE_CHARS)
        message = said or f"lost {_named(ranks)}; the group is mended in place"
        data = {"ranks": ranks, "generation": count(body, "generation", MAX_STEP), "how": how}
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
        else:  # it starts, is being mended already, or is cancelled meanwhile
            self._remark("regrouping", "group_lost", message, data)

    def _take_regrouped(self, frame: Frame) -> None:
        body = frame.body
        world_size = count(body, "world_size", MAX_WORKERS)
        if world_size == 0:
            raise Refused("a group of nobody trains nothing")
        recovery_s = seconds_or_none(body, "recovery_s")
        steps_lost = count_or_none(body, "steps_lost")
        data = {
            "recovery_s": recovery_s,
            "steps_lost": steps_lost,
            "step": count_or_none(body, "step"),
            "ranks": ranks_of(body, "ranks", MAX_WORKERS),
            "generation": count(body, "generation", MAX_STEP),
            "world_size": world_size,
        }
        workers = "1 worker" if world_size == 1 else f"{world_size} workers"
        sentence = drills.outcome_sentence(recovery_s, steps_lost)
        message = f"{sentence}; trains again on {workers}"
        values = {"recoveries": self._job.recoveries + 1, "world_size": world_size}
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

    def _take_resized(self, frame: Frame) -> None:
        resize_frames.store_resized(self._session, self._job, self._attempt, frame, self._now)

    def _take_hang(self, frame: Frame) -> None:
        num_ranks = max(self._attempt.world_size, self._job.world_size)
        body = hangs.bundle(frame.body, num_ranks)
        seq = repository.add_hang(
            self._session,
            self._job.id,
            attempt=self._attempt.attempt,
            time=time_of(frame, self._now),
            body=body,
            keep=hangs.KEPT_OF_A_JOB,
        )
        shown = ("culprits", "step", "phase", "waited_s", "limit_s")
        data = {"hang": seq, **{name: body[name] for name in shown}}
        self._remark("hang", "hang", hangs.sentence(body), data)

    def _take_drill(self, frame: Frame) -> None:
        fault_injection.told(self._session, self._job, frame, self._now)

    def _take_ledger(self, frame: Frame) -> None:
        """The newest of a reply holds; each says all of the attempt."""
        said = frame.body["slot_seconds"]
        self._ledger = ledger.checked(said), time_of(frame, self._now)

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
