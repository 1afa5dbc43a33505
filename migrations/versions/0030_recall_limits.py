"""When slots were asked back, until when they are not asked back again, and when an attempt ran."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from service.db.types import UtcDateTime

revision = "0030"
down_revision = "0024"
branch_labels = None
depends_on = None


def upgrade() -> None:
    for name in ("recalled_at", "recall_after", "running_at"):
        op.add_column("attempts", sa.Column(name, UtcDateTime(), nullable=True))
