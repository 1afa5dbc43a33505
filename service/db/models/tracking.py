"""Tables of tags, notes, experiments, reports, exports to MLflow, and values for searches."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from sqlalchemy import ForeignKey, Index, String, text
from sqlalchemy.orm import Mapped, mapped_column

from service.db.models.base import Base, job_key

IS_SHARED = "holder < 'job-'"
"""Condition for values that several jobs share. The ids of arrays and of defaults sort before job
ids."""


class JobTagRow(Base):
    """A tag of a job."""

    __tablename__ = "job_tags"
    __table_args__ = (Index("ix_job_tags_tag_job_id", "tag", "job_id"),)
    job_id: Mapped[str] = job_key()
    tag: Mapped[str] = mapped_column(String(64), primary_key=True)


class JobAnnotationRow(Base):
    """A job's notes, and the user who last changed the notes or the tags."""

    __tablename__ = "job_annotations"
    job_id: Mapped[str] = job_key()
    notes: Mapped[str]
    """Notes in Markdown."""
    revision: Mapped[int]
    """Number of times that the notes or the tags were changed."""
    updated_at: Mapped[datetime]
    updated_by: Mapped[str] = mapped_column(String(255))


class ExperimentRow(Base):
    """The notes and settings of an experiment. The jobs of an experiment are identified by their
    label."""

    __tablename__ = "experiments"
    name: Mapped[str] = mapped_column(String(255), primary_key=True)
    baseline: Mapped[str | None] = mapped_column(
        String(64), ForeignKey("jobs.id", ondelete="SET NULL"), index=True
    )
    """The job with which the other jobs of the experiment are compared."""
    notes: Mapped[str] = mapped_column(server_default=text("''"))
    """Notes in Markdown."""
    pinned: Mapped[list[Any]] = mapped_column(server_default=text("'[]'"))
    """Ids of the pinned jobs, which may have been deleted since."""
    layout: Mapped[dict[str, Any]] = mapped_column(server_default=text("'{}'"))
    """The charts of the experiment's web page; interpreted only by the page."""
    revision: Mapped[int] = mapped_column(server_default=text("0"))
    """Number of changes by users."""
    updated_at: Mapped[datetime | None]
    updated_by: Mapped[str | None] = mapped_column(String(255))


class DocumentValueRow(Base):
    """A value of a document with its JSON pointer, for searches.

    A job shares the values of another holder, and has its own rows only for values that differ. An
    array of ten thousand jobs therefore needs only a few more rows than a single job.
    `service.domain.tracking.document_values` defines how values are stored.
    """

    __tablename__ = "document_values"
    __table_args__ = (
        Index("ix_document_values_search", "pointer", "text", "number", "holder"),
        Index(
            "ix_document_values_shared",
            *("pointer", "number", "holder"),
            sqlite_where=text(IS_SHARED),
            postgresql_where=text(IS_SHARED),
        ),
        {"sqlite_with_rowid": False},
    )
    holder: Mapped[str] = mapped_column(String(64), primary_key=True)
    """Id of a job, of an array, or of shared defaults."""
    pointer: Mapped[str] = mapped_column(String(255), primary_key=True)
    """A JSON pointer. If it is empty, `text` is the holder whose values the job shares."""
    number: Mapped[float | None]
    text: Mapped[str | None] = mapped_column(String(255))


class MetricSummaryRow(Base):
    """The last value and the extremes of a series of rank 0, over all valid steps.

    While the job is running, its rows can lag several seconds behind its latest points.
    """

    __tablename__ = "metric_summaries"
    __table_args__ = (
        Index(
            "ix_metric_summaries_search", "key", "last_value", "min_value", "max_value", "job_id"
        ),
        Index("ix_metric_summaries_best", "key", "best_value", "job_id"),
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
    minimised: Mapped[bool] = mapped_column(server_default=text("false"))
    """Whether lower values are better."""
    best_value: Mapped[float | None]
    """`min_value` if lower values are better, otherwise `max_value`."""
    as_of: Mapped[datetime | None]
    """The time up to which the row covers the points that the server has received; unset for rows
    that were written before this column was added."""


class PackageListRow(Base):
    """Packages that one or more jobs have."""

    __tablename__ = "package_lists"
    sha256: Mapped[str] = mapped_column(String(64), primary_key=True)
    packages: Mapped[dict[str, Any]]
    """Version of each package, keyed by name."""


class JobPackagesRow(Base):
    """The packages of a job, as its rank 0 reported them."""

    __tablename__ = "job_packages"
    job_id: Mapped[str] = job_key()
    sha256: Mapped[str] = mapped_column(String(64), ForeignKey("package_lists.sha256"))


class SavedViewRow(Base):
    """A list of jobs that a user saved under a name."""

    __tablename__ = "saved_views"
    __table_args__ = (Index("ix_saved_views_project_name_owner", "project", "name", "owner"),)
    owner: Mapped[str] = mapped_column(String(255), primary_key=True)
    name: Mapped[str] = mapped_column(String(64), primary_key=True)
    project: Mapped[str | None] = mapped_column(String(255))
    query: Mapped[dict[str, Any]]
    """`dray.saved_views.SavedQuery`, without fields that have their default values."""
    updated_at: Mapped[datetime]


class ReportRow(Base):
    """A report: a page of Markdown with charts and tables of runs."""

    __tablename__ = "reports"
    __table_args__ = (
        Index("ix_reports_owner_id", "owner", "id"),
        Index("ix_reports_project_id", "project", "id"),
    )
    id: Mapped[str] = mapped_column(String(64), primary_key=True)
    title: Mapped[str] = mapped_column(String(300))
    text: Mapped[str]
    owner: Mapped[str] = mapped_column(String(255))
    project: Mapped[str | None] = mapped_column(String(255))
    version: Mapped[int]
    """Number of the current version, starting at 1."""
    created_at: Mapped[datetime]
    updated_at: Mapped[datetime]
    updated_by: Mapped[str] = mapped_column(String(255))


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
    """`JobRow.number` of the job, used to find jobs that have no row in this table yet."""
    run_id: Mapped[str | None] = mapped_column(String(255))
    """Unset until the run and its parameters have been created."""
    event_seq: Mapped[int] = mapped_column(server_default=text("0"))
    """Number of the latest event whose state has been exported."""
    revision: Mapped[int] = mapped_column(server_default=text("0"))
    """The latest exported revision of the job's tags and notes."""
    after_step: Mapped[int] = mapped_column(server_default=text("-1"))
    """The step up to which all points have been exported."""
    last_steps: Mapped[dict[str, Any]] = mapped_column(server_default=text("'{}'"))
    """The last exported step of each metric, keyed by name."""
    artifacts: Mapped[dict[str, Any]] = mapped_column(server_default=text("'{}'"))
    """SHA-256 of each exported artifact, by artifact id."""
    failures: Mapped[int] = mapped_column(server_default=text("0"))
    """Number of consecutive failures."""
    not_before: Mapped[datetime | None]
    """Earliest time of the next try after a failure."""
    problem: Mapped[str | None]
    is_complete: Mapped[bool] = mapped_column(server_default=text("false"))
    """Whether the job has ended and has been exported completely. Reset when tags or notes
    change."""
