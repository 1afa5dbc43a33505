"""SQL for chunks of metrics and logs."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from sqlalchemy import Row, Select, and_, bindparam, func, or_, select, tuple_
from sqlalchemy.orm import Session, aliased, defer

from service.db.models import JobRow, LogChunkRow, MetricChunkRow
from service.db.repositories.bulk import in_chunks

BATCH = 400
"""Maximum number of values in an IN list. Older versions of SQLite allow only 999 parameters per
statement."""


def batches(values: Collection[int]) -> Iterator[list[int]]:
    """Yield the values in lists that are short enough for an IN condition."""
    ordered = list(values)
    for start in range(0, len(ordered), BATCH):
        yield ordered[start : start + BATCH]


def metric_keys(session: Session, job_id: str) -> set[str]:
    """Return the keys of all metrics of the job."""
    query = select(MetricChunkRow.key).where(MetricChunkRow.job_id == job_id).distinct()
    return set(session.scalars(query))


@dataclass(frozen=True)
class MetricChunk:
    """A chunk of metrics without its points."""

    id: int
    key: str
    attempt: int
    count: int
    first_step: int
    first_value: float | None
    last_step: int
    last_value: float | None
    min_step: int | None
    min_value: float | None
    max_step: int | None
    max_value: float | None
    nan_step: int | None
    has_outline: bool


_TABLE = MetricChunkRow.__table__
_COLUMNS = tuple(name for name in MetricChunk.__dataclass_fields__ if name != "has_outline")


def metric_chunks(
    session: Session, job_id: str, rank: int, keys: Sequence[str] | None, after_step: int
) -> list[MetricChunk]:
    """Return chunks with a step above `after_step`, sorted by key, attempt and step.

    The chunks are sorted in Python, because the database would have to scan the whole series to
    sort them.
    """
    asked: dict[str, Any] = {"job_id": job_id, "rank": rank}
    chosen = ""
    if after_step >= 0:
        chosen, asked["after_step"] = "after_step", after_step
    elif keys is not None:
        chosen, asked["keys"] = "keys", list(keys)
    wanted = None if keys is None else set(keys)
    rows = session.connection().execute(_chunks_query(chosen), asked)
    found = [MetricChunk(*row) for row in rows if wanted is None or row.key in wanted]
    return sorted(found, key=lambda chunk: (chunk.key, chunk.attempt, chunk.first_step))


# Cache the statements that are used for polling, because building a statement takes longer than
# executing it.


@cache
def _chunks_query(chosen: str) -> Select[Any]:
    """Return a query for a rank's chunks. `chosen` is the name of the condition (`after_step` or
    `keys`), or empty for all chunks."""
    c = _TABLE.c
    columns = [c[name] for name in _COLUMNS]
    query = select(*columns, c.outline.is_not(None).label("has_outline")).where(
        c.job_id == bindparam("job_id"), c.rank == bindparam("rank")
    )
    if chosen == "after_step":
        return query.where(c.last_step > bindparam("after_step"))
    if chosen == "keys":
        return query.where(c.key.in_(bindparam("keys", expanding=True)))
    return query


@cache
def _blobs_query(column: str) -> Select[Any]:
    return select(_TABLE.c.id, _TABLE.c[column]).where(
        _TABLE.c.id.in_(bindparam("ids", expanding=True))
    )


def _blobs(session: Session, column: str, chunk_ids: Collection[int]) -> dict[int, bytes]:
    found: dict[int, bytes] = {}
    query = _blobs_query(column)
    for batch in batches(chunk_ids):
        rows = session.connection().execute(query, {"ids": batch})
        found.update((chunk_id, blob) for chunk_id, blob in rows)
    return found


def first_metric_steps(
    session: Session, job_id: str, rank: int, after_attempt: int
) -> dict[tuple[str, int], int]:
    """Return the first step of each series in attempts after `after_attempt`, keyed by (key,
    attempt)."""
    m = MetricChunkRow
    query = (
        select(m.key, m.attempt, func.min(m.first_step))
        .where(m.job_id == job_id, m.rank == rank, m.attempt > after_attempt)
        .group_by(m.key, m.attempt)
    )
    return {(key, attempt): step for key, attempt, step in session.execute(query)}


def metric_points(session: Session, chunk_ids: Collection[int]) -> dict[int, bytes]:
    return _blobs(session, "points", chunk_ids)


def metric_outlines(session: Session, chunk_ids: Collection[int]) -> dict[int, bytes]:
    """Return the outlines of these chunks, keyed by chunk id. Chunks without an outline are
    omitted."""
    return _blobs(session, "outline", chunk_ids)


def last_log_chunks(
    session: Session, job_id: str, attempt: int, ranks: Collection[int]
) -> dict[int, list[LogChunkRow]]:
    """Return the open log chunks and the latest log chunk of each rank, in order, keyed by rank."""
    found: dict[int, list[LogChunkRow]] = {}
    for batch in batches(ranks):
        asked = {"job_id": job_id, "attempt": attempt, "ranks": batch}
        for chunk in session.scalars(_last_log_chunks(), asked):
            found.setdefault(chunk.rank, []).append(chunk)
    return found


@cache
def _last_log_chunks() -> Select[LogChunkRow]:
    row, later = LogChunkRow, aliased(LogChunkRow)
    newest = select(func.max(later.first_line)).where(
        later.job_id == row.job_id, later.attempt == row.attempt, later.rank == row.rank
    )
    return (
        select(row)
        .where(
            row.job_id == bindparam("job_id"),
            row.attempt == bindparam("attempt"),
            row.rank.in_(bindparam("ranks", expanding=True)),
            or_(
                and_(row.storage_key.is_(None), row.refused_at.is_(None)),
                row.first_line == newest.scalar_subquery(),
            ),
        )
        .order_by(row.rank, row.first_line)
    )


def open_log_chunks(session: Session, job_id: str, attempt: int) -> Sequence[Row[Any]]:
    """Return (rank, first_line, num_lines, size_bytes, incarnation, next_number) of all open
    chunks, in order. Chunks that keep only the newest lines of a long log are omitted."""
    asked = {"of_job": job_id, "of_attempt": attempt}
    return session.connection().execute(_open_log_chunks(), asked).all()


@cache
def _open_log_chunks() -> Select[Any]:
    c = LogChunkRow.__table__.c
    mine = c.job_id == bindparam("of_job"), c.attempt == bindparam("of_attempt")
    columns = (c.rank, c.first_line, c.num_lines, c.size_bytes, c.incarnation, c.next_number)
    is_open = c.storage_key.is_(None), c.refused_at.is_(None), c.left_out.is_(None)
    return select(*columns).where(*mine, *is_open).order_by(c.rank, c.first_line)


def jobs_with_refused_chunks(session: Session, after: str, limit: int) -> list[str]:
    """Return the ids of jobs with refused chunks, in order, starting after `after`. Jobs that are
    being deleted are omitted."""
    row = LogChunkRow
    query = select(row.job_id).join(JobRow, JobRow.id == row.job_id).distinct()
    query = query.where(row.refused_at.is_not(None), row.job_id > after)
    query = query.where(JobRow.deleted_at.is_(None))
    return list(session.scalars(query.order_by(row.job_id).limit(limit)))


def refused_log_chunks(session: Session, job_id: str) -> list[LogChunkRow]:
    """Return the job's refused chunks, in the order in which they were refused."""
    row = LogChunkRow
    query = select(row).where(row.job_id == job_id, row.refused_at.is_not(None))
    return list(
        session.scalars(query.order_by(row.refused_at, row.attempt, row.rank, row.first_line))
    )


