"""Columns for withheld hosts that have left the cluster, and for self-tests that are repeated."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from service.db.types import UtcDateTime

revision = "0055"
down_revision = "0054"


def upgrade() -> None:
    op.add_column("withheld", sa.Column("absent_since", UtcDateTime()))
    op.add_column(
        "node_checks",
        sa.Column("is_repeated", sa.Boolean(), nullable=False, server_default=sa.false()),
    )
