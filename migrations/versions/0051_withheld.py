"""Faults because of which nodes get no new work."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from service.db.types import UtcDateTime

revision = "0051"
down_revision = "0049"


def upgrade() -> None:
    op.create_table(
        "withheld",
        sa.Column("hostname", sa.String(255), primary_key=True),
        sa.Column("gpu", sa.String(128), primary_key=True),
        sa.Column("code", sa.String(64), primary_key=True),
        sa.Column("mark", sa.String(255), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("since", UtcDateTime(), nullable=False),
        sa.Column("is_active", sa.Boolean(), nullable=False),
    )
