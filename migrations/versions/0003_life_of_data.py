"""Where a job starts from, how full the storage is, and outlines of metric chunks."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from service.db.types import UtcDateTime

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    op.add_column("jobs", sa.Column("init_from", sa.JSON(none_as_null=True), nullable=True))
    op.add_column("jobs", sa.Column("init_from_job", sa.String(length=64), nullable=True))
    op.create_index(
        "ix_jobs_init_from_job",
        "jobs",
        ["init_from_job"],
        sqlite_where=sa.text("init_from_job IS NOT NULL"),
        postgresql_where=sa.text("init_from_job IS NOT NULL"),
    )
    op.create_index(
        "ix_jobs_finished_at",
        "jobs",
        ["finished_at"],
        sqlite_where=sa.text("finished_at IS NOT NULL"),
        postgresql_where=sa.text("finished_at IS NOT NULL"),
    )
    op.create_table(
        "storage_state",
        sa.Column("id", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("used_bytes", sa.BigInteger(), nullable=True),
        sa.Column("free_bytes", sa.BigInteger(), nullable=True),
        sa.Column("problem", sa.Text(), nullable=True),
        sa.Column("updated_at", UtcDateTime(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_storage_state"),
    )
    op.create_index("ix_metric_chunks_last_step", "metric_chunks", ["job_id", "rank", "last_step"])
    # Chunks of before have none, and are read whole.
    op.add_column("metric_chunks", sa.Column("outline", sa.LargeBinary(), nullable=True))
