"""SQL for the last values and the extreme values of metric series."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass
from datetime import datetime
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


@dataclass(frozen=True)
class SummaryOf:
    """The job whose series are summarised."""

    job_id: str
    is_minimised: Callable[[str], bool]
    """Whether lower values of a key are better."""
    as_of: datetime
    """The time up to which the summaries cover the received points."""

    def rows(self, summaries: Mapping[str, MetricSummary]) -> list[dict[str, Any]]:
        rows = []
        for key, one in summaries.items():
            minimised = self.is_minimised(key)
            best = one.min_value if minimised else one.max_value
            stored = {"minimised": minimised, "best_value": best, "as_of": self.as_of}
            rows.append({"job_id": self.job_id, "key": key, **asdict(one), **stored})
        return rows


def merge(session: Session, of: SummaryOf, summaries: Mapping[str, MetricSummary]) -> None:
    """Merge summaries of later points (by key) into the stored summaries. Merging the same
    summaries again has no effect."""
    statement = _merging(session.get_bind().dialect.name)
    session.connection().execute(statement, of.rows(summaries))


@cache
def _merging(dialect: str) -> Insert:
    insert_ = postgresql.insert if dialect == "postgresql" else sqlite.insert
    statement = insert_(_TABLE)
    old, new = _TABLE.c, statement.excluded
    changes: dict[str, ColumnElement[Any]] = {
        "last_step": new.last_step,
        "last_value": new.last_value,
        "minimised": new.minimised,
        "as_of": new.as_of,
    }
    for of, is_better in (
        ("min", new.min_value < old.min_value),
        ("max", new.max_value > old.max_value),
    ):
        is_new = or_(old[f"{of}_value"].is_(None), is_better)
        for name in (f"{of}_step", f"{of}_value"):
            changes[name] = case((is_new, new[name]), else_=old[name])
    changes["best_value"] = case((new.minimised, changes["min_value"]), else_=changes["max_value"])
    return statement.on_conflict_do_update(index_elements=["job_id", "key"], set_=changes)


def replace(session: Session, of: SummaryOf, summaries: Mapping[str, MetricSummary]) -> None:
    """Replace all summaries of the job with `summaries`, a mapping from keys to summaries."""
    session.connection().execute(delete(_TABLE).where(_TABLE.c.job_id == of.job_id))
    if rows := of.rows(summaries):
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


@dataclass(frozen=True)
class LaggingSummary:
    """The values of a series, and the time up to which they cover the received points."""

    last_value: float | None
    best_value: float | None
    min_value: float | None
    max_value: float | None
    as_of: datetime | None


def lagging(
    session: Session, job_ids: Collection[str], keys: Collection[str]
) -> dict[str, dict[str, LaggingSummary]]:
    """Return the summaries of these series of these jobs, keyed by job and key. Jobs without such a
    series are omitted."""
    found: dict[str, dict[str, LaggingSummary]] = {}
    c = _TABLE.c
    columns = [c[name] for name in LaggingSummary.__dataclass_fields__]
    for some in in_chunks(sorted(job_ids), CHUNK):
        query = select(c.job_id, c.key, *columns).where(c.job_id.in_(some), c.key.in_(set(keys)))
        for job_id, key, *values in session.connection().execute(query):
            found.setdefault(job_id, {})[key] = LaggingSummary(*values)
    return found
