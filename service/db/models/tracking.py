"""Tags, notes, experiments, exports to MLflow, and the values that searches use."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from sqlalchemy import ForeignKey, Index, String, text
from sqlalchemy.orm import Mapped, mapped_column

from service.db.models.base import Base, job_key


class JobTagRow(Base):
    """A tag of a job."""

    __tablename__ = "job_tags"
    __table_args__ = (Index("ix_job_tags_tag_job_id", "tag", "job_id"),)
    job_id: Mapped[str] = job_key()
    tag: Mapped[str] = mapped_column(String(64), primary_key=True)


class JobAnnotationRow(Base):
    """Notes about a job, and the user who last changed them or the job's tags."""

    __tablename__ = "job_annotations"
    job_id: Mapped[str] = job_key()
    notes: Mapped[str]
    """Markdown"""
    revision: Mapped[int]
    """The number of changes of notes and tags so far."""
    updated_at: Mapped[datetime]
    updated_by: Mapped[str] = mapped_column(String(255))


class ExperimentRow(Base):
    """The baseline of an experiment. The experiment's jobs have its label."""

    __tablename__ = "experiments"
    name: Mapped[str] = mapped_column(String(255), primary_key=True)
    baseline: Mapped[str | None] = mapped_column(
        String(64), ForeignKey("jobs.id", ondelete="SET NULL"), index=True
    )
    """The job with which the others are compared."""


class DocumentValueRow(Base):
    """A value of a document and its JSON pointer, for searches.

    A job shares the values of another holder, and has rows only where its document differs, so that
    an array of ten thousand jobs needs few more rows than one job.
    `service.domain.tracking.document_values` defines how a value is stored.
    """

    __tablename__ = "document_values"
    __table_args__ = (
        Index("ix_document_values_search", "pointer", "text", "number", "holder"),
        {"sqlite_with_rowid": False},
    )
    holder: Mapped[str] = mapped_column(String(64), primary_key=True)
    """Id of a job, of an array, or of defaults that jobs share."""
    pointer: Mapped[str] = mapped_column(String(255), primary_key=True)
    """Empty in the row of a job whose `text` is the holder of the shared values."""
    number: Mapped[float | None]
    text: Mapped[str | None] = mapped_column(String(255))


class MetricSummaryRow(Base):
    """The newest value of a series of rank 0 and its extremes, over all steps that count.

    While the job runs, the rows may be some seconds older than its newest points.
    """

    __tablename__ = "metric_summaries"
    __table_args__ = (
        Index(
            "ix_metric_summaries_search", "key", "last_value", "min_value", "max_value", "job_id"
        ),
        {"sqlite_with_rowid": False},
    )
    job_id: Mapped[str] = job_key()
    key: Mapped[str] = mapped_column(primary_key=True)
    last_step: Mapped[int]
    last_value: Mapped[float | None]
    """Unset means NaN."""
    min_step: Mapped[int | None]
    min_value: Mapped[float | None]
    """Unset, like `max_value`, if every value is NaN."""
    max_step: Mapped[int | None]
    max_value: Mapped[float | None]


class MlflowExportRow(Base):
    """The progress of a job's export to MLflow (`service.tracking.mlflow`)."""

    __tablename__ = "mlflow_exports"
    __table_args__ = (
        Index("ix_mlflow_exports_number", "number"),
        Index(
            "ix_mlflow_exports_open",
            "number",
            sqlite_where=text("NOT is_complete"),
            postgresql_where=text("NOT is_complete"),
        ),
    )
    job_id: Mapped[str] = job_key()
    number: Mapped[int]
    """`JobRow.number`, by which jobs without a row are found."""
    run_id: Mapped[str | None] = mapped_column(String(255))
    """Unset until the run and its parameters exist."""
    event_seq: Mapped[int] = mapped_column(server_default=text("0"))
    """The newest event whose state the run shows."""
    revision: Mapped[int] = mapped_column(server_default=text("0"))
    """The revision of the job's tags and notes that the run shows."""
    after_step: Mapped[int] = mapped_column(server_default=text("-1"))
    """Points of higher steps are read next."""
    last_steps: Mapped[dict[str, Any]] = mapped_column(server_default=text("'{}'"))
    """Maps the name of a metric to the last step that the run has."""
    artifacts: Mapped[dict[str, Any]] = mapped_column(server_default=text("'{}'"))
    """Maps the id of each artifact that the run has to its SHA-256."""
    failures: Mapped[int] = mapped_column(server_default=text("0"))
    """The number of failures in a row."""
    not_before: Mapped[datetime | None]
    """The earliest time of the next try after a failure."""
    problem: Mapped[str | None]
    is_complete: Mapped[bool] = mapped_column(server_default=text("false"))
    """Whether the job has ended and the run has all of it. A change of tags or notes unsets it."""
