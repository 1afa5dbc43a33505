"""The receipt of a resume, and attempts by their end."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    op.add_column("attempts", sa.Column("receipt", sa.JSON(none_as_null=True), nullable=True))
    op.create_index(
        "ix_attempts_finished_at",
        "attempts",
        ["finished_at"],
        sqlite_where=sa.text("finished_at IS NOT NULL"),
        postgresql_where=sa.text("finished_at IS NOT NULL"),
    )
