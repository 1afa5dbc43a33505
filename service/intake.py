"""What ranks report, on its way into SQL: metrics, log lines, checkpoints, artifacts, errors.

Frames come from processes that run a user's code, so nothing in them is believed unseen: one that
is malformed, out of bounds, or names a place outside of its attempt's own folder is refused and
counted, and the job's events say so once.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from sqlalchemy.orm import Session

from ray_workers.contracts import Frame, FrameKind, attempt_prefix
from service import receipts
from service.db.models import ArtifactRow, AttemptRow, CheckpointRow, JobRow
from service.db.repositories import attempts as attempts_repository
from service.db.repositories import jobs as jobs_repository
from service.domain.ids import artifact_id
from service.domain.text import clean
from service.log_store import LogLine, LogStore
from service.metric_store import MetricStore, by_name
from service.storage import Storage, check_key
from service.transitions import remark

MAX_STEP = 2**53
"""Steps stay exact in JSON, and far below what a 64-bit column holds."""
MAX_KEY_CHARS = 128
MAX_PATH_CHARS = 1024
MAX_ERRORS = 8
"""Errors of one attempt that become events: a thousand ranks mostly fail of one cause."""
MAX_TRACEBACK_CHARS = 16 * 1024


class Refused(ValueError):
    """The frame can't be stored; the message says why."""


class Intake:
    """Stores the frames of one reply. Made for one transaction."""

    def __init__(
        self, session: Session, storage: Storage, job: JobRow, attempt: AttemptRow, now: datetime
    ) -> None:
        self._session = session
        self._storage = storage
        self._job = job
        self._attempt = attempt
        self._now = now
        self._logs = LogStore(session, storage, job, attempt, now)
        self._metrics = MetricStore(session, job, attempt, now)
        self._refused: Counter[str] = Counter()
        self._known_keys: set[str] = set()
        self._awaited_step = receipts.awaited_step(attempt)
        self._said: dict[str, Any] = dict(job.progress or {})
        self._reached: tuple[int, Frame] | None = None
        """Newest step of rank 0, and the frame that told of it."""

    def take(self, frames: Sequence[Frame]) -> None:
        handlers = {
            FrameKind.METRICS: self._take_metrics,
            FrameKind.LOG: self._take_log,
            FrameKind.CHECKPOINT: self._take_checkpoint,
            FrameKind.CHECKPOINT_DROPPED: self._take_dropped,
            FrameKind.ARTIFACT: self._take_artifact,
            FrameKind.RESUMED: self._take_resumed,
            FrameKind.ERROR: self._take_error,
        }
        for frame in frames:
            try:
                handlers[frame.kind](frame)
            except (
                Refused,
                LookupError,
                TypeError,
                ValueError,
                OverflowError,
                AttributeError,
            ) as error:
                self._refused[f"{frame.kind}: {clean(str(error))[:200]}"] += 1
        if self._reached is not None:
            step, frame = self._reached
            at = time_of(frame, self._now)
            self._job.progress = progress(self._attempt, self._said, step, at)
        self._metrics.store()
        self._logs.store()
        self._tell_of_refused()

    def _tell_of_refused(self) -> None:
        type_ = "frames_refused"
        if not self._refused or jobs_repository.has_event(self._session, self._job.id, type_):
            return
        what, _ = self._refused.most_common(1)[0]
        remark(
            self._session,
            self._job,
            type_=type_,
            code=type_,
            message=f"something that a rank reported was not stored ({what})",
            now=self._now,
            data={"refused": dict(self._refused.most_common(10))},
        )

    def _take_metrics(self, frame: Frame) -> None:
        body = frame.body
        step = count(body, "step", MAX_STEP)
        values = body["values"]
        if not isinstance(values, Mapping):
            raise Refused("values is not a mapping")
        numbers = {
            key if key in self._known_keys else self._new_key(key): number(value)
            for key, value in values.items()
        }
        attempt = self._attempt
        first = attempt.first_metric_step
        if frame.rank == 0:
            self._said.update(said_of_progress(body))
            self._reached = step, frame
            if step == self._awaited_step and receipts.LOSS in numbers:
                loss = numbers[receipts.LOSS]
                receipts.complete(self._session, self._job, attempt, loss, self._now)
                self._awaited_step = None
        if first is None or step < first:
            attempt.first_metric_step, attempt.first_metric_at = step, time_of(frame, self._now)
        if self._job.first_step_at is None:
            self._job.first_step_at = time_of(frame, self._now)
        repeats = frame.incarnation > 0
        self._metrics.add(rank=frame.rank, step=step, values=numbers, repeats=repeats)

    def _new_key(self, key: Any) -> str:
        """The same few names come again and again: each is looked at once."""
        name = metric_key(key)
        self._known_keys.add(name)
        return name

    def _take_log(self, frame: Frame) -> None:
        text = frame.body["text"]
        if not isinstance(text, str):
            raise Refused("text is not a string")
        seconds = frame.time if math.isfinite(frame.time) else self._now.timestamp()
        line = count(frame.body, "line", 2**62)
        self._logs.add(LogLine(frame.rank, frame.incarnation, line, seconds, clean(text)))

    def _take_checkpoint(self, frame: Frame) -> None:
        body = frame.body
        metrics = body.get("metrics") or {}
        attempts_repository.put_checkpoint(
            self._session,
            CheckpointRow(
                job_id=self._job.id,
                attempt=self._attempt.attempt,
                step=count(body, "step", MAX_STEP),
                url=self._own_url(body["url"]),
                size_bytes=count(body, "size_bytes", 2**62),
                manifest_sha256=sha256(body["manifest_sha256"]),
                metrics={metric_key(k): by_name(number(v)) for k, v in metrics.items()},
                created_at=time_of(frame, self._now),
            ),
        )

    def _take_dropped(self, frame: Frame) -> None:
        url = frame.body["url"]
        if not isinstance(url, str):
            raise Refused("url is not a string")
        attempts_repository.drop_checkpoint(self._session, self._job.id, url)

    def _take_artifact(self, frame: Frame) -> None:
        body = frame.body
        path = check_key(clean(str(body["path"])))
        if len(path) > MAX_PATH_CHARS:
            raise Refused(f"path is longer than {MAX_PATH_CHARS} characters")
        attempts_repository.put_artifact(
            self._session,
            ArtifactRow(
                job_id=self._job.id,
                id=artifact_id(self._job.id, path),
                attempt=self._attempt.attempt,
                path=path,
                url=self._own_url(body["url"]),
                size_bytes=count(body, "size_bytes", 2**62),
                sha256=sha256(body["sha256"]),
                created_at=time_of(frame, self._now),
            ),
        )

    def _take_resumed(self, frame: Frame) -> None:
        if self._attempt.resume_step is None:
            self._attempt.resume_step = count(frame.body, "step", MAX_STEP)
            self._attempt.receipt = receipts.of_frame(frame.body)
            self._awaited_step = receipts.awaited_step(self._attempt)

    def _take_error(self, frame: Frame) -> None:
        self._attempt.num_errors += 1
        if self._attempt.num_errors > MAX_ERRORS:
            return
        body = frame.body
        message = clean(f"{body.get('type', 'Error')}: {body.get('message', '')}")[:4096]
        remark(
            self._session,
            self._job,
            type_="error",
            code=clean(str(body.get("cause", "user_error")))[:64],
            message=f"rank {frame.rank}: {message}",
            now=self._now,
            data={
                "rank": frame.rank,
                "traceback": clean(str(body.get("traceback", "")))[-MAX_TRACEBACK_CHARS:],
            },
        )

    def _own_url(self, url: Any) -> str:
        """The URL if it lies in this attempt's folder: what it names will be served."""
        if not isinstance(url, str):
            raise Refused("url is not a string")
        key = self._storage.key_of(url)
        prefix = attempt_prefix(self._job.id, self._attempt.attempt)
        if not key.startswith(f"{prefix}/"):
            raise Refused(f"{url!r} is outside of the attempt's folder")
        return url


