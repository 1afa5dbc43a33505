"""Sweeps: arrays whose jobs differ by the values of parameters."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0023"
down_revision = "0022"


def upgrade() -> None:
    op.create_table(
        "sweeps",
        sa.Column("array_id", sa.String(64), primary_key=True),
        sa.Column("sweep", sa.JSON(none_as_null=True), nullable=False),
        sa.Column("base", sa.JSON(none_as_null=True), nullable=False),
        sa.Column("num_trials", sa.BigInteger(), nullable=False),
    )
    op.create_table(
        "trials",
        sa.Column(
            "job_id", sa.String(64), sa.ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True
        ),
        sa.Column("array_id", sa.String(64), nullable=False),
        sa.Column("array_index", sa.BigInteger(), nullable=False),
        sa.Column("parameters", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("value", sa.Float(53), nullable=True),
        sa.Column("value_step", sa.BigInteger(), nullable=True),
        sa.Column("last_step", sa.BigInteger(), nullable=True),
        sa.Column("rung", sa.BigInteger(), nullable=True),
    )
    op.create_index(
        "uq_trials_array_id_array_index", "trials", ["array_id", "array_index"], unique=True
    )
    op.create_table(
        "trial_rungs",
        sa.Column("array_id", sa.String(64), primary_key=True),
        sa.Column("rung", sa.BigInteger(), primary_key=True, autoincrement=False),
        sa.Column(
            "job_id", sa.String(64), sa.ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True
        ),
        sa.Column("value", sa.Float(53), nullable=True),
    )
    op.create_index("ix_trial_rungs_job_id", "trial_rungs", ["job_id"])
