"""Queues and their rules; jobs that are held, or were moved to the front."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0015"
down_revision = "0014"

AMOUNTS = ("quota", "limit", "user_limit")
COUNTS = ("max_running", "max_running_per_user", "max_queued", "max_queued_per_user")


def upgrade() -> None:
    op.create_table(
        "queues",
        sa.Column("name", sa.String(64), primary_key=True),
        sa.Column("weight", sa.Float(53), server_default=sa.text("1"), nullable=False),
        *(
            sa.Column(name, sa.JSON(), server_default=sa.text("'{}'"), nullable=False)
            for name in AMOUNTS
        ),
        *(sa.Column(name, sa.BigInteger(), nullable=True) for name in COUNTS),
        sa.Column("max_priority", sa.BigInteger(), server_default=sa.text("100"), nullable=False),
    )
    op.execute("INSERT INTO queues (name) SELECT 'default' UNION SELECT queue FROM jobs")
    op.add_column("jobs", sa.Column("held_by", sa.String(255), nullable=True))
    rank = sa.Column("rank", sa.BigInteger(), server_default=sa.text("0"), nullable=False)
    op.add_column("jobs", rank)
    op.drop_index("ix_jobs_state_priority_number", "jobs")
    order = ["state", "priority", "rank", "number"]
    op.create_index("ix_jobs_state_priority_rank_number", "jobs", order)
    unfinished = sa.text("finished_at IS NULL")
    op.create_index(
        "ix_jobs_unfinished",
        "jobs",
        ["queue", "state", "owner"],
        sqlite_where=unfinished,
        postgresql_where=unfinished,
    )
