"""A column for the colour that a user chose for a job's curves."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0061"
down_revision = "0060"


def upgrade() -> None:
    op.add_column("jobs", sa.Column("colour", sa.BigInteger()))
