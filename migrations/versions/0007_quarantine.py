"""Slots that are kept from use, by node."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"


def upgrade() -> None:
    op.add_column(
        "nodes", sa.Column("quarantined", sa.JSON(), nullable=False, server_default=sa.text("'[]'"))
    )
