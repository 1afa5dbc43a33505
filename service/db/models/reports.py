"""Tables of metrics, logs, files and download links."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from sqlalchemy import ForeignKey, ForeignKeyConstraint, Index, String, text
from sqlalchemy.orm import Mapped, mapped_column

from service.db.models.base import Base, job_key
from service.db.types import BigId


class MetricChunkRow(Base):
    """Up to `series.CHUNK_POINTS` points of one series of one attempt, in ascending order of
    steps."""

    __tablename__ = "metric_chunks"
    __table_args__ = (
        ForeignKeyConstraint(["job_id"], ["jobs.id"], ondelete="CASCADE"),
        Index(
            "uq_metric_chunks_series", "job_id", "rank", "key", "attempt", "first_step", unique=True
        ),
        Index("ix_metric_chunks_open", "job_id", "attempt", "is_open"),
        Index("ix_metric_chunks_last_step", "job_id", "rank", "last_step"),
        {"sqlite_autoincrement": True},
    )
    id: Mapped[int] = mapped_column(BigId, primary_key=True)
    job_id: Mapped[str] = mapped_column(String(64))
    key: Mapped[str]
    attempt: Mapped[int]
    rank: Mapped[int]
    is_open: Mapped[bool]
    """Whether this is the latest chunk of its series. Later points must have a higher step."""
    count: Mapped[int]
    first_step: Mapped[int]
    first_value: Mapped[float | None]
    """Unset means NaN, also in `last_value`, because SQLite has no NaN."""
    last_step: Mapped[int]
    last_value: Mapped[float | None]
    min_step: Mapped[int | None]
    min_value: Mapped[float | None]
    max_step: Mapped[int | None]
    max_value: Mapped[float | None]
    nan_step: Mapped[int | None]
    outline: Mapped[bytes | None]
    """Extremes of each block of `series.BLOCK_POINTS` points; unset if the chunk was written by an
    older version of dray."""
    points: Mapped[bytes]


class RecentMetricsRow(Base):
    """The points that one reply contained, for all series of an attempt. The points are kept in
    this table until they are moved to chunks.

    The first points of a series are always stored in a chunk. Rows are ordered by `id`.
    """

    __tablename__ = "recent_metrics"
    __table_args__ = (Index("ix_recent_metrics_job_id_attempt", "job_id", "attempt"),)
    id: Mapped[int] = mapped_column(BigId, primary_key=True)
    job_id: Mapped[str] = mapped_column(String(64), ForeignKey("jobs.id", ondelete="CASCADE"))
    attempt: Mapped[int]
    last_step: Mapped[int]
    """The highest step of these points."""
    points: Mapped[bytes]
    """Encoded by `service.domain.series`."""


class SystemMetricsRow(Base):
    """Samples of the system metrics of several ranks of a job, over all of its attempts."""

    __tablename__ = "system_metrics"
    __table_args__ = (Index("ix_system_metrics_job_id_first_rank", "job_id", "first_rank"),)
    id: Mapped[int] = mapped_column(BigId, primary_key=True)
    job_id: Mapped[str] = mapped_column(String(64), ForeignKey("jobs.id", ondelete="CASCADE"))
    first_rank: Mapped[int]
    """The lowest rank that the row can contain (see
    `service.domain.system_metrics.RANKS_OF_ROW`)."""
    is_lone: Mapped[bool]
    """Whether the row contains a single original sample, and will be merged with other such
    rows."""
    mean_of: Mapped[int]
    """Number of original samples that are averaged into each sample of this row."""
    num_samples: Mapped[int]
    last_time: Mapped[int]
    """Unix time of the latest sample, in seconds."""
    points: Mapped[bytes]
    """Encoded by `service.domain.system_metrics.pack`."""


class LogChunkRow(Base):
    """Consecutive log lines of one rank, stored in `text` while the chunk is open, and afterwards
    in the storage."""

    __tablename__ = "log_chunks"
    __table_args__ = (
        Index(
            "ix_log_chunks_refused",
            "job_id",
            sqlite_where=text("refused_at IS NOT NULL"),
            postgresql_where=text("refused_at IS NOT NULL"),
        ),
    )
    job_id: Mapped[str] = job_key()
    attempt: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    rank: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    first_line: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    num_lines: Mapped[int]
    size_bytes: Mapped[int]
    incarnation: Mapped[int]
    """Incarnation of the process that wrote the last line."""
    next_number: Mapped[int]
    """The number that this process will assign to its next line. If the next line to arrive has a
    higher number, lines were lost."""
    text: Mapped[str | None]
    """JSON arrays, one per line: `[time, line]`, or `[time, note, lost]` if lines were lost."""
    storage_key: Mapped[str | None]
    left_out: Mapped[int | None]
    """Number of lines that were dropped before the lines of this chunk. Once the job's log has
    reached its limit, only the latest lines of each rank are kept. None for chunks that were
    written before the limit was reached."""
    refused_at: Mapped[datetime | None]
    """The time at which the storage refused the chunk. The chunk is closed, and remains in `text`
    until the storage accepts it."""
    dropped_bytes: Mapped[int | None]
    """Number of bytes that were dropped from this refused chunk and from earlier refused chunks,
    because the database's limit for refused chunks was exceeded. If this is set, `text` is a note
    about the dropped lines."""


class CheckpointRow(Base):
    __tablename__ = "checkpoints"
    job_id: Mapped[str] = job_key()
    attempt: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    step: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    url: Mapped[str]
    size_bytes: Mapped[int]
    manifest_sha256: Mapped[str] = mapped_column(String(64))
    metrics: Mapped[dict[str, Any]]
    created_at: Mapped[datetime]


class ArtifactRow(Base):
    __tablename__ = "artifacts"
    job_id: Mapped[str] = job_key()
    id: Mapped[str] = mapped_column(String(64), primary_key=True)
    attempt: Mapped[int]
    path: Mapped[str]
    url: Mapped[str]
    size_bytes: Mapped[int]
    sha256: Mapped[str] = mapped_column(String(64))
    created_at: Mapped[datetime]


class TextSamplesRow(Base):
    """Texts that a job's model generated at an evaluation, in the order of the document's
    prompts."""

    __tablename__ = "text_samples"
    job_id: Mapped[str] = job_key()
    step: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    attempt: Mapped[int]
    texts: Mapped[list[Any]]
    created_at: Mapped[datetime]


class DownloadLinkRow(Base):
    """An unused download link. Only a hash of the link's secret is stored, so that a reader of the
    database can't download the file."""

    __tablename__ = "download_links"
    secret_sha256: Mapped[str] = mapped_column(String(64), primary_key=True)
    job_id: Mapped[str] = mapped_column(String(64), ForeignKey("jobs.id", ondelete="CASCADE"))
    owner: Mapped[str] = mapped_column(String(255))
    """Name of the user who requested the link."""
    token_id: Mapped[str | None] = mapped_column(String(64))
    """Id of the user's token; empty on a server without tokens. None if the token has been removed,
    which invalidates the link."""
    target: Mapped[dict[str, Any]]
    """The `DownloadRequest`."""
    expires_at: Mapped[datetime]
