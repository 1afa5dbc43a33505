"""Links that download one file of a job, once."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from sqlalchemy import ForeignKey, String
from sqlalchemy.orm import Mapped, mapped_column

from service.db.models.base import Base


class DownloadLinkRow(Base):
    """A link that has not been used. A database that is read by somebody else gives them no file:
    it has the hash of the link's secret."""

    __tablename__ = "download_links"
    secret_sha256: Mapped[str] = mapped_column(String(64), primary_key=True)
    job_id: Mapped[str] = mapped_column(String(64), ForeignKey("jobs.id", ondelete="CASCADE"))
    owner: Mapped[str] = mapped_column(String(255))
    """The name of the caller who asked for it."""
    token_id: Mapped[str | None] = mapped_column(String(64))
    """Says which token the caller had; empty on a server without tokens. None of a token that was
    removed meanwhile, which makes the link of no use."""
    target: Mapped[dict[str, Any]]
    """The `DownloadRequest`."""
    expires_at: Mapped[datetime]
