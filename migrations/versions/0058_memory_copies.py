"""The copies of a job's state in the memory of its ranks, and the memory of nodes."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0058"
down_revision = "0057"


def upgrade() -> None:
    op.add_column("jobs", sa.Column("memory_copies", sa.JSON(), nullable=True))
    op.add_column("nodes", sa.Column("memory_bytes", sa.BigInteger(), nullable=True))
