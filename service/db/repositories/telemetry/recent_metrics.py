"""SQL for the latest metrics of attempts, which are not yet in chunks. There is one row per
reply."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

from sqlalchemy import Delete, Row, Select, bindparam, delete, select
from sqlalchemy.orm import Session

from service.db.models import RecentMetricsRow
from service.db.repositories.bulk import table_of

_TABLE = table_of(RecentMetricsRow)


def add(session: Session, job_id: str, attempt: int, last_step: int, points: bytes) -> None:
    """Add a row, which is written together with other rows when the session is flushed."""
    row = RecentMetricsRow(job_id=job_id, attempt=attempt, last_step=last_step, points=points)
    session.add(row)


def of_attempt(session: Session, job_id: str, attempt: int) -> list[bytes]:
    """Return the points of each of the attempt's rows, in the order of insertion."""
    asked = {"of_job": job_id, "of_attempt": attempt}
    return [row.points for row in session.connection().execute(_of_attempt(), asked)]


@cache
def _of_attempt() -> Select[Any]:
    c = _TABLE.c
    mine = c.job_id == bindparam("of_job"), c.attempt == bindparam("of_attempt")
    return select(c.points).where(*mine).order_by(c.id)


def of_job(session: Session, job_id: str, after_step: int) -> Sequence[Row[Any, Any]]:
    """Return (attempt, points) of rows with a step above `after_step`, in order."""
    asked = {"of_job": job_id, "after_step": after_step}
    return session.connection().execute(_of_job(), asked).all()


@cache
def _of_job() -> Select[Any]:
    c = _TABLE.c
    wanted = c.job_id == bindparam("of_job"), c.last_step > bindparam("after_step")
    return select(c.attempt, c.points).where(*wanted).order_by(c.attempt, c.id)


def take(session: Session, job_id: str, attempt: int) -> list[bytes]:
    """Delete all rows of the attempt, and return their points as `of_attempt` does."""
    session.flush()
    found = of_attempt(session, job_id, attempt)
    session.connection().execute(_drop(), {"of_job": job_id, "of_attempt": attempt})
    return found


@cache
def _drop() -> Delete:
    c = _TABLE.c
    mine = c.job_id == bindparam("of_job"), c.attempt == bindparam("of_attempt")
    return delete(_TABLE).where(*mine)
