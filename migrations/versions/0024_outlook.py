"""Forecasts of starts and ends, decisions that can be replayed, and time in which a job could not
start whatever was free."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from service.db.types import BigId, UtcDateTime

revision = "0024"
down_revision = "0023"


def upgrade() -> None:
    kept_back_s = sa.Column("kept_back_s", sa.Float(53), nullable=False, server_default="0")
    op.add_column("jobs", kept_back_s)
    op.add_column("jobs", sa.Column("kept_back_since", UtcDateTime(), nullable=True))
    _partial_index("ix_jobs_first_positions", "jobs", "position", "position <= 20")
    op.create_table(
        "forecasts",
        sa.Column(
            "job_id",
            sa.String(64),
            sa.ForeignKey("jobs.id", ondelete="CASCADE", name="fk_forecasts_job_id"),
            primary_key=True,
        ),
        sa.Column("attempt", sa.BigInteger(), primary_key=True, autoincrement=False),
        sa.Column("of", sa.String(8), primary_key=True),
        sa.Column("expected_at", UtcDateTime(), nullable=True),
        sa.Column("not_before", UtcDateTime(), nullable=True),
        sa.Column("code", sa.String(64), nullable=True),
        sa.Column("message", sa.Text(), nullable=True),
        sa.Column("num_assumed", sa.BigInteger(), nullable=False),
        sa.Column("made_at", UtcDateTime(), nullable=False),
        sa.Column("first_expected_at", UtcDateTime(), nullable=True),
        sa.Column("first_made_at", UtcDateTime(), nullable=True),
        sa.Column("came_at", UtcDateTime(), nullable=True),
    )
    _partial_index("ix_forecasts_open", "forecasts", "of", "came_at IS NULL")
    _partial_index("ix_forecasts_came_at", "forecasts", "came_at", "came_at IS NOT NULL")
    op.create_table(
        "outlook",
        sa.Column("id", sa.BigInteger(), primary_key=True, autoincrement=False),
        sa.Column("made_at", UtcDateTime(), nullable=False),
        sa.Column("situation", sa.LargeBinary(), nullable=False),
        sa.Column("errors", sa.JSON(), nullable=False),
    )
    op.create_table(
        "decisions",
        sa.Column("number", BigId, primary_key=True),
        sa.Column("made_at", UtcDateTime(), nullable=False),
        sa.Column("summary", sa.JSON(), nullable=False),
        sa.Column("size_bytes", sa.BigInteger(), nullable=False),
        sa.Column("record", sa.LargeBinary(), nullable=False),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_decisions_made_at", "decisions", ["made_at"])


def _partial_index(name: str, table: str, column: str, where: str) -> None:
    op.create_index(
        name, table, [column], sqlite_where=sa.text(where), postgresql_where=sa.text(where)
    )
