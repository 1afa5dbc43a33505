"""Samples of what the ranks of jobs and their nodes use."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from service.db.types import BigId

revision = "0034"
down_revision = "0033"


def upgrade() -> None:
    op.create_table(
        "system_metrics",
        sa.Column("id", BigId, primary_key=True),
        sa.Column(
            "job_id",
            sa.String(64),
            sa.ForeignKey("jobs.id", ondelete="CASCADE", name="fk_system_metrics_job_id"),
            nullable=False,
        ),
        sa.Column("first_rank", sa.BigInteger(), nullable=False),
        sa.Column("is_lone", sa.Boolean(), nullable=False),
        sa.Column("mean_of", sa.BigInteger(), nullable=False),
        sa.Column("num_samples", sa.BigInteger(), nullable=False),
        sa.Column("last_time", sa.BigInteger(), nullable=False),
        sa.Column("points", sa.LargeBinary(), nullable=False),
    )
    op.create_index(
        "ix_system_metrics_job_id_first_rank", "system_metrics", ["job_id", "first_rank"]
    )
