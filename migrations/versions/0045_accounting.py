"""Columns for the accounting of attempts, including the attempts of deleted jobs."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from service.db.types import StateType, UtcDateTime

revision = "0045"
down_revision = "0044"

TIMES = ("job_id", "attempt", "created_at", "finished_at")


def upgrade() -> None:
    op.add_column("jobs", sa.Column("eligible_at", UtcDateTime()))
    for table in ("attempts", "deleted_attempts"):
        op.add_column(table, sa.Column("eligible_at", UtcDateTime()))
        op.create_index(f"ix_{table}_times", table, TIMES)
    op.add_column("attempts", sa.Column("queue", sa.String(64)))
    for table in ("attempts", "deleted_attempts", "attempt_costs"):
        op.add_column(table, sa.Column("sizes", sa.JSON()))
    for column in (
        sa.Column("name", sa.Text()),
        sa.Column("project", sa.String(255)),
        sa.Column("labels", sa.JSON()),
        sa.Column("array_id", sa.String(64)),
        sa.Column("array_index", sa.BigInteger()),
        sa.Column("state", StateType()),
        sa.Column("max_runtime_s", sa.BigInteger()),
        sa.Column("submitted_at", UtcDateTime()),
        sa.Column("started_at", UtcDateTime()),
        sa.Column("held", sa.JSON()),
        sa.Column("held_until", UtcDateTime()),
        sa.Column("world_size", sa.BigInteger()),
        sa.Column("reason_code", sa.String(64)),
        sa.Column("exit_code", sa.BigInteger()),
    ):
        op.add_column("deleted_attempts", column)
