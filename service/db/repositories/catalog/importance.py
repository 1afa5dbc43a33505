"""SQL for the runs from which the importance of parameters is estimated."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from sqlalchemy import Row, select
from sqlalchemy.orm import Session

from dray.views import JobState
from service.db.models import JobRow, TrialRow
from service.db.repositories.bulk import CHUNK, in_chunks
from service.db.repositories.catalog import search
from service.db.repositories.catalog.sort_stages import Chosen

RunOutcome = Row[str, JobState, str]
TrialValues = Row[str, JobState, str, dict[str, Any] | None, float | None]


def runs(session: Session, chosen: Chosen, limit: int) -> Sequence[RunOutcome]:
    """Return (id, state, code of the reason) of the newest jobs."""
    query = chosen.of(select(JobRow.id, JobRow.state, JobRow.reason_code), JobRow.id)
    with search.limited(session):
        return session.execute(query.order_by(JobRow.id.desc()).limit(limit)).all()


def trials(session: Session, array_id: str) -> Sequence[TrialValues]:
    """Return (id, state, code of the reason, parameters, value) of the trials of a sweep."""
    query = (
        select(JobRow.id, JobRow.state, JobRow.reason_code, TrialRow.parameters, TrialRow.value)
        .join_from(TrialRow, JobRow, TrialRow.job_id == JobRow.id)
        .where(TrialRow.array_id == array_id, JobRow.deleted_at.is_(None))
        .order_by(TrialRow.array_index)
    )
    return session.execute(query).all()


def documents(session: Session, job_ids: Collection[str]) -> dict[str, dict[str, Any]]:
    """Return the documents of these jobs, keyed by job id."""
    found: dict[str, dict[str, Any]] = {}
    for some in in_chunks(sorted(job_ids), CHUNK):
        query = select(JobRow.id, JobRow.spec).where(JobRow.id.in_(some))
        found.update((job_id, spec) for job_id, spec in session.execute(query))
    return found
