"""Tables of the media that jobs report."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from sqlalchemy import String
from sqlalchemy.orm import Mapped, mapped_column

from service.db.models.base import Base, job_key


class MediaRow(Base):
    """A value that a rank reported for a key at a step."""

    __tablename__ = "media"
    job_id: Mapped[str] = job_key()
    rank: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    kind: Mapped[str] = mapped_column(String(32), primary_key=True)
    key: Mapped[str] = mapped_column(String(128), primary_key=True)
    step: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    attempt: Mapped[int]
    value: Mapped[dict[str, Any]]
    """A `views.MediaValue`."""
    created_at: Mapped[datetime]


class MediaFileRow(Base):
    """A file that records of a job name, stored once for all records with the same content."""

    __tablename__ = "media_files"
    job_id: Mapped[str] = job_key()
    sha256: Mapped[str] = mapped_column(String(64), primary_key=True)
    size_bytes: Mapped[int]
    media_type: Mapped[str] = mapped_column(String(32))


class MediaTotalsRow(Base):
    """How many media a job has."""

    __tablename__ = "media_totals"
    job_id: Mapped[str] = job_key()
    num_records: Mapped[int]
    num_series: Mapped[int]
    """Number of series that have been begun."""
    num_bytes: Mapped[int]
    """Size of all values and files that were stored, including values that were replaced."""
    num_left_out: Mapped[int]
