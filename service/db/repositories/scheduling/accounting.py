"""SQL for accounting: attempts that overlap a period, in the order of job id and attempt number.

The attempts of existing jobs, and the copies of deleted jobs' attempts, are in two tables with the
same key. Both tables have an index of the key and the times, so that the attempts of other periods
are skipped without reading their rows.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import (
    ColumnElement,
    Row,
    Select,
    delete,
    false,
    func,
    literal,
    select,
    true,
    tuple_,
)
from sqlalchemy.orm import Session

from dray.filters import BasicJobFilter
from service.db.models import AttemptCostRow, AttemptRow, DeletedAttemptRow, JobLabelRow, JobRow
from service.db.repositories.bulk import insert_of
from service.db.repositories.catalog.labels import labels_as_json
from service.db.repositories.catalog.listing import conditions, queues_of

_OF_JOB = (
    *("owner", "project", "name", "array_id", "array_index", "state", "max_runtime_s"),
    *("schedule_id", "reservation", "submitted_at", "labels"),
)
_OF_ATTEMPT = (
    *("job_id", "attempt", "queue", "slices", "bundle", "roles"),
    *("eligible_at", "created_at", "started_at", "finished_at", "held", "held_until", "sizes"),
    *("world_size", "reason_code", "exit_code"),
)
_STORED = (*_OF_ATTEMPT, *_OF_JOB)
"""The columns of `DeletedAttemptRow`."""
_OF_COST = ("currency", "total", "useful", "unreported")
MAX_ATTEMPT = 2**31
"""No attempt has a higher number."""


@dataclass(frozen=True)
class Period:
    """The period between two times."""

    since: datetime
    until: datetime


def page(
    session: Session,
    wanted: BasicJobFilter,
    period: Period,
    *,
    after: tuple[str, int],
    limit: int,
) -> list[Row[Any]]:
    """Return the columns `_STORED`, `_OF_COST`, `cost_since`, `cost_until`, `cost_sizes` and
    `is_deleted` of the first attempts after the attempt `after`, given as (job, number)."""
    queries = [query.limit(limit) for query in _attempts(session, wanted, period, after)]
    return _merged(session, queries)[:limit]


def of_jobs(
    session: Session,
    wanted: BasicJobFilter,
    period: Period,
    *,
    after: tuple[str, int],
    limit: int,
) -> list[Row[Any]]:
    """Return the columns that `page` returns for all attempts after `after`, restricted to the
    first `limit` jobs."""
    queries = _attempts(session, wanted, period, after)
    ids: set[str] = set()
    for query in queries:
        job_id = query.selected_columns.job_id
        only_ids = query.with_only_columns(job_id).order_by(None).order_by(job_id).distinct()
        ids.update(session.scalars(only_ids.limit(limit)))
    first = sorted(ids)[:limit]
    return _merged(session, [q.where(q.selected_columns.job_id.in_(first)) for q in queries])


def _merged(session: Session, queries: Sequence[Select[Any]]) -> list[Row[Any]]:
    heads = [session.connection().execute(query).all() for query in queries]
    return list(heapq.merge(*heads, key=lambda row: (row.job_id, row.attempt)))


def _attempts(
    session: Session, wanted: BasicJobFilter, period: Period, after: tuple[str, int]
) -> list[Select[Any]]:
    """Return a query for the attempts of existing jobs, and a query for the attempts of deleted
    jobs, both in the order of job id and attempt number."""
    cost, kept = AttemptCostRow.__table__.c, DeletedAttemptRow.__table__.c
    # A cost covers the time up to the latest report, and the other columns can be newer.
    costs = [
        *(cost[name] for name in _OF_COST),
        *(cost[name].label(f"cost_{name}") for name in ("since", "until", "sizes")),
    ]
    of_deleted: Select[Any] = select(
        *(kept[name] for name in _STORED), *costs, true().label("is_deleted")
    )
    of_deleted = of_deleted.where(kept.name.is_not(None))
    live = _of_existing_jobs(session.get_bind().dialect.name)
    live = live.add_columns(*costs, false().label("is_deleted"))
    found, queues = [], queues_of(session, wanted)
    for query, of_label in ((live, _has_label), (of_deleted, _had_label)):
        c = query.selected_columns
        query = query.outerjoin(
            AttemptCostRow.__table__, (cost.job_id == c.job_id) & (cost.attempt == c.attempt)
        ).where(
            tuple_(c.job_id, c.attempt) > tuple_(*map(literal, after)),
            c.created_at < period.until,
            # An attempt that ended immediately is in the period in which it began.
            c.finished_at.is_(None)
            | (c.finished_at > period.since)
            | (c.created_at >= period.since),
            *conditions(session, wanted, c),
            *(of_label(key, value) for key, value in wanted.labels),
        )
        if queues:
            query = query.where(c.queue.in_(queues))
        if wanted.state:
            query = query.where(c.state.in_(wanted.state))
        found.append(query.order_by(c.job_id, c.attempt))
    return found


def _of_existing_jobs(dialect: str) -> Select[Any]:
    """Return a query for the columns `_STORED` of attempts whose jobs are not deleted."""
    table, jobs = AttemptRow.__table__.c, JobRow.__table__.c
    differing: dict[str, ColumnElement[Any]] = {
        # Because the order is by this column, SQLite reads a filtered page from an index of jobs,
        # and does not sort all matches.
        "job_id": jobs.id,
        "queue": func.coalesce(table.queue, jobs.queue),
        "submitted_at": jobs.created_at,
        "labels": labels_as_json(dialect),
    }
    columns = [
        differing[name].label(name)
        if name in differing
        else (jobs if name in _OF_JOB else table)[name]
        for name in _STORED
    ]
    return select(*columns).join_from(
        AttemptRow.__table__, JobRow.__table__, jobs.id == table.job_id
    )


def _has_label(key: str, value: str) -> ColumnElement[bool]:
    label = JobLabelRow.__table__.c
    same = label.job_id == JobRow.__table__.c.id, label.key == key, label.value == value
    return select(label.job_id).where(*same).exists()


def _had_label(key: str, value: str) -> ColumnElement[bool]:
    if '"' in key or "\\" in key:  # no label has such a key, and a JSON path can't contain it
        return false()
    found: ColumnElement[bool] = DeletedAttemptRow.labels[key].as_string() == value
    return found


def keep(session: Session, job_ids: Sequence[str]) -> None:
    """Copy these jobs' attempts to the table that remains when the jobs are deleted."""
    table = AttemptRow.__table__.c
    query = _of_existing_jobs(session.get_bind().dialect.name)
    query = query.where(table.job_id.in_(job_ids), table.finished_at.is_not(None))
    # Another process might be finishing the same deletion.
    copied = insert_of(session)(DeletedAttemptRow).from_select(list(_STORED), query)
    session.execute(copied.on_conflict_do_nothing())


def forget(session: Session, before: datetime) -> None:
    """Delete the kept copies of deleted jobs' attempts that ended before this time."""
    session.execute(delete(DeletedAttemptRow).where(DeletedAttemptRow.finished_at < before))
