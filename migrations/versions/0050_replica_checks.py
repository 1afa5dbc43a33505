"""Columns for comparisons of a model's replicas, and the table of slots that are withheld until an
administrator releases them."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from service.db.types import UtcDateTime

revision = "0050"
down_revision = "0049"


def upgrade() -> None:
    op.add_column("attempts", sa.Column("checked_step", sa.BigInteger()))
    op.add_column("attempts", sa.Column("corrupted_step", sa.BigInteger()))
    op.create_table(
        "withheld_slots",
        sa.Column("node_id", sa.String(128), nullable=False),
        sa.Column("job_id", sa.String(64), nullable=False),
        sa.Column("attempt", sa.BigInteger(), nullable=False),
        sa.Column("slots", sa.BigInteger(), nullable=False),
        sa.Column("resources", sa.JSON(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("since", UtcDateTime(), nullable=False),
        sa.PrimaryKeyConstraint("node_id", "job_id", "attempt", name="pk_withheld_slots"),
    )
