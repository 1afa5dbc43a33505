"""Begin times and deadlines of jobs, singletons, and the running times that queues allow."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from service.db.types import UtcDateTime

revision = "0044"
down_revision = "0043"


def upgrade() -> None:
    no = sa.text("false")
    op.add_column("jobs", sa.Column("begin_at", UtcDateTime()))
    op.add_column("jobs", sa.Column("deadline", UtcDateTime()))
    op.add_column("jobs", sa.Column("singleton", sa.Boolean(), nullable=False, server_default=no))
    op.add_column(
        "jobs", sa.Column("is_runtime_of_queue", sa.Boolean(), nullable=False, server_default=no)
    )
    op.add_column("queues", sa.Column("default_max_runtime_s", sa.BigInteger()))
    op.add_column("queues", sa.Column("max_runtime_s", sa.BigInteger()))
