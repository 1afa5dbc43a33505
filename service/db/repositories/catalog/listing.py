"""SQL for pages of jobs.

Each index consists of the filtered column followed by the id, by which the list is ordered. If a
query contained several states or queues, the database would sort all matches instead of reading
them in the order of the index. Therefore, each state of each queue is queried separately, and the
results are merged.
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Sequence
from contextlib import nullcontext
from itertools import islice
from typing import Any, cast

from sqlalchemy import ColumnElement, Row, Select, select
from sqlalchemy.orm import Session, aliased

from dray.filters import BasicJobFilter, JobFilter
from dray.schedule_requests import SCHEDULE_ID
from dray.views import JobState
from service.db.models import JobLabelRow, JobRow, ScheduleRow
from service.db.repositories.catalog import search
from service.db.repositories.scheduling import queues as queues_repository
from service.domain.ids import ids_since, ids_up_to, last_id
from service.domain.scheduling.rules.tree import QueueTree
from service.domain.tracking.search_tree import SearchNode


def page(
    session: Session,
    wanted: JobFilter,
    *,
    where: SearchNode | None,
    before_id: str | None,
    limit: int,
) -> list[JobRow]:
    """Return jobs with ids below `before_id`, newest first.

    `created_after` is inclusive, and `created_before` is exclusive. `where` is the parsed
    expression of the filter.
    """
    queries = _queries(session, wanted, where, before_id, limit)
    with nullcontext() if where is None else search.limited(session):
        heads = [list(session.scalars(one)) for one in queries]
    return list(islice(heapq.merge(*heads, key=lambda row: row.id, reverse=True), limit))


def owners(
    session: Session, wanted: JobFilter, *, where: SearchNode | None, limit: int
) -> list[Row[str, str]]:
    """Return (id, owner) of the jobs that `page` lists."""
    queries = _queries(session, wanted, where, None, limit)
    with nullcontext() if where is None else search.limited(session):
        heads = [
            session.execute(one.with_only_columns(JobRow.id, JobRow.owner)).all() for one in queries
        ]
    return list(islice(heapq.merge(*heads, key=lambda row: row.id, reverse=True), limit))


def _queries(
    session: Session,
    wanted: JobFilter,
    where: SearchNode | None,
    before_id: str | None,
    limit: int,
) -> list[Select[JobRow]]:
    """Return the queries whose merged results are the first `limit` jobs of the list."""
    query, order = _labelled(wanted.labels)
    if where is None:
        query = query.where(JobRow.deleted_at.is_(None))
    else:
        query = query.where(_not_deleted(), search.condition(session, where))
    query = query.where(*conditions(session, wanted, JobRow), *_bounds(wanted, order))
    if before_id is not None:
        query = query.where(order < before_id)
    query = query.order_by(order.desc()).limit(limit)
    distinct = sorted(set(wanted.state))
    of_queues = [query.where(JobRow.queue == name) for name in queues_of(session, wanted)]
    queries = []
    for each in of_queues or [query]:
        alone = each.where(JobRow.array_id.is_(None)) if wanted.collapse_arrays else each
        queries += [alone.where(JobRow.state == state) for state in distinct] or [alone]
        if wanted.collapse_arrays:
            queries.append(_heads(each, distinct))
    return queries


def on_jobs(
    session: Session, wanted: JobFilter, where: SearchNode | None
) -> list[ColumnElement[bool]]:
    """Return the filter as conditions on `JobRow`, for lists in another order."""
    found = [_not_deleted(), *conditions(session, wanted, JobRow), *_bounds(wanted, JobRow.id)]
    if where is not None:
        found.append(search.condition(session, where))
    if wanted.queue is not None:
        found.append(JobRow.queue.in_(queues_of(session, wanted)))
    if wanted.state:
        found.append(JobRow.state.in_(wanted.state))
    for key, value in wanted.labels:
        label = aliased(JobLabelRow)
        same = (label.job_id == JobRow.id, label.key == key, label.value == value)
        found.append(select(label.job_id).where(*same).exists())
    return found


def _bounds(wanted: JobFilter, job_id: Any) -> list[ColumnElement[bool]]:
    """Return the conditions on ids and submission times. `job_id` is the column with the job's
    id."""
    found: list[ColumnElement[bool]] = []
    if wanted.id_prefix is not None:
        found += [job_id >= wanted.id_prefix, job_id <= last_id(wanted.id_prefix)]
    if (after := wanted.created_after) is not None:
        found += [job_id >= ids_since(after), JobRow.created_at >= after]
    if (before := wanted.created_before) is not None:
        found += [job_id < ids_up_to(before), JobRow.created_at < before]
    return found


def _not_deleted() -> ColumnElement[bool]:
    # Don't read `deleted_at` of every job found: it is the last column of a wide row, and reading
    # it is slow.
    return JobRow.id.not_in(select(JobRow.id).where(JobRow.deleted_at.is_not(None)))


def queues_of(session: Session, wanted: BasicJobFilter) -> list[str]:
    """Return the names of the filter's queue and of all queues under it; none if the filter has no
    queue."""
    if wanted.queue is None:
        return []
    return QueueTree(queues_repository.every(session)).under(wanted.queue)


def conditions(session: Session, wanted: BasicJobFilter, c: Any) -> list[ColumnElement[bool]]:
    """Return the filter's conditions on a job's columns, except for its id, state, queue and
    labels.

    `c` has the columns of `JobRow` that these conditions read.
    """
    given: list[tuple[Any, object]] = [
        (c.owner, wanted.owner),
        (c.project, wanted.project),
        (c.name, wanted.name),
        (c.array_index, wanted.array_index),
        (c.reservation, wanted.reservation),
    ]
    found = [column == value for column, value in given if value is not None]
    if wanted.name_glob is not None:
        found.append(_matches(session, c.name, wanted.name_glob))
    # Text in names is not indexed, so the database scans jobs until the page is full.
    if wanted.text is not None:
        found.append(c.name.icontains(wanted.text, autoescape=True))
    if wanted.array is not None:
        found += [c.array_id >= wanted.array, c.array_id <= last_id(wanted.array)]
    if wanted.schedule is not None:
        ids = [wanted.schedule]
        if not re.fullmatch(SCHEDULE_ID, wanted.schedule):
            named = select(ScheduleRow.id).where(ScheduleRow.name == wanted.schedule)
            ids = list(session.scalars(named))
        found.append(c.schedule_id.in_(ids))
    return found


def _matches(session: Session, name: Any, glob: str) -> ColumnElement[bool]:
    """Whether a job's name matches the pattern, case-sensitively."""
    if session.get_bind().dialect.name == "sqlite":  # its LIKE ignores case
        return cast("ColumnElement[bool]", name.op("GLOB")(glob.replace("[", "[[]")))
    like = re.sub(r"([%_\\])", r"\\\1", glob).replace("*", "%").replace("?", "_")
    return cast("ColumnElement[bool]", name.like(like, escape="\\"))


def _heads(query: Select[JobRow], states: Sequence[JobState]) -> Select[JobRow]:
    """Restrict the query to jobs that represent arrays in which at least one job is in one of the
    states."""
    query = query.where(JobRow.array_head.is_not(None))
    if not states:
        return query
    other = aliased(JobRow)
    in_state = select(other.id).where(
        other.array_id == JobRow.array_head, other.state.in_(states), other.deleted_at.is_(None)
    )
    return query.where(in_state.exists())


def _labelled(
    labels: Sequence[tuple[str, str]],
) -> tuple[Select[JobRow], ColumnElement[str]]:
    """Return a query for jobs with all these labels, and the job id column by which to order it.

    If there are labels, the column is in the table of labels, where it is part of the index.
    """
    query = select(JobRow)
    order: ColumnElement[str] = JobRow.id.expression
    for number, (key, value) in enumerate(labels):
        label = aliased(JobLabelRow)
        same = (label.job_id == JobRow.id, label.key == key, label.value == value)
        if number == 0:
            query = query.join(label, label.job_id == JobRow.id).where(*same[1:])
            order = label.job_id.expression
        else:
            query = query.where(select(label.job_id).where(*same).exists())
    return query, order