def dropped_log_bytes(session: Session, job_id: str) -> dict[int, int]:
    """Return the number of bytes that were dropped from each rank's logs because neither the
    storage nor the database had space."""
    row = LogChunkRow
    query = select(row.rank, func.sum(row.dropped_bytes)).where(
        row.job_id == job_id, row.dropped_bytes.is_not(None)
    )
    return {rank: int(size or 0) for rank, size in session.execute(query.group_by(row.rank))}


def log_ranks(session: Session, job_id: str, attempt: int) -> set[int]:
    """Return the ranks of the attempt that have log lines."""
    row = LogChunkRow
    mine = row.job_id == job_id, row.attempt == attempt
    return set(session.scalars(select(row.rank).where(*mine).distinct()))


def add_log_chunk(session: Session, row: LogChunkRow) -> None:
    session.add(row)


def log_chunks(
    session: Session, job_id: str, *, attempt: int | None, rank: int | None
) -> list[LogChunkRow]:
    """Return the job's log chunks, in order, without their text."""
    query = select(LogChunkRow).where(LogChunkRow.job_id == job_id)
    if attempt is not None:
        query = query.where(LogChunkRow.attempt == attempt)
    if rank is not None:
        query = query.where(LogChunkRow.rank == rank)
    query = query.order_by(LogChunkRow.attempt, LogChunkRow.rank, LogChunkRow.first_line)
    return list(session.scalars(query.options(defer(LogChunkRow.text, raiseload=True))))


def log_texts(
    session: Session, job_id: str, chunks: Sequence[LogChunkRow]
) -> dict[tuple[int, int, int], str]:
    """Return the text of these open chunks of the job, keyed by (attempt, rank, first line)."""
    row = LogChunkRow
    key = row.attempt, row.rank, row.first_line
    found: dict[tuple[int, int, int], str] = {}
    wanted = [(chunk.attempt, chunk.rank, chunk.first_line) for chunk in chunks]
    for some in in_chunks(wanted, BATCH // len(key)):
        query = select(*key, row.text).where(row.job_id == job_id, tuple_(*key).in_(some))
        for attempt, rank, first_line, text in session.execute(query):
            found[attempt, rank, first_line] = text or ""
    return found
