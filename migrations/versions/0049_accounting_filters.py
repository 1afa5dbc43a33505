"""Columns and an index to filter accounting and lists of jobs by schedule and reservation."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0049"
down_revision = "0048"


def upgrade() -> None:
    op.add_column("deleted_attempts", sa.Column("schedule_id", sa.String(64)))
    op.add_column("deleted_attempts", sa.Column("reservation", sa.String(64)))
    named = sa.text("reservation IS NOT NULL")
    op.create_index(
        "ix_jobs_reservation_id",
        "jobs",
        ["reservation", "id"],
        sqlite_where=named,
        postgresql_where=named,
    )
