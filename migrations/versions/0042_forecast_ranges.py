"""Forecasts have a range beside their time."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from service.db.types import UtcDateTime

revision = "0042"
down_revision = "0041"
branch_labels = None
depends_on = None


def upgrade() -> None:
    for name in ("earliest_at", "latest_at"):
        op.add_column("forecasts", sa.Column(name, UtcDateTime(), nullable=True))
