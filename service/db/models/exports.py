"""How far jobs were written to other programs."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from sqlalchemy import Index, String, text
from sqlalchemy.orm import Mapped, mapped_column

from service.db.models.base import Base, job_key


class MlflowExportRow(Base):
    """How far a job was written to MLflow (`service.tracking.mlflow`)."""

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
    """The job's, by which jobs without a row are found."""
    run_id: Mapped[str | None] = mapped_column(String(255))
    """Unset until the run and its parameters are there."""
    event_seq: Mapped[int] = mapped_column(server_default=text("0"))
    """The newest event of the job whose state the run shows."""
    revision: Mapped[int] = mapped_column(server_default=text("0"))
    """That of the job's tags and notes that the run shows."""
    after_step: Mapped[int] = mapped_column(server_default=text("-1"))
    """Points of higher steps are read next."""
    last_steps: Mapped[dict[str, Any]] = mapped_column(server_default=text("'{}'"))
    """By the name of a metric, the last step that the run has."""
    artifacts: Mapped[dict[str, Any]] = mapped_column(server_default=text("'{}'"))
    """By its id, the SHA-256 of each artifact that the run has."""
    failures: Mapped[int] = mapped_column(server_default=text("0"))
    """In a row."""
    not_before: Mapped[datetime | None]
    """After a failure, when the next try may be."""
    problem: Mapped[str | None]
    is_complete: Mapped[bool] = mapped_column(server_default=text("false"))
    """The job is over, and the run has all of it. A later change of tags or notes unsets it."""
