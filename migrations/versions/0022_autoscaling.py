"""The newest request to Ray's autoscaler; one row."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from service.db.types import UtcDateTime

revision = "0022"
down_revision = "0021"


def upgrade() -> None:
    op.create_table(
        "autoscaling",
        sa.Column("id", sa.BigInteger(), primary_key=True, autoincrement=False),
        sa.Column("num_nodes", sa.BigInteger(), nullable=False),
        sa.Column("bundles", sa.JSON(none_as_null=True), nullable=False),
        sa.Column("asked_at", UtcDateTime(), nullable=True),
    )
