"""Columns for comparisons of a model's replicas."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0052"
down_revision = "0051"


def upgrade() -> None:
    op.add_column("attempts", sa.Column("checked_step", sa.BigInteger()))
    op.add_column("attempts", sa.Column("corrupted_step", sa.BigInteger()))
