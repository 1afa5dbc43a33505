"""SQL for the jobs and models that were made from a job."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from sqlalchemy import Row, or_, select
from sqlalchemy.orm import Session

from service.db.models import DocumentValueRow, JobRow, ModelRow, ModelVersionRow

EDITED_FROM = "/origin/job"
"""Pointer of the job whose document was edited."""


def jobs(session: Session, job_ids: Collection[str]) -> dict[str, JobRow]:
    """Return the jobs that exist, keyed by id."""
    query = select(JobRow).where(JobRow.id.in_(job_ids), JobRow.deleted_at.is_(None))
    return {row.id: row for row in session.scalars(query)} if job_ids else {}


def made_from(session: Session, job_ids: Collection[str], limit: int) -> Sequence[JobRow]:
    """Return jobs that start from weights of these jobs, or whose documents are edited copies
    of their documents, oldest first."""
    value = DocumentValueRow
    # The jobs of an array share the values of their array.
    holders = (
        select(value.holder)
        .where(value.pointer == EDITED_FROM, value.text.in_(job_ids))
        .scalar_subquery()
    )
    query = (
        select(JobRow)
        .where(
            or_(
                JobRow.init_from_job.in_(job_ids),
                JobRow.id.in_(holders),
                JobRow.array_id.in_(holders),
            ),
            JobRow.deleted_at.is_(None),
        )
        .order_by(JobRow.number)
        .limit(limit)
    )
    return session.scalars(query).all()


def versions(
    session: Session, job_ids: Collection[str], limit: int
) -> Sequence[Row[str, int, str, int | None]]:
    """Return (model, version, job, step) of the versions that were registered from these jobs."""
    version = ModelVersionRow
    query = (
        select(ModelRow.name, version.version, version.job_id, version.step)
        .join(ModelRow, ModelRow.folded == version.folded)
        .where(version.job_id.in_(job_ids), ModelRow.deleted_at.is_(None))
        .order_by(ModelRow.folded, version.version)
        .limit(limit)
    )
    return session.execute(query).all()
