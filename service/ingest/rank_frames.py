"""What ranks report, on its way into SQL: metrics, log lines, checkpoints, artifacts, errors.

What a frame may not say, such as a place outside of its attempt's own folder, is in `frames`; what
the supervisor tells is in `fault_intake`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from sqlalchemy.orm import Session

from dray.names import unfit
from ray_workers.shared.contracts import Frame, FrameKind, attempt_prefix
from service.db.models import ArtifactRow, AttemptRow, CheckpointRow, JobRow
from service.db.repositories import attempts as attempts_repository
from service.domain.ids import artifact_id
from service.domain.text import clean
from service.ingest import metric_columns, resume_reports
from service.ingest.frame_checks import MAX_STEP, Refusals, Refused, count, number, sha256, time_of
from service.lifecycle.transitions import remark
from service.storage.storage import Storage, check_key
from service.telemetry.log_writer import LogLine, LogStore
from service.telemetry.metric_writer import MetricStore, by_name

MAX_KEY_CHARS = 128
MAX_PATH_CHARS = 1024
MAX_ERRORS = 8
"""Errors of one attempt that become events: a thousand ranks mostly fail of one cause."""
MAX_TOLD_RANKS = 64
"""Stragglers that an event names."""
MAX_TRACEBACK_CHARS = 16 * 1024


class RankFrames:
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
        self._known_keys: set[str] = set()
        self._awaited_step = resume_reports.awaited_step(attempt)
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
            FrameKind.STRAGGLERS: self._take_stragglers,
            FrameKind.DIVERGENCE: self._take_divergence,
            FrameKind.ERROR: self._take_error,
        }
        refusals = Refusals()
        # What a replacement reports comes after what the rank before it did.
        in_order = sorted(frames, key=lambda frame: frame.incarnation)
        for run in metric_columns.runs(in_order):
            if run[0].kind == FrameKind.METRICS and self._take_run(run):
                continue
            for frame in run:
                refusals.guard(frame, handlers.get(frame.kind, _not_for_a_rank))
        if self._reached is not None:
            step, frame = self._reached
            at = time_of(frame, self._now)
            self._job.progress = progress(self._attempt, self._said, step, at)
        self._metrics.store()
        self._logs.store()
        refusals.tell(self._session, self._job, self._now)

    def _take_run(self, frames: Sequence[Frame]) -> bool:
        """Take frames of one form at once; False, and nothing is taken, if one is unusual."""
        run = metric_columns.run_of(frames, MAX_STEP)
        if run is None or not all(map(self._may_name, run.columns)):
            return False
        lowest = min(run.steps)
        self._saw_step(lowest, frames[run.steps.index(lowest)], first=frames[0])
        rank = frames[0].rank
        if rank == 0:
            self._reach(run.steps[-1], frames[-1], run.said)
            self._complete_receipt(run.steps, run.columns.get(resume_reports.LOSS))
        repeats = self._may_repeat(frames[0])
        for key, values in run.columns.items():
            self._metrics.extend(key, rank, run.steps, values, repeats=repeats)
        return True

    def _may_name(self, key: str) -> bool:
        try:
            return key in self._known_keys or bool(self._new_key(key))
        except Refused:
            return False

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
        if frame.rank == 0:
            self._reach(step, frame, said_of_progress(body))
            loss = numbers.get(resume_reports.LOSS)
            self._complete_receipt([step], None if loss is None else [loss])
        self._saw_step(step, frame, first=frame)
        repeats = self._may_repeat(frame)
        for key, value in numbers.items():
            self._metrics.extend(key, frame.rank, (step,), (value,), repeats=repeats)

    def _reach(self, step: int, frame: Frame, said: Mapping[str, Any]) -> None:
        """A step that is told again after a repair takes the progress back nowhere."""
        if step >= (self._attempt.last_metric_step or 0):
            self._said.update(said)
            self._reached = step, frame
            self._attempt.last_metric_step = step

    def _complete_receipt(self, steps: Sequence[int], losses: Sequence[float] | None) -> None:
        """The loss of the first step after a resume is what its receipt waits for."""
        awaited = self._awaited_step
        if awaited is not None and losses is not None and awaited in steps:
            loss = losses[steps.index(awaited)]
            resume_reports.complete(self._session, self._job, self._attempt, loss, self._now)
            self._awaited_step = None

    def _may_repeat(self, frame: Frame) -> bool:
        """Whether its steps may have been told before, by a process that is gone."""
        return frame.incarnation > 0 or self._attempt.generation > 0

    def _saw_step(self, step: int, frame: Frame, *, first: Frame) -> None:
        """`step`: the lowest of some, which `frame` told of; `first`: what told of any of them."""
        known = self._attempt.first_metric_step
        if known is None or step < known:
            self._attempt.first_metric_step = step
            self._attempt.first_metric_at = time_of(frame, self._now)
        if self._job.first_step_at is None:
            self._job.first_step_at = time_of(first, self._now)

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
        path = check_key(str(body["path"]))
        if (found := unfit(path)) is not None:
            raise Refused(f"the path of an artifact has {found}: {path!r}")
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
            self._attempt.receipt = resume_reports.of_frame(frame.body)
            self._awaited_step = resume_reports.awaited_step(self._attempt)

    def _take_stragglers(self, frame: Frame) -> None:
        body = frame.body
        ranks = [int(rank) for rank in body["ranks"]][:MAX_TOLD_RANKS]
        lost_s, num_steps = number(body["lost_s"]), count(body, "num_steps", MAX_STEP)
        slowdown = {str(rank): number(body["slowdown"][str(rank)]) for rank in ranks}
        if ranks:
            named = ", ".join(f"rank {rank} by {slowdown[str(rank)]:.1f}" for rank in ranks)
            message = (
                f"slower than the others: {named}; the others waited {lost_s:.2f} s in the last "
                f"{num_steps} steps"
            )
        else:
            message = "no rank is slower than the others any more"
        remark(
            self._session,
            self._job,
            type_="stragglers",
            code="stragglers",
            message=message,
            now=self._now,
            data={
                "step": count(body, "step", MAX_STEP),
                "ranks": ranks,
                "slowdown": slowdown,
                "lost_s": lost_s,
                "num_steps": num_steps,
            },
        )

    def _take_divergence(self, frame: Frame) -> None:
        body = frame.body
        step = count(body, "step", MAX_STEP)
        loss, norm = by_name(number(body["loss"])), by_name(number(body["grad_norm"]))
        message = (
            f"the loss of step {step} is {loss} and the norm of its gradient {norm}: training "
            f"diverges, and train.on_divergence is {clean(str(body['then']))[:64]}"
        )
        said = f"{message} (attempt {self._attempt.attempt})"
        self._job.warnings = [{"code": "diverges", "message": said}]
        remark(
            self._session,
            self._job,
            type_="divergence",
            code="diverges",
            message=message,
            now=self._now,
            data={"step": step, "loss": loss, "grad_norm": norm},
        )

    def _take_error(self, frame: Frame) -> None:
        self._attempt.num_errors += 1
        if self._attempt.num_errors > MAX_ERRORS:
            return
        body = frame.body
        message = clean(str(body.get("message", "")))[:4096]
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


def _not_for_a_rank(frame: Frame) -> None:
    raise Refused(f"rank {frame.rank} told what only a supervisor does")


def metric_key(key: Any) -> str:
    if not isinstance(key, str) or not 0 < len(key) <= MAX_KEY_CHARS or not key.isprintable():
        raise Refused(f"not a metric's name: {key!r}")
    return key


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
