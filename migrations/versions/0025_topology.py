"""The level of the topology of which one domain must hold a job."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0025"
down_revision = "0024"


def upgrade() -> None:
    op.add_column("jobs", sa.Column("required_topology", sa.String(63), nullable=True))
