"""Refused chunks of logs stay in SQL; and when elastic groups have grown and shrunk."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from service.db.types import UtcDateTime

revision = "0030"
down_revision = "0029"


def upgrade() -> None:
    op.add_column("log_chunks", sa.Column("refused_at", UtcDateTime(), nullable=True))
    op.add_column("log_chunks", sa.Column("dropped_bytes", sa.BigInteger(), nullable=True))
    op.add_column("attempts", sa.Column("grown_at", UtcDateTime(), nullable=True))
    op.add_column("attempts", sa.Column("shrunk_at", UtcDateTime(), nullable=True))
    op.create_index(
        "ix_log_chunks_refused",
        "log_chunks",
        ["job_id"],
        sqlite_where=sa.text("refused_at IS NOT NULL"),
        postgresql_where=sa.text("refused_at IS NOT NULL"),
    )
