"""How long the steps of elastic jobs take, by the size of their group."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0029"
down_revision = "0027"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("jobs", sa.Column("step_times", sa.JSON(), nullable=True))