def count(body: Mapping[str, Any], name: str, limit: int) -> int:
    value = body[name]
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= limit:
        raise Refused(f"{name} is not a count: {value!r}")
    return value


def number(value: Any) -> float:
    if type(value) is float:
        return value
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise Refused(f"not a number: {value!r}")
    return float(value)


def metric_key(key: Any) -> str:
    if not isinstance(key, str) or not 0 < len(key) <= MAX_KEY_CHARS or not key.isprintable():
        raise Refused(f"not a metric's name: {key!r}")
    return key


def sha256(value: Any) -> str:
    text = str(value)
    if len(text) != 64 or not set(text) <= set("0123456789abcdef"):
        raise Refused(f"not a SHA-256 in hexadecimal: {value!r}")
    return text


def time_of(frame: Frame, now: datetime) -> datetime:
    """The frame's time by its node's clock, or now if that is no time."""
    try:
        return datetime.fromtimestamp(frame.time, UTC)
    except (ValueError, OverflowError, OSError):
        return now


def said_of_progress(body: Mapping[str, Any]) -> dict[str, Any]:
    """What a frame says of it, checked; what it does not say, such as one of an evaluation, stays
    what it was."""
    said: dict[str, Any] = {}
    for name in ("total_steps", "epoch"):
        if body.get(name) is not None:
            said[name] = count(body, name, MAX_STEP)
    if body.get("samples_per_s") is not None:
        speed = number(body["samples_per_s"])
        said["samples_per_s"] = speed if math.isfinite(speed) else None
    return said


def progress(
    attempt: AttemptRow, said: Mapping[str, Any], step: int, at: datetime
) -> dict[str, Any]:
    """How far rank 0 is, and how long the rest takes at the attempt's own mean speed."""
    total = said.get("total_steps")
    eta_s = None
    if total is not None and attempt.first_metric_at is not None:
        steps = step - (attempt.first_metric_step or 0)
        seconds = (at - attempt.first_metric_at).total_seconds()
        if steps > 0 and seconds >= 0:
            eta_s = max(0, total - step) * seconds / steps
    return {
        "step": step,
        "total_steps": total,
        "epoch": said.get("epoch"),
        "samples_per_s": said.get("samples_per_s"),
        "eta_s": eta_s,
    }
