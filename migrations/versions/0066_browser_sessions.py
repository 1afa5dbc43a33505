"""Browsers that stay signed in."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from service.db.types import UtcDateTime

revision = "0066"
down_revision = "0065"


def upgrade() -> None:
    op.create_table(
        "browser_sessions",
        sa.Column("cookie_sha256", sa.String(64), primary_key=True),
        sa.Column("key_sha256", sa.String(64), nullable=False),
        sa.Column("owner", sa.String(255), nullable=False),
        sa.Column("token_id", sa.String(64), nullable=False),
        sa.Column("created_at", UtcDateTime(), nullable=False),
        sa.Column("expires_at", UtcDateTime(), nullable=False),
    )
    op.create_index(
        "ix_browser_sessions_owner_created_at", "browser_sessions", ["owner", "created_at"]
    )
    op.create_index("ix_browser_sessions_expires_at", "browser_sessions", ["expires_at"])
