"""Schedules, which submit jobs again and again, and the jobs that they submitted."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from service.db.types import BigId, UtcDateTime

revision = "0047"
down_revision = "0046"


def upgrade() -> None:
    op.create_table(
        "schedules",
        sa.Column("id", sa.String(64), primary_key=True),
        sa.Column("name", sa.String(63), nullable=False),
        sa.Column("owner", sa.String(255), nullable=False),
        sa.Column("cron", sa.String(256), nullable=False),
        sa.Column("time_zone", sa.String(64), nullable=False),
        sa.Column("overlap", sa.String(16), nullable=False),
        sa.Column("missed", sa.String(16), nullable=False),
        sa.Column("deadline_s", sa.BigInteger()),
        sa.Column("document", sa.JSON(), nullable=False),
        sa.Column("code", sa.String(64)),
        sa.Column("version", sa.BigInteger(), nullable=False),
        sa.Column("decided_until", UtcDateTime(), nullable=False),
        sa.Column("next_at", UtcDateTime()),
        sa.Column("paused_reason", sa.Text()),
        sa.Column("created_at", UtcDateTime(), nullable=False),
        sa.Column("changed_at", UtcDateTime(), nullable=False),
    )
    op.create_index("uq_schedules_owner_name", "schedules", ["owner", "name"], unique=True)
    for column in ("next_at", "code"):
        _partial_index(f"ix_schedules_{column}", "schedules", [column], f"{column} IS NOT NULL")
    op.create_table(
        "schedule_runs",
        sa.Column("number", BigId, primary_key=True),
        sa.Column(
            "schedule_id",
            sa.String(64),
            sa.ForeignKey("schedules.id", ondelete="CASCADE"),
            nullable=False,
        ),
        sa.Column("at", UtcDateTime(), nullable=False),
        sa.Column("outcome", sa.String(16), nullable=False),
        sa.Column("message", sa.Text()),
        sa.Column("problem", sa.JSON()),
        sa.Column("job_id", sa.String(64)),
        sa.Column("array_id", sa.String(64)),
        sa.Column("decided_at", UtcDateTime(), nullable=False),
        sqlite_autoincrement=True,
    )
    op.create_index(
        "uq_schedule_runs_schedule_id_at", "schedule_runs", ["schedule_id", "at"], unique=True
    )
    op.add_column("jobs", sa.Column("schedule_id", sa.String(64)))
    op.add_column("jobs", sa.Column("scheduled_at", sa.String(32)))
    of_schedule = "schedule_id IS NOT NULL"
    _partial_index("ix_jobs_schedule_id_id", "jobs", ["schedule_id", "id"], of_schedule)
    unfinished = f"{of_schedule} AND finished_at IS NULL"
    _partial_index("ix_jobs_unfinished_runs", "jobs", ["schedule_id"], unfinished)


def _partial_index(name: str, table: str, columns: list[str], condition: str) -> None:
    where = sa.text(condition)
    op.create_index(name, table, columns, sqlite_where=where, postgresql_where=where)
