"""The slots that a group was asked to give back, until it has reported what it holds since."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0021"
down_revision = "0020"


def upgrade() -> None:
    op.add_column("attempts", sa.Column("recalled", sa.JSON(), nullable=True))
