"""The media that jobs report: values that are not numbers, and their files."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from service.db.types import UtcDateTime

revision = "0068"
down_revision = "0066"


def upgrade() -> None:
    op.create_table(
        "media",
        _of_job(),
        sa.Column("rank", sa.BigInteger(), primary_key=True, autoincrement=False),
        sa.Column("kind", sa.String(32), primary_key=True),
        sa.Column("key", sa.String(128), primary_key=True),
        sa.Column("step", sa.BigInteger(), primary_key=True, autoincrement=False),
        sa.Column("attempt", sa.BigInteger(), nullable=False),
        sa.Column("value", sa.JSON(), nullable=False),
        sa.Column("created_at", UtcDateTime(), nullable=False),
    )
    op.create_table(
        "media_files",
        _of_job(),
        sa.Column("sha256", sa.String(64), primary_key=True),
        sa.Column("size_bytes", sa.BigInteger(), nullable=False),
        sa.Column("media_type", sa.String(32), nullable=False),
    )
    op.create_table(
        "media_totals",
        _of_job(),
        sa.Column("num_records", sa.BigInteger(), nullable=False),
        sa.Column("num_series", sa.BigInteger(), nullable=False),
        sa.Column("num_bytes", sa.BigInteger(), nullable=False),
        sa.Column("num_left_out", sa.BigInteger(), nullable=False),
    )


def _of_job() -> sa.Column[str]:
    key = sa.ForeignKey("jobs.id", ondelete="CASCADE")
    return sa.Column("job_id", sa.String(64), key, primary_key=True)
