"""SQL for the last values and the extreme values of metric series."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

from sqlalchemy import ColumnElement, Insert, case, delete, or_, select
from sqlalchemy import insert as sql_insert
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.orm import Session

from service.db.models import MetricSummaryRow
from service.db.repositories.bulk import CHUNK, in_chunks, table_of

_TABLE = table_of(MetricSummaryRow)


@dataclass(frozen=True)
class MetricSummary:
    """The columns of a series' summary except for the job and the key."""

    last_step: int
    last_value: float | None
    min_step: int | None
    min_value: float | None
    max_step: int | None
    max_value: float | None


def merge(session: Session, job_id: str, summaries: Mapping[str, MetricSummary]) -> None:
    """Merge summaries of later points (by key) into the stored summaries. Merging the same
    summaries again has no effect."""
    rows = [{"job_id": job_id, "key": key, **asdict(one)} for key, one in summaries.items()]
    session.connection().execute(_merging(session.get_bind().dialect.name), rows)


@cache
def _merging(dialect: str) -> Insert:
    insert_ = postgresql.insert if dialect == "postgresql" else sqlite.insert
    statement = insert_(_TABLE)
    old, new = _TABLE.c, statement.excluded
    changes: dict[str, ColumnElement[Any]] = {
        "last_step": new.last_step,
        "last_value": new.last_value,
    }
    for of, is_better in (
        ("min", new.min_value < old.min_value),
        ("max", new.max_value > old.max_value),
    ):
        is_new = or_(old[f"{of}_value"].is_(None), is_better)
        for name in (f"{of}_step", f"{of}_value"):
            changes[name] = case((is_new, new[name]), else_=old[name])
    return statement.on_conflict_do_update(index_elements=["job_id", "key"], set_=changes)


def replace(session: Session, job_id: str, summaries: Mapping[str, MetricSummary]) -> None:
    """Replace all summaries of the job with `summaries`, a mapping from keys to summaries."""
    session.connection().execute(delete(_TABLE).where(_TABLE.c.job_id == job_id))
    rows = [{"job_id": job_id, "key": key, **asdict(one)} for key, one in summaries.items()]
    if rows:
        session.connection().execute(sql_insert(_TABLE), rows)


def of_jobs(session: Session, job_ids: Collection[str]) -> dict[str, dict[str, MetricSummary]]:
    """Return the summaries of each of these jobs, keyed by job and key."""
    found: dict[str, dict[str, MetricSummary]] = {job_id: {} for job_id in job_ids}
    c = _TABLE.c
    columns = [c[name] for name in MetricSummary.__dataclass_fields__]
    for some in in_chunks(sorted(job_ids), CHUNK):
        query = select(c.job_id, c.key, *columns).where(c.job_id.in_(some))
        for job_id, key, *values in session.connection().execute(query):
            found[job_id][key] = MetricSummary(*values)
    return found
