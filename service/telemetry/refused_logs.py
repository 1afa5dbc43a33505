"""Chunks of logs that the storage refuses, for example because a job has damaged its folder in the
storage.

These chunks are closed but remain in SQL until the storage accepts them. If a job's refused chunks
exceed `MAX_BYTES`, the oldest chunks are dropped. The number of bytes dropped from each rank's log
is reported by a line in that log and by an event at the end of the attempt.
"""

from __future__ import annotations

import json
from datetime import datetime

from sqlalchemy.orm import Session

from service.db.models import JobRow, LogChunkRow
from service.db.repositories import events as events_repository
from service.db.repositories import jobs as jobs_repository
from service.db.repositories.telemetry import chunks as repository
from service.db.session import touch
from service.domain.errors import StorageUnavailable
from service.lifecycle.transitions import remark
from service.storage.staged_files import StagedFiles
from service.telemetry.log_lines import chunk_key, encode_line

MAX_BYTES = 4 << 20
"""Maximum size of a job's refused chunks in SQL."""
MOVED_AT_ONCE = 16
"""Maximum number of chunks that one transaction moves."""
REFUSED, DROPPED = "log_refused", "log_dropped"
"""Types of the events."""


def bound(session: Session, job: JobRow, refusal: StorageUnavailable, now: datetime) -> None:
    """Report once per attempt that its log is refused, and drop the oldest chunks that exceed the
    limit."""
    if not events_repository.has_event(session, job.id, REFUSED, job.attempt):
        message = (
            f"{refusal.message}; the service keeps the newest {MAX_BYTES} bytes of the log's "
            "completed parts until the storage accepts them"
        )
        remark(session, job, type_=REFUSED, code=REFUSED, message=message, now=now)
    chunks = repository.refused_log_chunks(session, job.id)
    kept = [chunk for chunk in chunks if chunk.dropped_bytes is None]
    notes = {_end(chunk): chunk for chunk in chunks if chunk.dropped_bytes is not None}
    surplus = sum(chunk.size_bytes for chunk in kept) - MAX_BYTES
    for chunk in kept:
        if surplus <= 0:
            return
        surplus -= chunk.size_bytes
        job.log_lines_dropped += chunk.num_lines
        before = notes.pop((chunk.attempt, chunk.rank, chunk.first_line), None)
        _drop(chunk, 0 if before is None else before.dropped_bytes or 0)
        if before is not None:
            session.delete(before)
        notes[_end(chunk)] = chunk


def _end(chunk: LogChunkRow) -> tuple[int, int, int]:
    """Return the position where the next chunk of the log begins."""
    return chunk.attempt, chunk.rank, chunk.first_line + chunk.num_lines


def _drop(chunk: LogChunkRow, dropped_before: int) -> None:
    """Replace the chunk's lines with a note about the bytes that were dropped from this chunk and
    from earlier chunks."""
    assert chunk.text is not None
    seconds = json.loads(chunk.text[: chunk.text.index("\n")])[0]
    chunk.dropped_bytes = dropped_before + chunk.size_bytes
    note = (
        f"[dray] {chunk.dropped_bytes} bytes of this log were dropped here: the storage refused "
        "them, and the service's own limit was reached"
    )
    chunk.first_line, chunk.num_lines = chunk.first_line + chunk.num_lines - 1, 1
    chunk.text = encode_line(seconds, note)
    chunk.size_bytes = len(chunk.text.encode())


def report_dropped(session: Session, job: JobRow, now: datetime) -> None:
    """Add an event about dropped parts of the job's logs, at the end of an attempt."""
    if not job.log_lines_dropped:
        return
    dropped = repository.dropped_log_bytes(session, job.id)
    if not dropped:
        return
    ranks = sorted(dropped)
    shown = ", ".join(f"{dropped[rank]} bytes of rank {rank}" for rank in ranks[:8])
    more = " and of more ranks" if len(ranks) > 8 else ""
    message = f"the log is missing {shown}{more}, because the storage refused to store them"
    data = {"bytes": {str(rank): dropped[rank] for rank in ranks}}
    remark(session, job, type_=DROPPED, code=DROPPED, message=message, now=now, data=data)


def store(session: Session, files: StagedFiles, job_id: str) -> int:
    """Move some of the job's refused chunks to the storage, and return their number; 0 if there are
    no more. Raises FilesMissing until the files have been written, and StorageUnavailable if the
    storage still refuses them."""
    job = jobs_repository.lock(session, job_id)
    if job is None or job.deleted_at is not None:
        return 0
    touch(session, job_id)
    chunks = repository.refused_log_chunks(session, job_id)[:MOVED_AT_ONCE]
    for chunk in chunks:
        key = chunk_key(chunk)
        files.write_bytes(key, (chunk.text or "").encode())
        chunk.text, chunk.storage_key, chunk.refused_at = None, key, None
    files.check()
    return len(chunks)
