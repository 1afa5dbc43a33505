"""Parents of queues, and the limits of what queues borrow and lend."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0048"
down_revision = "0047"


def upgrade() -> None:
    empty = sa.text("'{}'")
    no = sa.text("false")
    op.add_column("queues", sa.Column("parent", sa.String(64)))
    op.add_column("queues", sa.Column("is_parent", sa.Boolean(), nullable=False, server_default=no))
    for name in ("borrowing_limit", "lending_limit"):
        op.add_column("queues", sa.Column(name, sa.JSON(), nullable=False, server_default=empty))
