"""The newest lines of a log that has reached its limit, and how many are left out before them."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"


def upgrade() -> None:
    op.add_column("log_chunks", sa.Column("left_out", sa.BigInteger(), nullable=True))
