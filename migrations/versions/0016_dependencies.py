"""Jobs that start after others, and arrays of jobs."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0016"
down_revision = "0015"


def upgrade() -> None:
    op.create_table(
        "job_dependencies",
        sa.Column("waiter", sa.String(64), primary_key=True),
        sa.Column("after_id", sa.String(64), primary_key=True),
        sa.Column("on_success", sa.Boolean(), nullable=False),
    )
    op.create_index("ix_job_dependencies_after_id", "job_dependencies", ["after_id"])
    op.add_column("jobs", sa.Column("array_id", sa.String(64), nullable=True))
    op.add_column("jobs", sa.Column("array_index", sa.BigInteger(), nullable=True))
    op.add_column("jobs", sa.Column("array_head", sa.String(64), nullable=True))
    op.add_column("jobs", sa.Column("array_max_running", sa.BigInteger(), nullable=True))
    in_array = sa.text("array_id IS NOT NULL")
    for name, columns, is_unique in (
        ("uq_jobs_array_id_array_index", ["array_id", "array_index"], True),
        ("ix_jobs_array_id_state_array_index", ["array_id", "state", "array_index"], False),
    ):
        op.create_index(
            name,
            "jobs",
            columns,
            unique=is_unique,
            sqlite_where=in_array,
            postgresql_where=in_array,
        )
    is_head = sa.text("array_head IS NOT NULL")
    op.create_index(
        "ix_jobs_array_head", "jobs", ["id"], sqlite_where=is_head, postgresql_where=is_head
    )
