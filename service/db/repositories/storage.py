"""SQL on how full the storage is, on jobs that may be deleted, and on links to download a file."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime

from sqlalchemy import ColumnElement, Float, Select, and_, cast, delete, func, select
from sqlalchemy.orm import Session, aliased

from service.db.models import (
    ArtifactRow,
    CheckpointRow,
    DownloadLinkRow,
    JobRow,
    LogChunkRow,
    StorageStateRow,
)

THE_STORAGE = 1
MOST_BYTES = 2**63 - 1


def state(session: Session) -> StorageStateRow | None:
    """As it was last seen; None before that."""
    return session.get(StorageStateRow, THE_STORAGE)


def put_state(session: Session, row: StorageStateRow) -> None:
    session.merge(row)


def used_bytes(session: Session) -> int:
    """Bytes of checkpoints, artifacts and logs, by their rows: the storage is not walked.

    Added up as floats, since sizes that a job made up may exceed 64 bits together.
    """
    total = 0
    for size in (CheckpointRow.size_bytes, ArtifactRow.size_bytes, LogChunkRow.size_bytes):
        total += int(session.scalar(select(func.sum(cast(size, Float(53))))) or 0)
    return min(total, MOST_BYTES)


def projects(session: Session) -> Iterator[str]:
    """Each project that has a job. One step along the index for each, however many jobs."""
    name = session.scalar(select(func.min(JobRow.project)))
    while name is not None:
        yield name
        name = session.scalar(select(func.min(JobRow.project)).where(JobRow.project > name))


def finished_before(session: Session, time: datetime, limit: int) -> list[tuple[str, str]]:
    """(id, project) of jobs that ended before `time` and are not needed, the oldest first."""
    query = _disposable().where(JobRow.finished_at < time)
    return _pairs(session, query.order_by(JobRow.finished_at).limit(limit))


def finished_beyond(session: Session, project: str, keep: int, limit: int) -> list[tuple[str, str]]:
    """The same of the project's finished jobs behind its `keep` newest, the newest first."""
    finished = and_(
        JobRow.project == project, JobRow.finished_at.is_not(None), JobRow.deleted_at.is_(None)
    )
    newest = select(JobRow.id).where(finished).order_by(JobRow.id.desc())
    last_kept = session.scalar(newest.offset(keep - 1).limit(1))
    if last_kept is None:
        return []
    query = _disposable().where(finished, JobRow.id < last_kept)
    return _pairs(session, query.order_by(JobRow.id.desc()).limit(limit))


def _disposable() -> Select[str, str]:
    return select(JobRow.id, JobRow.project).where(
        JobRow.finished_at.is_not(None), JobRow.deleted_at.is_(None), ~_needed()
    )


def _needed() -> ColumnElement[bool]:
    """True of a job from which a live one starts."""
    user = aliased(JobRow)
    return (
        select(user.id)
        .where(
            user.init_from_job == JobRow.id,
            user.finished_at.is_(None),
            user.deleted_at.is_(None),
        )
        .correlate(JobRow)
        .exists()
    )


def _pairs(session: Session, query: Select[str, str]) -> list[tuple[str, str]]:
    return [(row[0], row[1]) for row in session.execute(query)]


def add(session: Session, row: DownloadLinkRow) -> None:
    """Harmless to repeat."""
    session.merge(row)


def take(session: Session, secret_sha256: str) -> DownloadLinkRow | None:
    """The link, whose row is gone from then on: of several callers with one secret, one gets it."""
    statement = (
        delete(DownloadLinkRow)
        .where(DownloadLinkRow.secret_sha256 == secret_sha256)
        .returning(DownloadLinkRow)
        .execution_options(synchronize_session=False)
    )
    return session.scalars(statement).first()


def delete_expired(session: Session, now: datetime) -> None:
    table = DownloadLinkRow
    session.execute(
        delete(table).where(table.expires_at <= now).execution_options(synchronize_session=False)
    )
