"""Tables of uploaded files, and of fine-tuning jobs that were created with OpenAI's protocol."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from sqlalchemy import Index, String
from sqlalchemy.orm import Mapped, mapped_column

from service.db.models.base import Base, job_key


class DataFileRow(Base):
    """A file with examples in JSON lines that a user has uploaded."""

    __tablename__ = "data_files"
    __table_args__ = (
        Index("ix_data_files_owner_state_id", "owner", "state", "id"),
        Index("ix_data_files_expires_at", "expires_at"),
    )
    id: Mapped[str] = mapped_column(String(64), primary_key=True)
    owner: Mapped[str] = mapped_column(String(255))
    name: Mapped[str]
    size_bytes: Mapped[int]
    sha256: Mapped[str] = mapped_column(String(64))
    num_lines: Mapped[int]
    """Number of examples."""
    state: Mapped[str] = mapped_column(String(16))
    """`pending` until the content is stored, `stored`, or `deleted` until the content is deleted.
    Rows that are not `stored` are invisible to users."""
    created_at: Mapped[datetime]
    changed_at: Mapped[datetime]
    expires_at: Mapped[datetime | None]
    """From this time on, the file is invisible to users. Its content is deleted as soon as no job
    reads it."""


class TuningRequestRow(Base):
    """The request of OpenAI's protocol that created a job."""

    __tablename__ = "tuning_requests"
    __table_args__ = (Index("ix_tuning_requests_owner_job_id", "owner", "job_id"),)
    job_id: Mapped[str] = job_key()
    owner: Mapped[str] = mapped_column(String(255))
    request: Mapped[dict[str, Any]]
    """The fields that a response repeats, with a number for each `auto`."""


class TuningKeyRow(Base):
    """The idempotency key of the newest request of an owner with some body, for clients that send
    no key when they repeat a request."""

    __tablename__ = "tuning_keys"
    owner: Mapped[str] = mapped_column(String(255), primary_key=True)
    fingerprint: Mapped[str] = mapped_column(String(64), primary_key=True)
    key: Mapped[str] = mapped_column(String(255))
    used_at: Mapped[datetime]
