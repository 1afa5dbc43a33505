"""How long the steps of elastic jobs take, by the size of their group, and their batch."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from service.db.types import UtcDateTime

revision = "0029"
down_revision = "0028"


def upgrade() -> None:
    op.add_column("jobs", sa.Column("step_times", sa.JSON(none_as_null=True), nullable=True))
    op.add_column("attempts", sa.Column("batch_size", sa.BigInteger(), nullable=True))
    op.add_column("attempts", sa.Column("batch_at", UtcDateTime(), nullable=True))
    op.create_index(
        "ix_jobs_step_times",
        "jobs",
        ["number"],
        sqlite_where=sa.text("step_times IS NOT NULL"),
        postgresql_where=sa.text("step_times IS NOT NULL"),
    )
