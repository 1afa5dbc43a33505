"""When slots were asked back, until when they are not asked back again, when an attempt ran, and
the slots that attempts of deleted jobs had."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from service.db.types import UtcDateTime

revision = "0027"
down_revision = "0026"


def upgrade() -> None:
    for name in ("recalled_at", "recall_after", "running_at"):
        op.add_column("attempts", sa.Column(name, UtcDateTime(), nullable=True))
    op.create_table(
        "deleted_attempts",
        sa.Column("job_id", sa.String(64), primary_key=True),
        sa.Column("attempt", sa.BigInteger(), primary_key=True, autoincrement=False),
        sa.Column("queue", sa.String(64), nullable=False),
        sa.Column("owner", sa.String(255), nullable=False),
        sa.Column("slices", sa.JSON(none_as_null=True), nullable=False),
        sa.Column("bundle", sa.JSON(none_as_null=True), nullable=False),
        sa.Column("created_at", UtcDateTime(), nullable=False),
        sa.Column("finished_at", UtcDateTime(), nullable=False),
    )
    op.create_index("ix_deleted_attempts_finished_at", "deleted_attempts", ["finished_at"])
