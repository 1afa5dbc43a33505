"""The SQL of the media that jobs report."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import CursorResult, Row, Select, delete, select, tuple_
from sqlalchemy.orm import Session

from service.db.models import MediaFileRow, MediaRow, MediaTotalsRow

Series = tuple[int, str, str]
"""Rank, kind and key."""
Position = tuple[int, str, str, int]
"""A series and a step."""
_ORDER = (MediaRow.rank, MediaRow.kind, MediaRow.key, MediaRow.step)


def totals(session: Session, job_id: str) -> MediaTotalsRow:
    """Return the totals of a locked job, which are added if they do not exist."""
    row = session.get(MediaTotalsRow, job_id)
    if row is None:
        row = MediaTotalsRow(
            job_id=job_id, num_records=0, num_series=0, num_bytes=0, num_left_out=0
        )
        session.add(row)
    return row


def seen_totals(session: Session, job_id: str) -> MediaTotalsRow | None:
    """Return the totals of a job, if it has reported any media."""
    return session.get(MediaTotalsRow, job_id)


def attempt_at(session: Session, job_id: str, series: Series, step: int) -> int | None:
    """Return the attempt whose record of this step is stored, if any."""
    return session.scalar(_of_series(select(MediaRow.attempt), job_id, series, step))


def has_series(session: Session, job_id: str, series: Series) -> bool:
    return session.scalar(_of_series(select(MediaRow.step), job_id, series).limit(1)) is not None


def _of_series(
    query: Select[int], job_id: str, series: Series, step: int | None = None
) -> Select[int]:
    rank, kind, key = series
    query = query.where(
        MediaRow.job_id == job_id,
        MediaRow.rank == rank,
        MediaRow.kind == kind,
        MediaRow.key == key,
    )
    return query if step is None else query.where(MediaRow.step == step)


def add(session: Session, row: MediaRow) -> None:
    session.add(row)
    session.flush()


def drop_repeated(
    session: Session, job_id: str, attempt: int, from_step: int, series: Series | None = None
) -> int:
    """Delete the records of earlier attempts from this step on, of all series or only of one.
    Return the number of deleted records."""
    statement = delete(MediaRow).where(
        MediaRow.job_id == job_id, MediaRow.attempt < attempt, MediaRow.step >= from_step
    )
    if series is not None:
        rank, kind, key = series
        statement = statement.where(
            MediaRow.rank == rank, MediaRow.kind == kind, MediaRow.key == key
        )
    result = session.execute(statement.execution_options(synchronize_session=False))
    assert isinstance(result, CursorResult)
    return result.rowcount


def file(session: Session, job_id: str, sha256: str) -> MediaFileRow | None:
    return session.get(MediaFileRow, (job_id, sha256))


def add_file(session: Session, row: MediaFileRow) -> None:
    session.add(row)


def positions(session: Session, job_id: str) -> Sequence[Row[int, str, str, int]]:
    """Return (rank, kind, key, step) of all records, in this order."""
    return session.execute(select(*_ORDER).where(MediaRow.job_id == job_id).order_by(*_ORDER)).all()


def records(
    session: Session,
    job_id: str,
    *,
    rank: int | None,
    kind: str | None,
    key: str | None,
    step: int | None,
    after: Position | None,
    limit: int,
) -> Sequence[MediaRow]:
    """Return records after a position, in the order of the ranks, kinds, keys and steps."""
    query = _chosen(select(MediaRow), job_id, rank=rank, kind=kind, key=key)
    if step is not None:
        query = query.where(MediaRow.step == step)
    if after is not None:
        query = query.where(tuple_(*_ORDER) > tuple_(*after))
    return list(session.scalars(query.order_by(*_ORDER).limit(limit)))


def spread(session: Session, job_id: str, series: Series, number: int) -> Sequence[MediaRow]:
    """Return at most `number` records of a series at equal distances, with the first and last."""
    rank, kind, key = series
    chosen = _chosen(select(MediaRow.step), job_id, rank=rank, kind=kind, key=key)
    steps = list(session.scalars(chosen.order_by(MediaRow.step)))
    if len(steps) > number:
        last = len(steps) - 1
        indices = {round(last * n / (number - 1)) for n in range(number)}
        steps = [steps[index] for index in sorted(indices)]
    query = _chosen(select(MediaRow), job_id, rank=rank, kind=kind, key=key)
    return list(session.scalars(query.where(MediaRow.step.in_(steps)).order_by(MediaRow.step)))


def _chosen(
    query: Select[MediaRow] | Select[int],
    job_id: str,
    *,
    rank: int | None,
    kind: str | None,
    key: str | None,
) -> Select[MediaRow] | Select[int]:
    query = query.where(MediaRow.job_id == job_id)
    for column, value in ((MediaRow.rank, rank), (MediaRow.kind, kind), (MediaRow.key, key)):
        if value is not None:
            query = query.where(column == value)
    return query
