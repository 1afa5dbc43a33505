"""SQL for forecasts of starts and ends, and for their errors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from enum import StrEnum
from functools import cache
from typing import Any

from sqlalchemy import (
    Row,
    Select,
    Update,
    and_,
    bindparam,
    delete,
    exists,
    func,
    insert,
    select,
    update,
)
from sqlalchemy.orm import Session

from dray.views import JobState
from service.db.models import AttemptRow, ForecastRow, JobRow, OutlookRow
from service.db.repositories.bulk import table_of
from service.domain.states import UNFINISHED

THE_OUTLOOK = 1


class ForecastOf(StrEnum):
    """The event that is forecast."""

    START = "start"
    END = "end"


_FORECAST = (
    *("expected_at", "earliest_at", "latest_at", "not_before"),
    *("code", "message", "num_assumed", "made_at"),
)
_FIRST = ("first_expected_at", "first_made_at")


def facts(session: Session) -> Sequence[Row[Any]]:
    """Return (id, name, owner, state, attempt, num_workers, position, array_id, max_runtime_s,
    runtime_used_s, progress) of all unfinished jobs, to supplement the scheduler's snapshot."""
    c = JobRow.__table__.c
    names = (
        *("id", "name", "owner", "state", "attempt", "num_workers", "position", "array_id"),
        *("max_runtime_s", "runtime_used_s", "deadline", "progress"),
    )
    query: Select[Any] = select(*(c[name] for name in names)).where(c.state.in_(UNFINISHED))
    return session.connection().execute(query).all()


def usual_run_s(session: Session, most: int) -> list[float]:
    """Return the runtimes, in seconds, of the latest jobs that succeeded."""
    c = JobRow.__table__.c
    query = (
        select(c.runtime_used_s)
        .where(c.finished_at.is_not(None), c.state == JobState.SUCCEEDED)
        .order_by(c.finished_at.desc())
        .limit(most)
    )
    return list(session.connection().execute(query).scalars())


def of_job(session: Session, job_id: str, attempt: int, of: ForecastOf) -> ForecastRow | None:
    return session.get(ForecastRow, (job_id, attempt, of))


def still_open(session: Session) -> Sequence[Row[Any]]:
    """Return all columns of the forecasts whose event has not happened yet."""
    table = table_of(ForecastRow)
    query = select(*table.c).where(table.c.came_at.is_(None))
    return session.connection().execute(query).all()


def add(session: Session, rows: Sequence[Mapping[str, Any]]) -> None:
    """Store new forecasts, with all columns except `came_at`. Forecasts for jobs that no longer
    exist are skipped."""
    if not rows:
        return
    table = table_of(ForecastRow)
    names = ("job_id", "attempt", "of", *_FORECAST, *_FIRST)
    given = [bindparam(f"new_{name}", type_=table.c[name].type).label(name) for name in names]
    found = select(*given).where(exists().where(JobRow.id == bindparam("new_job_id")))
    values = [{f"new_{name}": row[name] for name in names} for row in rows]
    session.execute(insert(table).from_select(list(names), found), values)


def change(session: Session, rows: Sequence[Mapping[str, Any]]) -> None:
    """Update stored forecasts, but keep their first expected times."""
    if rows:
        values = [{f"new_{name}": value for name, value in row.items()} for row in rows]
        session.connection().execute(_change(), values)


@cache
def _change() -> Update:
    c = table_of(ForecastRow).c
    new: dict[str, Any] = {name: bindparam(f"new_{name}", type_=c[name].type) for name in _FORECAST}
    first: dict[str, Any] = {
        name: func.coalesce(c[name], bindparam(f"new_{name}", type_=c[name].type))
        for name in _FIRST
    }
    return (
        update(table_of(ForecastRow))
        .where(
            c.job_id == bindparam("new_job_id"),
            c.attempt == bindparam("new_attempt"),
            c.of == bindparam("new_of"),
        )
        .values({**new, **first})
    )


def settle(session: Session) -> None:
    """Record the times at which forecast events occurred, and delete forecasts of events that will
    never occur."""
    row, attempt = ForecastRow, AttemptRow
    is_open = row.came_at.is_(None)
    same = and_(attempt.job_id == row.job_id, attempt.attempt == row.attempt)
    in_bulk = {"synchronize_session": False}
    began = select(attempt.created_at).where(same).scalar_subquery()
    session.execute(
        update(row)
        .where(is_open, row.of == ForecastOf.START, exists().where(same))
        .values(came_at=began)
        .execution_options(**in_bulk)
    )
    succeeded = exists().where(
        JobRow.id == row.job_id, JobRow.attempt == row.attempt, JobRow.state == JobState.SUCCEEDED
    )
    ended = select(attempt.finished_at).where(same).scalar_subquery()
    has_ended = exists().where(same, attempt.finished_at.is_not(None))
    is_end = and_(is_open, row.of == ForecastOf.END)
    session.execute(
        update(row)
        .where(is_end, succeeded, has_ended)
        .values(came_at=ended)
        .execution_options(**in_bulk)
    )
    left = exists().where(same, attempt.finished_at.is_(None))
    session.execute(delete(row).where(is_end, ~succeeded, ~left).execution_options(**in_bulk))
    job_waits = exists().where(JobRow.id == row.job_id, JobRow.state.in_(UNFINISHED))
    session.execute(
        delete(row)
        .where(is_open, row.of == ForecastOf.START, ~job_waits)
        .execution_options(**in_bulk)
    )


def settled(session: Session, since: datetime, most: int) -> Sequence[Row[Any]]:
    """Return (of, first_made_at, first_expected_at, came_at) for each of the latest events after
    `since`, at most `most`."""
    c = table_of(ForecastRow).c
    names = ("of", "first_made_at", "first_expected_at", "came_at")
    query: Select[Any] = (
        select(*(c[name] for name in names))
        .where(c.came_at.is_not(None), c.came_at >= since, c.first_expected_at.is_not(None))
        .order_by(c.came_at.desc())
        .limit(most)
    )
    return session.connection().execute(query).all()


def outlook(session: Session) -> OutlookRow | None:
    return session.get(OutlookRow, THE_OUTLOOK)


def outlook_made_at(session: Session) -> datetime | None:
    """Return when the newest outlook was made, without reading the outlook."""
    return session.scalar(select(OutlookRow.made_at).where(OutlookRow.id == THE_OUTLOOK))


def errors(session: Session) -> dict[str, Any]:
    """Return the forecast errors of the latest outlook; empty before the first outlook."""
    found = session.scalar(select(OutlookRow.errors).where(OutlookRow.id == THE_OUTLOOK))
    return found or {}


def put_situation(session: Session, made_at: datetime, situation: bytes) -> None:
    row = session.get(OutlookRow, THE_OUTLOOK)
    if row is None:
        row = OutlookRow(id=THE_OUTLOOK, made_at=made_at, situation=situation, errors={})
        session.add(row)
    row.made_at, row.situation = made_at, situation


def put_errors(session: Session, found: Mapping[str, Any]) -> None:
    session.execute(
        update(OutlookRow)
        .where(OutlookRow.id == THE_OUTLOOK)
        .values(errors=dict(found))
        .execution_options(synchronize_session=False)
    )
