"""Weights of the users of a queue."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0026"
down_revision = "0025"


def upgrade() -> None:
    weights = sa.Column("user_weights", sa.JSON(), server_default=sa.text("'{}'"), nullable=False)
    op.add_column("queues", weights)
