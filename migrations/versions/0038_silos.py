"""Jobs whose workers have homes: the labels of their nodes, and the URLs of the data there."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0038"
down_revision = "0037"


def upgrade() -> None:
    for name in ("homes", "silo_sources"):
        op.add_column("jobs", sa.Column(name, sa.JSON()))
