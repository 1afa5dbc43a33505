"""SQL for the export of jobs to MLflow."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any

from sqlalchemy import Row, func, insert, or_, select, update
from sqlalchemy.orm import Session

from dray.views import JobState
from service.db.models import JobAnnotationRow, JobRow, MlflowExportRow
from service.db.repositories import jobs as jobs_repository

LATE = 1000
"""Concurrent transactions on PostgreSQL commit in any order, so up to this many jobs with higher
numbers can become visible before a given job."""


def new_jobs(session: Session, limit: int) -> list[dict[str, Any]]:
    """Return the `job_id` and `number` of up to `limit` jobs that have no export yet, oldest
    first."""
    newest = session.scalar(select(func.max(MlflowExportRow.number))) or 0
    known = select(MlflowExportRow.job_id).where(MlflowExportRow.job_id == JobRow.id)
    found = (
        select(JobRow.id, JobRow.number)
        .where(JobRow.number > newest - LATE, JobRow.deleted_at.is_(None), ~known.exists())
        .order_by(JobRow.number)
        .limit(limit)
    )
    return [{"job_id": job_id, "number": number} for job_id, number in session.execute(found)]


def add(session: Session, jobs: Sequence[dict[str, Any]]) -> None:
    """Add rows for the jobs that `new_jobs` returned, except for jobs that have since been
    deleted."""
    existing = jobs_repository.existing(session, [job["job_id"] for job in jobs])
    rows = [job for job in jobs if job["job_id"] in existing]
    if rows:
        session.execute(insert(MlflowExportRow), rows)


def incomplete(session: Session, now: datetime) -> Sequence[Row[Any]]:
    """Return (id, event_seq, state, progress, revision of annotations) of the jobs to export,
    oldest first.

    Queued jobs, of which there can be many, are omitted unless they have a new event, tag or note.
    """
    row, written = MlflowExportRow, JobAnnotationRow
    query = (
        select(JobRow.id, JobRow.event_seq, JobRow.state, JobRow.progress, written.revision)
        .join(row, row.job_id == JobRow.id)
        .outerjoin(written, written.job_id == JobRow.id)
        .where(
            ~row.is_complete,
            or_(
                JobRow.state != JobState.QUEUED,
                JobRow.event_seq != row.event_seq,
                func.coalesce(written.revision, 0) != row.revision,
            ),
            JobRow.deleted_at.is_(None),
            or_(row.not_before.is_(None), row.not_before <= now),
        )
        .order_by(row.number)
    )
    return session.execute(query).all()


def get(session: Session, job_id: str, *, lock: bool = False) -> MlflowExportRow | None:
    return session.get(MlflowExportRow, job_id, with_for_update=lock)


def reopen(session: Session, job_id: str) -> None:
    """Mark a completely exported job so that it is exported again."""
    row = MlflowExportRow
    session.execute(update(row).where(row.job_id == job_id).values(is_complete=False))
