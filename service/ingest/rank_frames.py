"""Stores the reports of ranks: metrics, log lines, checkpoints, artifacts, errors.

`decoding` checks the form of a frame; this module also refuses URLs outside of the attempt's own
folder. `supervisor_frames` stores the frames of supervisors.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from typing import Any

from sqlalchemy.orm import Session

from ray_workers.shared.contracts import GUESSED, Frame, FrameKind
from ray_workers.shared.frame_fields import MAX_STEP, metric_key
from ray_workers.shared.frames import (
    ArtifactReport,
    CheckpointDroppedReport,
    CheckpointReport,
    DivergenceReport,
    ErrorReport,
    LogReport,
    MediaReport,
    MemoryCopiesReport,
    MetricsReport,
    NoMemoryCopiesReport,
    PackagesReport,
    ReplicasReport,
    ResumedReport,
    RoundReport,
    RoundTroubleReport,
    SamplesReport,
    SiloRoundReport,
    StragglersReport,
)
from ray_workers.shared.names import attempt_prefix
from service.db.models import ArtifactRow, AttemptRow, CheckpointRow, JobRow, TextSamplesRow
from service.db.repositories import attempts as attempts_repository
from service.db.repositories import events as events_repository
from service.db.repositories.catalog import packages
from service.db.repositories.telemetry import text_samples
from service.domain.ids import artifact_id
from service.domain.series import TIMES, Points
from service.ingest import (
    metric_columns,
    open_rounds,
    replica_checks,
    resume_reports,
    step_times,
)
from service.ingest.decoding import BadFrame, Refusals, decode, resumed_step, seconds_of, time_of
from service.ingest.media import MediaStore
from service.ingest.rank_progress import progress, progress_in
from service.lifecycle import node_checks
from service.lifecycle.transitions import remark
from service.storage.staged_files import Files
from service.storage.storage import check_file_name
from service.telemetry.chunk_columns import by_name
from service.telemetry.known_attempts import KnownAttempt
from service.telemetry.log_writer import LogLine, LogStore
from service.telemetry.metric_writer import MetricStore

MAX_PATH_CHARS = 1024
MAX_ERRORS = 8
"""Maximum number of events about errors of an attempt. If a thousand ranks fail, most of the errors
are the same."""
GRAD_NORM = "train/grad_norm"
DIVERGENCE = "divergence"
"""Type of the event."""


class RankFrames:
    """Stores the rank frames of one reply. Each instance serves one transaction."""

    def __init__(
        self,
        session: Session,
        storage: Files,
        job: JobRow,
        attempt: AttemptRow,
        now: datetime,
        known: KnownAttempt,
    ) -> None:
        """`known` contains cached facts about the attempt, and is kept up to date."""
        self._session = session
        self._storage = storage
        self._job = job
        self._attempt = attempt
        self._now = now
        self._logs = LogStore(session, storage, job, attempt, now, known)
        self._metrics = MetricStore(session, job, attempt, now, known)
        self._media = MediaStore(session, storage, job, attempt, now)
        self._known_keys: set[str] = set()
        self._awaited_step = resume_reports.awaited_step(attempt)
        self._progress: dict[str, Any] = dict(job.progress or {})
        self._reached: tuple[int, Frame] | None = None
        """The newest step of rank 0, and the frame that reported it."""
        self._watches_script = job.spec.get("script") is not None
        self._batch: dict[str, float] = {}
        """The newest values of `step_times.OF_BATCH` that rank 0 reported."""

    def take(self, frames: Sequence[Frame]) -> Mapping[tuple[str, int], Points]:
        """Store the frames, and return the stored points by metric and rank."""
        refusals = Refusals()
        # Put the frames of a replacement after the frames of the process that it replaced.
        in_order = sorted(frames, key=lambda frame: frame.incarnation)
        for run in metric_columns.runs(in_order):
            if run[0].kind == FrameKind.METRICS and self._take_run(run):
                continue
            for frame in run:
                refusals.guard(frame, self._take)
        if self._reached is not None:
            step, frame = self._reached
            at = time_of(frame, self._now)
            self._job.progress = progress(self._job, self._attempt, self._progress, step, at)
            times = step_times.noted(self._job, self._attempt, self._progress, self._batch)
            if times is not None:
                self._job.step_times = times
        self._media.close()
        stored = self._metrics.store()
        self._logs.store()
        refusals.add_event(self._session, self._job, self._now)
        return stored

    def _take_run(self, frames: Sequence[Frame]) -> bool:
        """Store frames of the same form together. If one of the frames is unusual, store nothing
        and return False."""
        run = metric_columns.run_of(frames, MAX_STEP)
        if run is None or not all(map(self._may_name, run.columns)):
            return False
        lowest, rank = min(run.steps), frames[0].rank
        is_guess = _are_guesses(run.columns)
        if not is_guess:
            lowest_at = run.steps.index(lowest)
            self._saw_step(lowest, frames[lowest_at], first=frames[0], is_found=run.is_found)
        if rank == 0 and not is_guess:
            self._reach(run.steps[-1], frames[-1], run.progress)
            batch = {key: run.columns[key][-1] for key in step_times.OF_BATCH if key in run.columns}
            self._batch.update(batch)
            self._complete_receipt(run.steps, run.columns.get(resume_reports.LOSS))
            self._check_script(run.steps, run.columns)
            self._note_times(run.steps, frames)
        repeats = self._may_repeat(frames[0])
        for key, values in run.columns.items():
            self._metrics.extend(key, rank, run.steps, values, repeats=repeats)
        return True

    def _may_name(self, key: str) -> bool:
        try:
            return key in self._known_keys or bool(self._new_key(key))
        except ValueError:
            return False

    def _take(self, frame: Frame) -> None:
        if frame.kind is FrameKind.RESUMED:
            if self._attempt.resume_step is not None:
                return
            self._attempt.resume_step = resumed_step(frame)
        match decode(frame):
            case ResumedReport() as report:
                self._attempt.receipt = resume_reports.of_report(report)
                self._awaited_step = resume_reports.awaited_step(self._attempt)
            case MetricsReport() as report:
                self._take_metrics(report, frame)
            case LogReport() as report:
                seconds = seconds_of(frame, self._now)
                line = LogLine(frame.rank, frame.incarnation, report.line, seconds, report.text)
                self._logs.add(line)
            case CheckpointReport() as report:
                self._take_checkpoint(report, time_of(frame, self._now))
            case CheckpointDroppedReport() as report:
                attempts_repository.drop_checkpoint(self._session, self._job.id, report.url)
            case ArtifactReport() as report:
                self._take_artifact(report, time_of(frame, self._now))
            case StragglersReport() as report:
                self._take_stragglers(report)
            case DivergenceReport() as report:
                self._take_divergence(report)
            case ReplicasReport() as report:
                replica_checks.take(self._session, self._job, self._attempt, report, self._now)
            case MemoryCopiesReport() as report:
                self._job.memory_copies = report.body()
            case NoMemoryCopiesReport() as report:
                self._job.memory_copies = None
                self._remark("no_memory_copies", "no_memory_copies", report.message, {})
            case SamplesReport() as report:
                self._take_samples(report, time_of(frame, self._now))
            case PackagesReport() as report:
                packages.put(self._session, self._job.id, report.packages)
            case MediaReport() as report:
                self._media.take(report, frame.rank, time_of(frame, self._now))
            case RoundReport() | RoundTroubleReport() | SiloRoundReport() as report:
                self._take_round(report, time_of(frame, self._now))
            case ErrorReport() as report:
                self._take_error(report, frame.rank)
            case _:
                raise BadFrame(f"rank {frame.rank} sent a report that only supervisors may send")

    def _take_round(
        self, report: RoundReport | RoundTroubleReport | SiloRoundReport, at: datetime
    ) -> None:
        match report:
            case RoundReport():
                open_rounds.store(self._session, self._job, self._attempt, report, at)
            case RoundTroubleReport():
                code = "clients_left_out" if report.left_out else "round_broken"
                data = {"round": report.number, "clients": list(report.left_out)}
                self._remark(code, code, report.message, data)
            case SiloRoundReport():
                open_rounds.store_of_silos(self._job, self._attempt, report, at)

    def _take_metrics(self, report: MetricsReport, frame: Frame) -> None:
        self._known_keys.update(report.values)
        is_guess = _are_guesses(report.values)
        if frame.rank == 0 and not is_guess:
            self._reach(report.step, frame, progress_in(report))
            values = report.values
            self._batch.update({k: values[k] for k in step_times.OF_BATCH if k in values})
            loss = report.values.get(resume_reports.LOSS)
            self._complete_receipt([report.step], None if loss is None else [loss])
            self._check_script([report.step], {key: [v] for key, v in report.values.items()})
            self._note_times([report.step], [frame])
        if not is_guess:
            self._saw_step(report.step, frame, first=frame, is_found=report.found)
        repeats = self._may_repeat(frame)
        for key, value in report.values.items():
            self._metrics.extend(key, frame.rank, (report.step,), (value,), repeats=repeats)

    def _reach(self, step: int, frame: Frame, reported: Mapping[str, Any]) -> None:
        """Record a step of rank 0. A step that is repeated after a recovery changes nothing."""
        if step >= (self._attempt.last_metric_step or 0):
            self._progress.update(reported)
            self._reached = step, frame
            self._attempt.last_metric_step = step

    def _complete_receipt(self, steps: Sequence[int], losses: Sequence[float] | None) -> None:
        """Add the loss to the receipt of the resume if these steps include the first step after
        it."""
        awaited = self._awaited_step
        if awaited is not None and losses is not None and awaited in steps:
            loss = losses[steps.index(awaited)]
            resume_reports.complete(self._session, self._job, self._attempt, loss, self._now)
            self._awaited_step = None

    def _note_times(self, steps: Sequence[int], frames: Sequence[Frame]) -> None:
        """Store the times at which rank 0 reported these steps. Rank 0 can report a step several
        times with different metrics; the time of its first report is stored."""
        times = [seconds_of(frame, self._now) for frame in frames]
        self._metrics.extend(TIMES, 0, steps, times, repeats=True)

    def _may_repeat(self, frame: Frame) -> bool:
        """Whether an earlier process may already have reported the frame's steps."""
        return frame.incarnation > 0 or self._attempt.generation > 0

    def _saw_step(self, step: int, frame: Frame, *, first: Frame, is_found: bool) -> None:
        """Update the attempt's first step. `step` is the lowest of several reported steps, `frame`
        is the frame that reported it, and `first` is the earliest frame that reported any of the
        steps."""
        known = self._attempt.first_metric_step
        if is_found:
            # This series has just begun, but other series, such as the series of an earlier fold,
            # may be complete.
            if self._attempt.first_metric_at is None:
                self._attempt.first_metric_at = time_of(first, self._now)
        elif known is None or step < known:
            self._attempt.first_metric_step = step
            self._attempt.first_metric_at = time_of(frame, self._now)
        if self._job.first_step_at is None:
            self._job.first_step_at = time_of(first, self._now)

    def _new_key(self, key: str) -> str:
        """Check a metric name that is new in this reply."""
        name = metric_key(key)
        self._known_keys.add(name)
        return name

    def _take_checkpoint(self, report: CheckpointReport, at: datetime) -> None:
        attempts_repository.put_checkpoint(
            self._session,
            CheckpointRow(
                job_id=self._job.id,
                attempt=self._attempt.attempt,
                step=report.step,
                url=self._own_url(report.url),
                size_bytes=report.size_bytes,
                manifest_sha256=report.manifest_sha256,
                metrics={key: by_name(value) for key, value in report.metrics.items()},
                created_at=at,
            ),
        )

    def _take_artifact(self, report: ArtifactReport, at: datetime) -> None:
        path = check_file_name(report.path)
        if len(path) > MAX_PATH_CHARS:
            raise BadFrame(f"path is longer than {MAX_PATH_CHARS} characters")
        attempts_repository.put_artifact(
            self._session,
            ArtifactRow(
                job_id=self._job.id,
                id=artifact_id(self._job.id, path),
                attempt=self._attempt.attempt,
                path=path,
                url=self._own_url(report.url),
                size_bytes=report.size_bytes,
                sha256=report.sha256,
                created_at=at,
            ),
        )

    def _take_samples(self, report: SamplesReport, at: datetime) -> None:
        row = TextSamplesRow(
            job_id=self._job.id,
            attempt=self._attempt.attempt,
            step=report.step,
            texts=list(report.texts),
            created_at=at,
        )
        text_samples.put(self._session, row)

    def _take_stragglers(self, report: StragglersReport) -> None:
        session, job, attempt = self._session, self._job, self._attempt
        hosts = node_checks.hosts_of_ranks(session, job, attempt, report.ranks)
        if report.ranks:
            slowdown = report.slowdown
            on = {rank: f" on {hostname}" for rank, hostname in hosts.items()}
            named = ", ".join(
                f"rank {rank}{on.get(rank, '')} by a factor of {slowdown[str(rank)]:.1f}"
                for rank in report.ranks
            )
            message = (
                f"slower than the other ranks: {named}; the other ranks waited {report.lost_s:.2f} "
                f"s in the last {report.num_steps} steps"
            )
        else:
            message = "no rank is slower than the other ranks any longer"
        named_hosts = {str(rank): hostname for rank, hostname in hosts.items()}
        data = {**report.body(), "hostnames": named_hosts}
        self._remark("stragglers", "stragglers", message, data)

    def _take_divergence(self, report: DivergenceReport) -> None:
        loss = by_name(report.loss)
        if report.grad_norm is None:
            found = f"val/loss after step {report.step} is {loss}"
            data = {"step": report.step, "val_loss": loss}
        else:
            norm = by_name(report.grad_norm)
            found = f"the loss of step {report.step} is {loss} and its gradient norm is {norm}"
            data = {"step": report.step, "loss": loss, "grad_norm": norm}
        self._warn(f"{found}: training diverges, and train.on_divergence is {report.then}", data)

    def _check_script(self, steps: Sequence[int], columns: Mapping[str, Sequence[float]]) -> None:
        """Warn about a script's first loss or gradient norm that is not finite. Unlike recipes,
        scripts do not report a divergence themselves."""
        if not self._watches_script:
            return
        watched = {key: columns[key] for key in (resume_reports.LOSS, GRAD_NORM) if key in columns}
        found = {key: at for key, of in watched.items() if (at := _first_bad(of)) is not None}
        if not found:
            return
        self._watches_script = False
        attempt = self._attempt.attempt
        if events_repository.has_event(self._session, self._job.id, DIVERGENCE, attempt):
            return
        key = min(found, key=found.__getitem__)
        at = found[key]
        message = f"{key} of step {steps[at]} is {by_name(watched[key][at])}: training diverges"
        shown = {name.split("/")[1]: by_name(of[at]) for name, of in watched.items()}
        self._warn(f"{message}, and the script continues", {"step": steps[at], **shown})

    def _warn(self, message: str, data: dict[str, Any]) -> None:
        """Add an event about a divergence, and a warning, to the job."""
        warning = f"{message} (attempt {self._attempt.attempt})"
        self._job.warnings = [{"code": "diverges", "message": warning}]
        self._remark(DIVERGENCE, "diverges", message, data)

    def _take_error(self, report: ErrorReport, rank: int) -> None:
        self._attempt.num_errors += 1
        if self._attempt.num_errors > MAX_ERRORS:
            return
        message = f"rank {rank}: {report.message}"
        data = {"rank": rank, "traceback": report.traceback}
        self._remark("error", report.cause, message, data)

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

    def _own_url(self, url: str) -> str:
        """Return the URL. Raises BadFrame if the URL is outside the attempt's folder, because users
        can download the file."""
        key = self._storage.key_of(url)
        prefix = attempt_prefix(self._job.id, self._attempt.attempt)
        if not key.startswith(f"{prefix}/"):
            raise BadFrame(f"{url!r} is outside of the attempt's folder")
        return url


def _first_bad(values: Sequence[float]) -> int | None:
    """Return the index of the first number that is not finite, or None."""
    if math.isfinite(sum(values)):  # the usual case, in which all values are finite
        return None
    return next((n for n, value in enumerate(values) if not math.isfinite(value)), None)


def _are_guesses(names: Collection[str]) -> bool:
    """Whether a report contains only guessed metrics, whose steps are not the job's progress."""
    return bool(names) and all(name.startswith(GUESSED) for name in names)
