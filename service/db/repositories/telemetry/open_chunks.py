"""SQL for growing chunks. These statements run for each reply, so they avoid ORM objects."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from sqlalchemy import BindParameter, Select, Update, bindparam, insert, select, update
from sqlalchemy.orm import Session

from service.db.models import MetricChunkRow
from service.db.repositories.telemetry.chunks import batches

_TABLE = MetricChunkRow.metadata.tables[MetricChunkRow.__tablename__]


@dataclass
class OpenChunk:
    """The columns of a chunk that is still growing."""

    key: str
    rank: int
    is_open: bool
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
    outline: bytes | None
    points: bytes
    id: int | None = None
    """None until the chunk is stored."""


_COLUMNS = tuple(OpenChunk.__dataclass_fields__)
_FIXED = ("key", "rank", "first_step", "first_value", "id")
_CHANGING = tuple(name for name in _COLUMNS if name not in _FIXED)


@cache
def _newest() -> Select[Any]:
    c = _TABLE.c
    return select(*(c[name] for name in _COLUMNS)).where(
        c.job_id == bindparam("of_job"),
        c.attempt == bindparam("of_attempt"),
        c.is_open,
        c.rank.in_(bindparam("ranks", expanding=True)),
    )


@cache
def _change() -> Update:
    values: dict[str, BindParameter[Any]] = {name: bindparam(name) for name in _CHANGING}
    return update(_TABLE).where(_TABLE.c.id == bindparam("of_id")).values(values)


@cache
def _last_steps() -> Select[Any]:
    c = _TABLE.c
    return select(c.key, c.rank, c.last_step).where(
        c.job_id == bindparam("of_job"), c.attempt == bindparam("of_attempt"), c.is_open
    )


def last_steps(session: Session, job_id: str, attempt: int) -> dict[tuple[str, int], int]:
    """Return the last step that is stored in chunks for each series, by (key, rank)."""
    asked = {"of_job": job_id, "of_attempt": attempt}
    rows = session.connection().execute(_last_steps(), asked)
    return {(key, rank): step for key, rank, step in rows}


def newest(
    session: Session, job_id: str, attempt: int, ranks: Collection[int]
) -> dict[tuple[str, int], OpenChunk]:
    """Return the latest chunk of each series, keyed by (key, rank)."""
    found: dict[tuple[str, int], OpenChunk] = {}
    connection = session.connection()
    for batch in batches(ranks):
        asked = {"of_job": job_id, "of_attempt": attempt, "ranks": batch}
        for row in connection.execute(_newest(), asked):
            chunk = OpenChunk(*row)
            found[chunk.key, chunk.rank] = chunk
    return found


def store(session: Session, job_id: str, attempt: int, chunks: Sequence[OpenChunk]) -> None:
    """Insert the chunks that have no id, and update all other chunks."""
    connection = session.connection()
    known = [{"of_id": c.id, **_values(c, _CHANGING)} for c in chunks if c.id is not None]
    if known:
        connection.execute(_change(), known)
    added = [c for c in chunks if c.id is None]
    if added:
        own = {"job_id": job_id, "attempt": attempt}
        columns = [name for name in _COLUMNS if name != "id"]
        connection.execute(insert(_TABLE), [own | _values(c, columns) for c in added])


def _values(chunk: OpenChunk, names: Collection[str]) -> dict[str, Any]:
    return {name: getattr(chunk, name) for name in names}
