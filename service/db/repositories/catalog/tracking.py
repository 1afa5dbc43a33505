"""SQL for tags and notes of jobs."""

from __future__ import annotations

from collections.abc import Collection
from datetime import datetime

from sqlalchemy import delete, select
from sqlalchemy.orm import Session

from service.db.models import JobAnnotationRow, JobTagRow
from service.db.repositories.bulk import CHUNK, in_chunks


def annotation(session: Session, job_id: str) -> JobAnnotationRow | None:
    return session.get(JobAnnotationRow, job_id)


def notes_of(session: Session, job_ids: Collection[str]) -> dict[str, str]:
    """Return the notes of these jobs, keyed by job id. Jobs whose tags and notes were never changed
    are omitted."""
    row = JobAnnotationRow
    found: dict[str, str] = {}
    for some in in_chunks(sorted(job_ids), CHUNK):
        query = select(row.job_id, row.notes).where(row.job_id.in_(some))
        found.update((job_id, notes) for job_id, notes in session.execute(query))
    return found


def annotate(session: Session, job_id: str, notes: str, now: datetime, by: str) -> None:
    """Store the notes as the next revision. The caller must have locked the job's row."""
    row = annotation(session, job_id)
    if row is None:
        row = JobAnnotationRow(job_id=job_id, revision=0)
        session.add(row)
    row.notes, row.updated_at, row.updated_by = notes, now, by
    row.revision += 1
    session.flush()


def set_tags(session: Session, job_id: str, tags: Collection[str]) -> None:
    session.execute(delete(JobTagRow).where(JobTagRow.job_id == job_id))
    session.add_all(JobTagRow(job_id=job_id, tag=tag) for tag in sorted(tags))
    session.flush()
