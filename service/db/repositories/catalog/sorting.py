"""SQL for pages of jobs in the order of a value.

An order consists of stages: first the jobs that have the value, then the jobs whose metric is NaN,
and then the jobs that don't have the value. Each stage is read in the order of an index, starting
at a position, until the page is full. In each stage, jobs with equal values are in the order of
their ids.

A filter that few jobs match would need a scan of nearly the whole index. Therefore, up to `FEW` ids
are selected first, and only if there are more, the filter is evaluated for each job of the index.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, assert_never

from sqlalchemy import ColumnElement, String, select, type_coerce
from sqlalchemy.orm import Session

from dray.filters import JobFilter
from service.db.models import JobCostRow, JobLabelRow, JobRow, MetricSummaryRow
from service.db.repositories.catalog import listing, search, sorted_documents
from service.db.repositories.catalog.sort_stages import Chosen, Ids, SortPosition, SortStage, Values
from service.domain.tracking.columns import Fact, ParameterField, Sort
from service.domain.tracking.search_tree import (
    DocumentField,
    JobColumn,
    LabelField,
    MetricField,
    SearchNode,
)

FEW = 2_000
"""Maximum number of ids that a statement lists."""


def choose(session: Session, wanted: JobFilter, where: SearchNode | None) -> Chosen:
    """Return the jobs that the filter selects."""
    is_filtered = any(
        getattr(wanted, name) != field.default for name, field in JobFilter.model_fields.items()
    )
    if is_filtered:
        found = listing.owners(session, wanted, where=where, limit=FEW + 1)
        if len(found) <= FEW:
            return Chosen([row.id for row in found])
    return Chosen(None, listing.on_jobs(session, wanted, where), is_filtered)


def page(
    session: Session,
    chosen: Chosen,
    sort: Sort,
    after: SortPosition | None,
    limit: int,
) -> list[SortPosition]:
    """Return the positions of up to `limit` jobs behind the position `after`."""
    found: list[SortPosition] = []
    with search.limited(session):
        for number, stage in enumerate(stages(sort)):
            if after is not None and number < after.stage:
                continue
            begin = after if after is not None and number == after.stage else None
            rows = stage.page(session, chosen, begin, limit - len(found))
            found += [SortPosition(number, value, job_id) for value, job_id in rows]
            if len(found) == limit:
                break
    return found


def stages(sort: Sort) -> Iterator[SortStage]:
    field, descending = sort.field, sort.descending
    match field:
        case JobColumn("id" | "created_at"):
            yield Values(JobRow.id, JobRow.id, descending)
        case JobColumn("state"):
            yield Values(JobRow.id, type_coerce(JobRow.state, String()), descending)
        case JobColumn("started_at" | "finished_at" as name):
            yield from _optional(JobRow.id, getattr(JobRow, name), descending)
        case JobColumn(name):
            yield Values(JobRow.id, getattr(JobRow, name), descending)
        case Fact("duration"):
            yield from _optional(JobRow.id, JobRow.ran_s, descending)
        case Fact("cost"):
            yield Values(JobCostRow.job_id, JobCostRow.total, descending)
            yield _without(JobCostRow, descending)
        case Fact():
            raise ValueError(f"jobs can't be sorted by {field.name}")
        case LabelField(key):
            has_key = JobLabelRow.key == key
            yield Values(JobLabelRow.job_id, JobLabelRow.value, descending, (has_key,))
            yield _without(JobLabelRow, descending, has_key)
        case MetricField(key, of):
            row, value = MetricSummaryRow, search.metric_value(of)
            has_key = row.key == key
            yield Values(row.job_id, value, descending, (has_key,))
            yield Ids(row.job_id, descending, (has_key, value.is_(None)))
            yield _without(row, descending, has_key)
        case DocumentField() | ParameterField():
            yield from sorted_documents.stages(field, descending)
        case _:
            assert_never(field)


def _optional(job_id: Any, value: Any, descending: bool) -> Iterator[SortStage]:
    yield Values(job_id, value, descending)
    yield Ids(job_id, descending, (value.is_(None),))


def _without(row: Any, descending: bool, *where: ColumnElement[bool]) -> Ids:
    has_row = select(row.job_id).where(row.job_id == JobRow.id, *where).exists()
    return Ids(JobRow.id, descending, (~has_row,))
