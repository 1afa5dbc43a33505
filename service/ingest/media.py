"""Stores the media that ranks report, within the limits of a job.

The first value that an attempt reports for a step is kept, and replaces the values that earlier
attempts reported from this step on. Values beyond the limits, and files that the storage refuses,
are left out and counted; an event states the first reason.
"""

from __future__ import annotations

from datetime import datetime

from sqlalchemy.orm import Session

from dray import views
from dray.media.kinds import MAX_JOB_BYTES, MAX_RECORDS, MAX_SERIES
from ray_workers.shared.frames import MediaReport
from service.checkpoints.catalog import began_at_step
from service.db.models import AttemptRow, JobRow, MediaFileRow, MediaRow
from service.db.repositories import events as events_repository
from service.db.repositories.telemetry import media as repository
from service.domain.errors import StorageUnavailable
from service.ingest.media_checks import CheckedMedia, checked
from service.lifecycle.transitions import remark
from service.storage.staged_files import Files

LEFT_OUT = "media_left_out"
"""Type of the event."""


def storage_key(job_id: str, sha256: str) -> str:
    """Return the storage key of a file. It is outside of the folders of the attempts, to which
    ranks write."""
    return f"jobs/{job_id}/media/{sha256}"


class MediaStore:
    """Stores the media of one reply. The job must be locked."""

    def __init__(
        self, session: Session, storage: Files, job: JobRow, attempt: AttemptRow, now: datetime
    ) -> None:
        self._session = session
        self._storage = storage
        self._job = job
        self._attempt = attempt
        self._now = now
        self._began = began_at_step(attempt)
        self._refusal: str | None = None
        """Why the storage refused a file of this reply. No further files are written then, because
        each of them could take as long as the first."""

    def take(self, report: MediaReport, rank: int, at: datetime) -> None:
        """Store a value. Raises ValueError if it is malformed."""
        session, job_id, attempt = self._session, self._job.id, self._attempt.attempt
        totals = repository.totals(session, job_id)
        totals.num_left_out += report.left_out
        found = checked(report.kind, report.value, report.file)
        series = (rank, report.kind.value, report.key)
        if repository.attempt_at(session, job_id, series, report.step) == attempt:
            return
        why = self._why_not(series, found) or self._store_file(found.file, report.file)
        if why is not None:
            totals.num_left_out += 1
            self._remark_once(f"the {report.kind} {report.key!r} of step {report.step}", why)
            return
        if attempt > 1:
            totals.num_records -= repository.drop_repeated(
                session, job_id, attempt, report.step, series
            )
        totals.num_series += not repository.has_series(session, job_id, series)
        totals.num_records += 1
        totals.num_bytes += found.num_bytes
        row = MediaRow(
            job_id=job_id,
            rank=rank,
            kind=series[1],
            key=report.key,
            step=report.step,
            attempt=attempt,
            value=found.value,
            created_at=at,
        )
        repository.add(session, row)

    def close(self) -> None:
        """If the reply showed the step at which this attempt began, delete the later records of
        earlier attempts."""
        began = began_at_step(self._attempt)
        if self._attempt.attempt == 1 or began is None or began == self._began:
            return
        totals = repository.seen_totals(self._session, self._job.id)
        if totals is not None:
            totals.num_records -= repository.drop_repeated(
                self._session, self._job.id, self._attempt.attempt, began + 1
            )

    def _why_not(self, series: repository.Series, found: CheckedMedia) -> str | None:
        """Return the limit that the record would exceed, if any."""
        session, job_id = self._session, self._job.id
        totals = repository.totals(session, job_id)
        size = found.num_bytes
        if found.file is not None and not repository.file(session, job_id, found.file.sha256):
            size += found.file.size_bytes
        if totals.num_records >= MAX_RECORDS:
            return f"a job can have {MAX_RECORDS:,} records"
        if totals.num_bytes + size > MAX_JOB_BYTES:
            return f"the media of a job can have {MAX_JOB_BYTES >> 20} MiB"
        if totals.num_series >= MAX_SERIES and not repository.has_series(session, job_id, series):
            return f"a job can have {MAX_SERIES} different series"
        return None

    def _store_file(self, file: views.MediaFile | None, content: bytes | None) -> str | None:
        """Store a file, unless the job has it. Return the reason if the storage refuses it."""
        session, job_id = self._session, self._job.id
        if file is None or repository.file(session, job_id, file.sha256) is not None:
            return None
        assert content is not None
        if self._refusal is not None:
            return self._refusal
        try:
            self._storage.write_bytes(storage_key(job_id, file.sha256), content)
        except StorageUnavailable as error:
            self._refusal = error.message
            return self._refusal
        row = MediaFileRow(
            job_id=job_id,
            sha256=file.sha256,
            size_bytes=file.size_bytes,
            media_type=file.media_type,
        )
        repository.add_file(session, row)
        repository.totals(session, job_id).num_bytes += file.size_bytes
        return None

    def _remark_once(self, what: str, why: str) -> None:
        session, job = self._session, self._job
        if events_repository.has_event(session, job.id, LEFT_OUT):
            return
        message = f"{what} was not stored: {why}; later media that can't be stored are only counted"
        remark(session, job, type_=LEFT_OUT, code=LEFT_OUT, message=message, now=self._now)
