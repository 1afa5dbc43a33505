"""SQL for the usage of the storage, for jobs that can be deleted, and for download links."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime

from sqlalchemy import ColumnElement, Float, Select, and_, cast, delete, func, select
from sqlalchemy.orm import Session, aliased

from service.db.models import (
    ArtifactRow,
    CheckpointRow,
    DataFileRow,
    DownloadLinkRow,
    JobRow,
    LogChunkRow,
    MediaFileRow,
    ModelVersionRow,
    StorageStateRow,
)

THE_STORAGE = 1
MOST_BYTES = 2**63 - 1


def state(session: Session) -> StorageStateRow | None:
    """Return the storage's last known state; None before the first check."""
    return session.get(StorageStateRow, THE_STORAGE)


def put_state(session: Session, row: StorageStateRow) -> None:
    session.merge(row)


def used_bytes(session: Session) -> int:
    """Return the total bytes of checkpoints, artifacts, logs, media and uploaded files according to
    their rows, without listing the storage.

    The sum uses floats, because a job can report false sizes whose sum exceeds 64 bits.
    """
    total = 0
    for size in (
        CheckpointRow.size_bytes,
        ArtifactRow.size_bytes,
        LogChunkRow.size_bytes,
        DataFileRow.size_bytes,
        MediaFileRow.size_bytes,
    ):
        total += int(session.scalar(select(func.sum(cast(size, Float(53))))) or 0)
    return min(total, MOST_BYTES)


def projects(session: Session) -> Iterator[str]:
    """Yield each project that has jobs, using one index lookup per project."""
    name = session.scalar(select(func.min(JobRow.project)))
    while name is not None:
        yield name
        name = session.scalar(select(func.min(JobRow.project)).where(JobRow.project > name))


def finished_before(session: Session, time: datetime, limit: int) -> list[tuple[str, str]]:
    """Return (id, project) of jobs that may be deleted and ended before `time`, oldest first."""
    query = _disposable().where(JobRow.finished_at < time)
    return _pairs(session, query.order_by(JobRow.finished_at).limit(limit))


def finished_beyond(session: Session, project: str, keep: int, limit: int) -> list[tuple[str, str]]:
    """Return (id, project) of jobs that may be deleted, except for the `keep` newest jobs of the
    project; newest first."""
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
        JobRow.finished_at.is_not(None), JobRow.deleted_at.is_(None), ~_needed(), ~_registered()
    )


def _registered() -> ColumnElement[bool]:
    """Return a condition that is true if the job's files are a version of a registered model."""
    version = ModelVersionRow
    return select(version.version).where(version.job_id == JobRow.id).correlate(JobRow).exists()


def _needed() -> ColumnElement[bool]:
    """Return a condition that is true if an unfinished job starts from a checkpoint of the job."""
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
    """Add a link. Adding the same link again has no effect."""
    session.merge(row)


def take(session: Session, secret_sha256: str) -> DownloadLinkRow | None:
    """Delete and return a link. If several callers use the same secret, only one caller gets the
    link."""
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
