"""Reports of attempts, files of attempts, and links to download a file."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from sqlalchemy import ForeignKey, ForeignKeyConstraint, Index, String, text
from sqlalchemy.orm import Mapped, mapped_column

from service.db.models.base import Base, job_key
from service.db.types import BigId


class MetricChunkRow(Base):
    """Up to `series.CHUNK_POINTS` points of one series of one attempt, by rising step."""

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
    """Whether this is the newest chunk of its series: later points must have a higher step."""
    count: Mapped[int]
    first_step: Mapped[int]
    first_value: Mapped[float | None]
    """Unset means NaN, here and in `last_value`: SQLite has no NaN."""
    last_step: Mapped[int]
    last_value: Mapped[float | None]
    min_step: Mapped[int | None]
    min_value: Mapped[float | None]
    max_step: Mapped[int | None]
    max_value: Mapped[float | None]
    nan_step: Mapped[int | None]
    outline: Mapped[bytes | None]
    """Extremes of each `series.BLOCK_POINTS` points; unset if an older dray wrote the chunk."""
    points: Mapped[bytes]


class RecentMetricsRow(Base):
    """The newest points of all series of an attempt, from one reply, until they move to chunks.

    The first points of a series are always in a chunk. Rows are in the order of `id`.
    """

    __tablename__ = "recent_metrics"
    __table_args__ = (Index("ix_recent_metrics_job_id_attempt", "job_id", "attempt"),)
    id: Mapped[int] = mapped_column(BigId, primary_key=True)
    job_id: Mapped[str] = mapped_column(String(64), ForeignKey("jobs.id", ondelete="CASCADE"))
    attempt: Mapped[int]
    last_step: Mapped[int]
    """The highest step of these points."""
    points: Mapped[bytes]
    """`service.domain.series`"""


class SystemMetricsRow(Base):
    """Samples of the system metrics of some ranks of a job, over all of its attempts."""

    __tablename__ = "system_metrics"
    __table_args__ = (Index("ix_system_metrics_job_id_first_rank", "job_id", "first_rank"),)
    id: Mapped[int] = mapped_column(BigId, primary_key=True)
    job_id: Mapped[str] = mapped_column(String(64), ForeignKey("jobs.id", ondelete="CASCADE"))
    first_rank: Mapped[int]
    """The first rank that the row may have (`service.domain.system_metrics.RANKS_OF_ROW`)."""
    is_lone: Mapped[bool]
    """Whether the row has one original sample, and will be joined with others."""
    mean_of: Mapped[int]
    """The number of original samples of which each sample is the mean."""
    num_samples: Mapped[int]
    last_time: Mapped[int]
    """Unix seconds of the newest sample."""
    points: Mapped[bytes]
    """`service.domain.system_metrics.pack`"""


class LogChunkRow(Base):
    """Consecutive lines of one rank: in `text` while the chunk is open, then in storage."""

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
    """The incarnation of the process that wrote the last line."""
    next_number: Mapped[int]
    """The number that this process gives its next line. A higher number means that lines were
    lost."""
    text: Mapped[str | None]
    """JSON arrays, one per line: `[time, line]`, or `[time, note, lost]` where lines were lost."""
    storage_key: Mapped[str | None]
    left_out: Mapped[int | None]
    """The number of lines left out before the rank's newest lines, which are kept once the job's
    log has reached its limit. None for the lines before the limit."""
    refused_at: Mapped[datetime | None]
    """When the storage refused the chunk. The chunk is closed, and stays in `text` until the
    storage accepts it."""
    dropped_bytes: Mapped[int | None]
    """The bytes of lines that were dropped from this refused chunk, and from earlier ones, because
    no space was free; `text` is a note about it."""


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


class DownloadLinkRow(Base):
    """A link that has not been used. The row has only a hash of the link's secret, so that a reader
    of the database can't download the file."""

    __tablename__ = "download_links"
    secret_sha256: Mapped[str] = mapped_column(String(64), primary_key=True)
    job_id: Mapped[str] = mapped_column(String(64), ForeignKey("jobs.id", ondelete="CASCADE"))
    owner: Mapped[str] = mapped_column(String(255))
    """The name of the caller who requested the link."""
    token_id: Mapped[str | None] = mapped_column(String(64))
    """The id of the caller's token; empty on a server without tokens. None if the token was removed
    since, which makes the link useless."""
    target: Mapped[dict[str, Any]]
    """The `DownloadRequest`."""
    expires_at: Mapped[datetime]
