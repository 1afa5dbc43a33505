"""SQL for groups of jobs."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from datetime import datetime

from sqlalchemy import Row, and_, select
from sqlalchemy.orm import Session

from service.db.models import JobLabelRow, JobRow, MetricSummaryRow, SweepRow
from service.db.repositories.bulk import CHUNK, in_chunks
from service.db.repositories.catalog import search, sorted_documents, sorting
from service.db.repositories.catalog.sort_stages import AnySelect, Chosen, Values
from service.domain.states import UNFINISHED
from service.domain.tracking.columns import Field, ParameterField, Sort
from service.domain.tracking.search_tree import DocumentField, JobColumn, LabelField, MetricField

GroupedBy = LabelField | JobColumn | None
"""A label or a column of the job; None for the sweep."""


def keys(
    session: Session, chosen: Chosen, by: GroupedBy, limit: int
) -> Sequence[Row[str, str | None]]:
    """Return (id, key of the group) of the newest jobs. The key is None for a job that is in no
    group."""
    query: AnySelect
    match by:
        case None:
            query = select(JobRow.id, SweepRow.array_id)
            query = query.outerjoin(SweepRow, SweepRow.array_id == JobRow.array_id)
        case LabelField(key):
            label = JobLabelRow
            query = select(JobRow.id, label.value)
            query = query.outerjoin(label, and_(label.job_id == JobRow.id, label.key == key))
        case JobColumn(name):
            query = select(JobRow.id, getattr(JobRow, name))
    ordered = chosen.of(query, JobRow.id).order_by(JobRow.id.desc())
    with search.limited(session):
        return session.execute(ordered.limit(limit)).all()


def numbers(session: Session, field: Field, job_ids: Collection[str]) -> dict[str, float]:
    """Return the value of the field for each of these jobs, keyed by job id. Jobs whose value is
    not a number are omitted."""
    if isinstance(field, DocumentField | ParameterField):
        found = sorted_documents.values(session, field, sorted(job_ids))
        return {
            job_id: value.number
            for job_id, value in found.items()
            if value.text is None and value.number is not None
        }
    stage = next(sorting.stages(Sort(field)))
    assert isinstance(stage, Values)
    query = select(stage.job_id, stage.value).where(*stage.where, stage.value.is_not(None))
    if len(job_ids) <= sorting.FEW:
        query = query.where(stage.job_id.in_(sorted(job_ids)))
    wanted = set(job_ids)
    with search.limited(session):
        rows = session.execute(query)
        return {job_id: number for job_id, number in rows if job_id in wanted}


def times_of_live_jobs(session: Session, field: Field) -> dict[str, datetime]:
    """Return the times up to which the field's values cover the points of jobs that have not ended,
    keyed by job id."""
    if not isinstance(field, MetricField):
        return {}
    row = MetricSummaryRow
    query = select(row.job_id, row.as_of).join(JobRow, JobRow.id == row.job_id)
    query = query.where(row.key == field.key, JobRow.state.in_(UNFINISHED))
    return {job_id: as_of for job_id, as_of in session.execute(query) if as_of is not None}


def names_of_arrays(session: Session, array_ids: Collection[str]) -> dict[str, str]:
    """Return the names of the arrays' jobs, keyed by array id."""
    found: dict[str, str] = {}
    for some in in_chunks(sorted(array_ids), CHUNK):
        query = select(JobRow.array_head, JobRow.name).where(JobRow.array_head.in_(some))
        found.update((array_id or "", name) for array_id, name in session.execute(query))
    return found
