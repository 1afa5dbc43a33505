"""SQL for samples of system metrics."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from sqlalchemy import Row, delete, distinct, func, select
from sqlalchemy.orm import Session

from service.db.models import SystemMetricsRow
from service.db.repositories.bulk import table_of
from service.db.repositories.telemetry.chunks import batches

_TABLE = table_of(SystemMetricsRow)
_C = _TABLE.c


def add(session: Session, row: SystemMetricsRow) -> None:
    """Add a row, which is written together with other rows when the session is flushed."""
    session.add(row)


def num_lone(session: Session, job_id: str) -> int:
    """Return the number of distinct times of the job's rows that contain a single sample."""
    query = select(func.count(distinct(_C.last_time))).where(_C.job_id == job_id, _C.is_lone)
    return session.connection().execute(query).scalar() or 0


def first_ranks_of_lone(session: Session, job_id: str) -> list[int]:
    """Return the `first_rank` of the job's rows with a single sample, including rows added by this
    transaction."""
    session.flush()
    query = select(_C.first_rank).where(_C.job_id == job_id, _C.is_lone).distinct()
    return list(session.connection().execute(query).scalars())


def rows_of(session: Session, job_id: str, first_rank: int) -> Sequence[Row[Any, Any, Any, Any]]:
    """Return (id, is_lone, mean_of, num_samples) of rows, in the order of insertion."""
    query = (
        select(_C.id, _C.is_lone, _C.mean_of, _C.num_samples)
        .where(_C.job_id == job_id, _C.first_rank == first_rank)
        .order_by(_C.id)
    )
    return session.connection().execute(query).all()


def take(session: Session, ids: Collection[int]) -> list[bytes]:
    """Delete these rows, and return their points in the order of ids."""
    connection = session.connection()
    found: list[bytes] = []
    for batch in batches(sorted(ids)):
        mine = _C.id.in_(batch)
        found += connection.execute(select(_C.points).where(mine).order_by(_C.id)).scalars()
        connection.execute(delete(_TABLE).where(mine))
    return found


def points_after(
    session: Session, job_id: str, first_rank: int, after_time: int
) -> Sequence[bytes]:
    """Return the points of the rows that contain a sample after this time, in the order of
    insertion."""
    query = (
        select(_C.points)
        .where(_C.job_id == job_id, _C.first_rank == first_rank, _C.last_time > after_time)
        .order_by(_C.id)
    )
    return session.connection().execute(query).scalars().all()


def newest_points(session: Session, job_id: str) -> Sequence[bytes]:
    """Return the points of the rows that contain the job's latest sample, in rank order."""
    newest = select(func.max(_C.last_time)).where(_C.job_id == job_id).scalar_subquery()
    query = (
        select(_C.points)
        .where(_C.job_id == job_id, _C.last_time == newest)
        .order_by(_C.first_rank, _C.id)
    )
    return session.connection().execute(query).scalars().all()


def all_points_after(session: Session, job_id: str, after_time: int) -> Sequence[Row[int, bytes]]:
    """Return (first_rank, points) of the rows that contain a sample after this time, in the order
    of insertion."""
    query = select(_C.first_rank, _C.points).where(_C.job_id == job_id, _C.last_time > after_time)
    return session.connection().execute(query.order_by(_C.id)).all()
