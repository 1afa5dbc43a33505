"""SQL for fine-tuning jobs that were created with OpenAI's protocol."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Select, select
from sqlalchemy.orm import Session

from dray.views import JobState
from service.db.models import JobRow, TuningRequestRow


def insert(session: Session, job_id: str, owner: str, request: dict[str, Any]) -> None:
    session.add(TuningRequestRow(job_id=job_id, owner=owner, request=request))


def get(session: Session, job_id: str) -> dict[str, Any] | None:
    return session.scalar(select(TuningRequestRow.request).where(TuningRequestRow.job_id == job_id))


def page(
    session: Session, owner: str, after: str | None, limit: int
) -> list[tuple[JobRow, dict[str, Any]]]:
    """Return the owner's jobs that are older than the job `after`, newest first, with their
    requests."""
    query = _of_owner(owner)
    if after is not None:
        query = query.where(TuningRequestRow.job_id < after)
    return _pairs(session, query, limit)


def succeeded(session: Session, owner: str, limit: int) -> list[tuple[JobRow, dict[str, Any]]]:
    """Return the owner's jobs that have fine-tuned a model, newest first, with their requests."""
    return _pairs(session, _of_owner(owner).where(JobRow.state == JobState.SUCCEEDED), limit)


def _of_owner(owner: str) -> Select[JobRow, dict[str, Any]]:
    return (
        select(JobRow, TuningRequestRow.request)
        .join(TuningRequestRow, TuningRequestRow.job_id == JobRow.id)
        .where(TuningRequestRow.owner == owner, JobRow.deleted_at.is_(None))
    )


def _pairs(
    session: Session, query: Select[JobRow, dict[str, Any]], limit: int
) -> list[tuple[JobRow, dict[str, Any]]]:
    newest = query.order_by(TuningRequestRow.job_id.desc()).limit(limit)
    return [(row, request) for row, request in session.execute(newest)]
