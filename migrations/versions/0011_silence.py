"""Attempts: the processes of each that do not answer."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"


def upgrade() -> None:
    column = sa.Column("silent", sa.JSON(none_as_null=True), nullable=True)
    op.add_column("attempts", column)
