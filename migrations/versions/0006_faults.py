"""Recoveries, preemption, hang bundles, drills, and what slots were used for."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from service.db.types import UtcDateTime

revision = "0006"
down_revision = "0004"


def upgrade() -> None:
    none_yet = sa.text("0")
    op.add_column(
        "jobs", sa.Column("recoveries", sa.BigInteger(), nullable=False, server_default=none_yet)
    )
    op.add_column("jobs", sa.Column("slot_seconds", sa.JSON(none_as_null=True), nullable=True))
    op.add_column(
        "attempts",
        sa.Column("generation", sa.BigInteger(), nullable=False, server_default=none_yet),
    )
    op.add_column("attempts", sa.Column("last_metric_step", sa.BigInteger(), nullable=True))
    op.add_column("attempts", sa.Column("slot_seconds", sa.JSON(none_as_null=True), nullable=True))
    op.add_column("attempts", sa.Column("ledger_at", UtcDateTime(), nullable=True))
    op.add_column("attempts", sa.Column("preempt_asked_at", UtcDateTime(), nullable=True))
    op.add_column("attempts", sa.Column("preempt_grace_s", sa.Float(53), nullable=True))
    op.add_column("idempotency_keys", sa.Column("drill_id", sa.String(length=64), nullable=True))
    _hangs()
    _drills()
    op.create_table(
        "slot_seconds",
        sa.Column("slot_class", sa.String(length=32), nullable=False),
        sa.Column("seconds", sa.Float(53), nullable=False),
        sa.PrimaryKeyConstraint("slot_class", name="pk_slot_seconds"),
    )


def _hangs() -> None:
    op.create_table(
        "hangs",
        sa.Column("job_id", sa.String(length=64), nullable=False),
        sa.Column("seq", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("attempt", sa.BigInteger(), nullable=False),
        sa.Column("time", UtcDateTime(), nullable=False),
        sa.Column("body", sa.JSON(none_as_null=True), nullable=False),
        sa.ForeignKeyConstraint(
            ["job_id"], ["jobs.id"], name="fk_hangs_job_id", ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("job_id", "seq", name="pk_hangs"),
    )


def _drills() -> None:
    op.create_table(
        "drills",
        sa.Column("job_id", sa.String(length=64), nullable=False),
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("attempt", sa.BigInteger(), nullable=False),
        sa.Column("kind", sa.String(length=16), nullable=False),
        sa.Column("rank", sa.BigInteger(), nullable=False),
        sa.Column("at_step", sa.BigInteger(), nullable=True),
        sa.Column("resumes", sa.Boolean(), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("step", sa.BigInteger(), nullable=True),
        sa.Column("recovery_s", sa.Float(53), nullable=True),
        sa.Column("steps_lost", sa.BigInteger(), nullable=True),
        sa.Column("message", sa.Text(), nullable=False),
        sa.Column("created_at", UtcDateTime(), nullable=False),
        sa.Column("struck_at", UtcDateTime(), nullable=True),
        sa.Column("finished_at", UtcDateTime(), nullable=True),
        sa.ForeignKeyConstraint(
            ["job_id"], ["jobs.id"], name="fk_drills_job_id", ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("job_id", "id", name="pk_drills"),
    )
    op.create_index(
        "ix_drills_waiting",
        "drills",
        ["job_id"],
        sqlite_where=sa.text("state = 'waiting'"),
        postgresql_where=sa.text("state = 'waiting'"),
    )
