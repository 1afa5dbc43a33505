"""SQL for fine-tuning jobs that were created with OpenAI's protocol."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from sqlalchemy import Select, case, delete, select
from sqlalchemy.orm import Session

from dray.views import JobState
from service.db.models import JobRow, TuningKeyRow, TuningRequestRow
from service.db.repositories.bulk import insert_of


def insert(session: Session, job_id: str, owner: str, request: dict[str, Any]) -> None:
    session.add(TuningRequestRow(job_id=job_id, owner=owner, request=request))


def key_of(
    session: Session,
    owner: str,
    fingerprint: str,
    new_key: str,
    now: datetime,
    since: datetime | None,
) -> str:
    """Return the key of the owner's newest request with this body, if there is such a request and
    it is not older than `since`. Otherwise, or if `since` is None, store and return `new_key`."""
    insert = insert_of(session)(TuningKeyRow).values(
        owner=owner, fingerprint=fingerprint, key=new_key, used_at=now
    )
    key = insert.excluded.key
    if since is not None:
        key = case((TuningKeyRow.used_at < since, key), else_=TuningKeyRow.key)
    return str(
        session.scalar(
            insert.on_conflict_do_update(
                index_elements=["owner", "fingerprint"], set_={"key": key, "used_at": now}
            ).returning(TuningKeyRow.key)
        )
    )


def forget_keys(session: Session, before: datetime) -> None:
    """Delete the keys of requests that are older than `before`."""
    session.execute(delete(TuningKeyRow).where(TuningKeyRow.used_at < before))


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
