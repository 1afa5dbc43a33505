"""Reservations of nodes, and the reservations that jobs name."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from service.db.types import UtcDateTime

revision = "0046"
down_revision = "0045"


def upgrade() -> None:
    op.create_table(
        "reservations",
        sa.Column("name", sa.String(64), nullable=False),
        sa.Column("begins_at", UtcDateTime(), nullable=False),
        sa.Column("ends_at", UtcDateTime(), nullable=False),
        sa.Column("users", sa.JSON(), nullable=False),
        sa.Column("queues", sa.JSON(), nullable=False),
        sa.Column("projects", sa.JSON(), nullable=False),
        sa.Column("nodes", sa.JSON(), nullable=False),
        sa.Column("node_labels", sa.JSON(), nullable=False),
        sa.Column("num_nodes", sa.BigInteger()),
        sa.Column("num_gpus", sa.BigInteger()),
        sa.Column("all_nodes", sa.Boolean(), nullable=False),
        sa.Column("accepts_unnamed", sa.Boolean(), nullable=False),
        sa.Column("flex", sa.Boolean(), nullable=False),
        sa.Column("at_begin", sa.String(16), nullable=False),
        sa.Column("at_end", sa.String(16), nullable=False),
        sa.Column("comment", sa.Text(), nullable=False),
        sa.Column("created_by", sa.String(255), nullable=False),
        sa.Column("created_at", UtcDateTime(), nullable=False),
        sa.Column("chosen", sa.JSON(), server_default=sa.text("'[]'"), nullable=False),
        sa.PrimaryKeyConstraint("name", name="pk_reservations"),
    )
    op.create_index("ix_reservations_ends_at", "reservations", ["ends_at"])
    op.add_column("jobs", sa.Column("reservation", sa.String(64)))
