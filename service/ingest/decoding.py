"""Decodes the reports and times of frames, and counts refused frames.

Frames come from processes that run a user's code. A frame that is malformed or out of bounds is
refused and counted, and one event about refused frames is added to the job. The handler of a report
checks whether the report may refer to the files it names: a file in another job's folder, for
example, is refused.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from datetime import UTC, datetime
from typing import get_type_hints

from pydantic import TypeAdapter, ValidationError
from sqlalchemy.orm import Session

from ray_workers.shared import frame_fields, frames, supervisor_frames
from ray_workers.shared.contracts import Frame, FrameKind
from ray_workers.shared.frame_fields import Count, clean
from ray_workers.shared.frames import Report
from service.db.models import JobRow
from service.db.repositories import events as events_repository
from service.lifecycle.transitions import remark
from service.telemetry.log_lines import MAX_TIME_S


def _validators() -> dict[FrameKind, Callable[..., Report]]:
    """Return the validator of each report class, after resolving the annotations."""
    modules = (frames, supervisor_frames)
    classes = {of for module in modules for of in vars(module).values() if is_dataclass(of)}
    for of in classes:
        hints = get_type_hints(of, localns=vars(frame_fields), include_extras=True)
        for field in fields(of):
            field.type = hints[field.name]
    reports = Report.__subclasses__()
    return {of.KIND: TypeAdapter(of).validator.validate_python for of in reports}


_VALIDATORS = _validators()
_COUNT = TypeAdapter(Count)


class BadFrame(ValueError):
    """The frame can't be stored. The message states the reason."""


MALFORMED = (BadFrame, LookupError, TypeError, ValueError, OverflowError, AttributeError)
"""Exceptions that a frame can cause if it can't be stored."""


def decode(frame: Frame) -> Report:
    """Return the report in a frame, or raise BadFrame or LookupError if it is malformed."""
    try:
        return _VALIDATORS[frame.kind](frame.body)
    except ValidationError as error:
        raise BadFrame(_first_of(error)) from None


def _first_of(error: ValidationError) -> str:
    fault = error.errors(include_url=False, include_context=False)[0]
    field = ".".join(map(str, fault["loc"]))
    return f"{field}: {fault['msg']}, not {fault['input']!r:.100}"


def resumed_step(frame: Frame) -> int:
    """Return the step of a RESUMED frame, even if the rest of the frame is malformed."""
    return _COUNT.validate_python(frame.body["step"])


class Refusals:
    """Counts the refused frames of one reply by reason."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def guard(self, frame: Frame, take: Callable[[Frame], None]) -> None:
        """Call `take` with the frame, and count the frame if it is refused."""
        try:
            take(frame)
        except MALFORMED as error:
            self._counts[f"{frame.kind}: {clean(str(error))[:200]}"] += 1

    def add_event(self, session: Session, job: JobRow, now: datetime) -> None:
        """Add an event about refused frames to the job, unless it already has one."""
        type_ = "frames_refused"
        if not self._counts or events_repository.has_event(session, job.id, type_):
            return
        reason, _ = self._counts.most_common(1)[0]
        remark(
            session,
            job,
            type_=type_,
            code=type_,
            message=f"a report from a rank was not stored ({reason})",
            now=now,
            data={"refused": dict(self._counts.most_common(10))},
        )


def time_of(frame: Frame, now: datetime) -> datetime:
    """Return the frame's time by its node's clock, or `now` if it is not a valid time."""
    return _as_time(frame.time) or now


def seconds_of(frame: Frame, now: datetime) -> float:
    """Return `time_of` in Unix seconds."""
    return frame.time if 0 <= frame.time <= MAX_TIME_S else now.timestamp()


def within(seconds: float, first: datetime, last: datetime) -> datetime:
    """Return a node's time (Unix seconds) if it is between `first` and `last`. If the time is
    outside this range, the node's clock is wrong, and the result is `last`."""
    at = _as_time(seconds)
    return at if at is not None and first <= at <= last else last


def _as_time(seconds: float) -> datetime | None:
    try:
        return datetime.fromtimestamp(seconds, UTC)
    except (ValueError, OverflowError, OSError):
        return None
