"""SQL for attempts, checkpoints and artifacts."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from datetime import datetime
from functools import cache
from typing import Any

from sqlalchemy import Insert, Row, Select, bindparam, delete, func, select, union_all
from sqlalchemy import insert as sql_insert
from sqlalchemy.orm import Session

from ray_workers.shared.contracts import Cause
from service.db.models import ArtifactRow, AttemptRow, CheckpointRow, DeletedAttemptRow, JobRow
from service.db.repositories.bulk import CHUNK, in_chunks, table_of

MAX_ENDED = 1000
"""Maximum number of ended attempts that a query returns."""


def get(session: Session, job_id: str, attempt: int) -> AttemptRow | None:
    return session.scalar(_one(), {"job_id": job_id, "attempt": attempt})


@cache
def _one() -> Select[AttemptRow]:
    return select(AttemptRow).where(
        AttemptRow.job_id == bindparam("job_id"), AttemptRow.attempt == bindparam("attempt")
    )


def insert(session: Session, rows: Sequence[Mapping[str, Any]]) -> None:
    """Insert attempts. `rows` contains the columns of each attempt."""
    if rows:
        session.connection().execute(_insert(), list(rows))


@cache
def _insert() -> Insert:
    return sql_insert(table_of(AttemptRow))


def live_of(session: Session, job_ids: Collection[str]) -> dict[str, AttemptRow]:
    """Return the live attempts of these jobs, keyed by job id."""
    found: dict[str, AttemptRow] = {}
    for some in in_chunks(sorted(job_ids), CHUNK):
        found.update((row.job_id, row) for row in session.scalars(_live_of(), {"job_ids": some}))
    return found


@cache
def _live_of() -> Select[AttemptRow]:
    query = select(AttemptRow).where(AttemptRow.finished_at.is_(None))
    return query.where(AttemptRow.job_id.in_(bindparam("job_ids", expanding=True)))


def of_job(session: Session, job_id: str) -> list[AttemptRow]:
    query = select(AttemptRow).where(AttemptRow.job_id == job_id).order_by(AttemptRow.attempt)
    return list(session.scalars(query))


def beginnings(session: Session, job_id: str) -> Sequence[Row[Any, Any, Any]]:
    """Return (attempt, resume_step, first_metric_step) of each of the job's attempts."""
    return session.connection().execute(_beginnings(), {"job_id": job_id}).all()


@cache
def _beginnings() -> Select[Any, Any, Any]:
    c = AttemptRow.__table__.c
    query = select(c.attempt, c.resume_step, c.first_metric_step)
    return query.where(c.job_id == bindparam("job_id")).order_by(c.attempt)


def num_diverged(session: Session, job_id: str) -> int:
    """Return the number of the job's attempts that ended because training diverged."""
    query = select(func.count()).where(
        AttemptRow.job_id == job_id, AttemptRow.reason_code == Cause.DIVERGED
    )
    return session.scalar(query) or 0


def live(session: Session) -> list[AttemptRow]:
    """Return all live attempts, oldest first. An attempt is live until its end has been
    observed."""
    query = select(AttemptRow).where(AttemptRow.finished_at.is_(None))
    return list(session.scalars(query.order_by(AttemptRow.created_at, AttemptRow.job_id)))


_HELD = (
    *("job_id", "attempt", "phase", "slices", "carriers", "bundle", "roles"),
    "cluster_session",
    *("lacking", "granted", "recalled", "recalled_at", "grow_after", "recall_after"),
    *("grown_at", "shrunk_at"),
    *("batch_size", "batch_at", "preempt_asked_at", "created_at", "started_at", "running_at"),
)
"""The columns of attempts that planning reads."""


def live_columns(session: Session) -> Sequence[Row[Any]]:
    """Return the columns `_HELD` of the attempts that `live` returns."""
    return session.connection().execute(_live_columns()).all()


@cache
def _live_columns() -> Select[Any]:
    c = AttemptRow.__table__.c
    query = select(*(c[name] for name in _HELD)).where(c.finished_at.is_(None))
    return query.order_by(c.created_at, c.job_id)


_FOLLOWED = (
    *("job_id", "attempt", "cluster_session", "created_at", "slices", "carriers"),
    *("grants", "granted", "recalled", "batch_size", "preempt_grace_s"),
    "limits",
)


def followed_columns(session: Session) -> Sequence[Row[Any]]:
    """Return the columns `_FOLLOWED` of the attempts that `live` returns, and `job_state`,
    `max_runtime_s` and `runtime_used_s` of their jobs."""
    return session.connection().execute(_followed_columns()).all()


@cache
def _followed_columns() -> Select[Any]:
    c, jobs = AttemptRow.__table__.c, JobRow.__table__.c
    of_job = (jobs.state.label("job_state"), jobs.max_runtime_s, jobs.runtime_used_s)
    query = select(*(c[name] for name in _FOLLOWED), *of_job)
    query = query.join(JobRow.__table__, jobs.id == c.job_id).where(c.finished_at.is_(None))
    return query.order_by(c.created_at, c.job_id)


def cursors(session: Session, job_ids: Collection[str]) -> dict[tuple[str, int], dict[str, int]]:
    """Return the cursors of these jobs' live attempts, keyed by (job, attempt). A cursor indicates
    how many of an attempt's reports have been stored."""
    return {
        (job_id, attempt): cursor
        for some in in_chunks(sorted(job_ids), CHUNK)
        for job_id, attempt, cursor in session.connection().execute(_cursors(), {"job_ids": some})
    }


