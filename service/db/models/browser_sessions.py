"""The table of browsers that have signed in."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import Index, String
from sqlalchemy.orm import Mapped, mapped_column

from service.db.models.base import Base


class BrowserSessionRow(Base):
    """A browser that stays signed in. Only hashes of its secrets are stored, so that a reader of
    the database can't sign in."""

    __tablename__ = "browser_sessions"
    __table_args__ = (
        Index("ix_browser_sessions_owner_created_at", "owner", "created_at"),
        Index("ix_browser_sessions_expires_at", "expires_at"),
    )
    cookie_sha256: Mapped[str] = mapped_column(String(64), primary_key=True)
    key_sha256: Mapped[str] = mapped_column(String(64))
    """Hash of the key that changes need in addition to the cookie."""
    owner: Mapped[str] = mapped_column(String(255))
    token_id: Mapped[str] = mapped_column(String(64))
    """Id of the token with which the user signed in. The session ends when the token is removed or
    replaced."""
    created_at: Mapped[datetime]
    expires_at: Mapped[datetime]
