"""Jobs whose parameter servers have resources of their own, beside those of the workers."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0039"
down_revision = "0038"
branch_labels = None
depends_on = None


def upgrade() -> None:
    for table in ("jobs", "attempts", "deleted_attempts"):
        op.add_column(table, sa.Column("servers", sa.JSON()))