@cache
def _cursors() -> Select[Any]:
    c = AttemptRow.__table__.c
    query = select(c.job_id, c.attempt, c.cursor).where(c.finished_at.is_(None))
    return query.where(c.job_id.in_(bindparam("job_ids", expanding=True)))


def ended(session: Session, *, since: datetime) -> Sequence[Row[Any, Any, Any, Any, Any, Any]]:
    """Return (job_id, world_size, started_at, finished_at, reason_code, reason_message) of at most
    MAX_ENDED attempts that were started and that ended after `since`, newest first."""
    table = AttemptRow.__table__
    query = (
        select(
            *(table.c.job_id, table.c.world_size, table.c.started_at, table.c.finished_at),
            *(table.c.reason_code, table.c.reason_message),
        )
        .where(table.c.finished_at > since, table.c.started_at.is_not(None))
        .order_by(table.c.finished_at.desc())
        .limit(MAX_ENDED)
    )
    return session.connection().execute(query).all()


def ended_slots(session: Session, *, since: datetime, limit: int) -> Sequence[Row[Any]]:
    """Return the columns `_ENDED` of the latest attempts that ended after `since`, including
    attempts of deleted jobs, oldest first."""
    both = union_all(
        *(each.where(each.selected_columns.finished_at > since) for each in _ended_slots())
    ).subquery()
    query = select(both).order_by(both.c.finished_at.desc()).limit(limit)
    return session.connection().execute(query).all()[::-1]


def ended_slots_of(session: Session, attempts: Collection[tuple[str, int]]) -> Iterator[Row[Any]]:
    """Yield the columns `_ENDED` of these attempts, given as (job, number). Live attempts are
    omitted."""
    by_number: dict[int, list[str]] = {}
    for job_id, attempt in sorted(attempts):
        by_number.setdefault(attempt, []).append(job_id)
    for attempt, job_ids in by_number.items():
        for some in in_chunks(job_ids, CHUNK):
            asked = {"job_ids": some, "attempt": attempt}
            for query in _ended_slots_of():
                yield from session.connection().execute(query, asked)


@cache
def _ended_slots_of() -> tuple[Select[Any], ...]:
    """Return the queries of `_ended_slots`, restricted to the attempts of some jobs that have the
    same attempt number."""
    return tuple(
        query.where(
            query.selected_columns.job_id.in_(bindparam("job_ids", expanding=True)),
            query.selected_columns.attempt == bindparam("attempt"),
        )
        for query in _ended_slots()
    )


_ENDED = (
    *("job_id", "attempt", "queue", "owner", "slices", "bundle", "roles"),
    *("created_at", "finished_at"),
)


@cache
def _ended_slots() -> tuple[Select[Any], Select[Any]]:
    """Return two queries for the columns `_ENDED`: one for ended attempts, and one for attempts of
    deleted jobs."""
    table, jobs = AttemptRow.__table__.c, JobRow.__table__.c
    columns = (jobs[name] if name in ("queue", "owner") else table[name] for name in _ENDED)
    query = select(*columns).join(JobRow.__table__, jobs.id == table.job_id)
    deleted = DeletedAttemptRow.__table__.c
    of_deleted = select(*(deleted[name] for name in _ENDED))
    return query.where(table.finished_at.is_not(None)), of_deleted


def checkpoints(session: Session, job_id: str) -> list[CheckpointRow]:
    """Return the job's checkpoints sorted by attempt and then by step, newest first."""
    query = (
        select(CheckpointRow)
        .where(CheckpointRow.job_id == job_id)
        .order_by(CheckpointRow.attempt.desc(), CheckpointRow.step.desc())
    )
    return list(session.scalars(query))


def put_checkpoint(session: Session, row: CheckpointRow) -> None:
    """Add a checkpoint, or replace the checkpoint of the same attempt and step."""
    session.merge(row)


def drop_checkpoint(session: Session, job_id: str, url: str) -> None:
    session.flush()
    session.execute(
        delete(CheckpointRow)
        .where(CheckpointRow.job_id == job_id, CheckpointRow.url == url)
        .execution_options(synchronize_session="fetch")
    )


def artifacts(session: Session, job_id: str) -> list[ArtifactRow]:
    query = select(ArtifactRow).where(ArtifactRow.job_id == job_id).order_by(ArtifactRow.path)
    return list(session.scalars(query))


def artifact(session: Session, job_id: str, artifact_id: str) -> ArtifactRow | None:
    return session.get(ArtifactRow, (job_id, artifact_id))


def put_artifact(session: Session, row: ArtifactRow) -> None:
    """Add an artifact, or replace the job's artifact with the same path."""
    session.merge(row)


def furthest_step(session: Session, job_id: str, *, before_attempt: int | None = None) -> int:
    """Return the highest optimizer step that an attempt of the job has reported.

    If `before_attempt` is given, only earlier attempts are considered.
    """
    query = select(func.max(AttemptRow.last_metric_step)).where(AttemptRow.job_id == job_id)
    if before_attempt is not None:
        query = query.where(AttemptRow.attempt < before_attempt)
    return session.scalar(query) or 0
