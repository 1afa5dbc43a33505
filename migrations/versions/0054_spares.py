"""Columns for the spares of groups."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0054"
down_revision = "0053"


def upgrade() -> None:
    op.add_column(
        "jobs", sa.Column("num_spares", sa.BigInteger(), nullable=False, server_default="0")
    )
    op.add_column(
        "jobs", sa.Column("spares_ready", sa.BigInteger(), nullable=False, server_default="0")
    )
